"""Benches: what sharing prefixes gains, what overlapping them gains, and what both do. No torch.

    workload    writes a model, real pictures (`pictures`) and a configuration of exactly known token counts
    schedules   runs every mode as real nodes, row by row (`nodes`), into a folder that can be gone on with (`folder`)
    measure     one run directory ─► one row             machine, facts   on what, and of what, it was measured
    summary     rows ─► medians, spreads, gains          ceilings         what could be gained at most
    report      the result as tables and sentences       plot             as bars

From Python: `write_workload(...)`, then `run_schedules(Plan(...), say=print)`, then `report(result)`.
"""
