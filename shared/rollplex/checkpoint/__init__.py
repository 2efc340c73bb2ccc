"""Checkpoints as everybody reads them: what lies beside weights, and whether a run may go on from it. No torch."""
