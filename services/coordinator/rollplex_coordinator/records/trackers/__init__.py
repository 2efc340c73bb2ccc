"""Trackers of other makers, each in a process of its own: `tracker` feeds it, `__main__` and `backends` are in it."""
