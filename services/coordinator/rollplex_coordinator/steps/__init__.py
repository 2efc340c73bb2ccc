"""What a loaded node does: load, sample, score, train, update, evaluate, save. Decisions come from `decisions`."""
