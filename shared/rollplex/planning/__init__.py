"""A plan of memory: what it says, as data, text and picture. The coordinator computes it."""
