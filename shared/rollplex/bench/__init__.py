"""Benches: what sharing prefixes gains, what overlapping them gains, and what both do. No torch.

workload    writes a model, real pictures and a configuration of exactly known token counts
schedules   runs every mode as real nodes, row by row (`nodes`), into a folder that can be gone on with (`folder`)
measure     one run directory ─► one row          machine   what it was measured on
summary     rows ─► medians, spreads, gains       report    the result, as tables and sentences     plot   as bars
"""
