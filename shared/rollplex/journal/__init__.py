"""What a run has written down, for everybody who reads it: the events and a read-only way to the file.

The coordinator writes the journal; the command line, traces and benches read it. No torch, no sockets.
"""
