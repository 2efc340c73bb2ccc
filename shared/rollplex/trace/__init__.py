"""Where the time of a run went: a Perfetto trace, a picture of it, and tables, all from the journal alone.

    journal ─► source (which iterations) ─► chapters (one iteration each: marks, samples, arrows)
                                              ├─► perfetto   the file for ui.perfetto.dev
                                              ├─► picture    an SVG
                                              └─► where      tables of medians
    the file ─► packets ─► query, validate

No torch, no sockets. Only `perfetto` and `packets` import the perfetto package, inside functions.
"""
