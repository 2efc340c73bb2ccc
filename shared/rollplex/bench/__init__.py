"""Benches: what sharing prefixes gains, what overlapping them gains, and what both do. No torch but
where it says so.

    workload    writes a model, real pictures (`pictures`, `layouts`) and a configuration (`recipe`) of exactly known
                token counts
    schedules   runs every mode as real nodes, row by row (`nodes`), into a folder that can be gone on with (`folder`)
    measure     one run directory ─► one row             machine, facts   on what, and of what, it was measured
    summary     rows ─► medians, spreads, gains          ceilings         what could be gained at most
    scaling     rows with fewer prompts                  window           what prefix work costs beside the rollout
    report      the result as tables and sentences       plot             as bars
    gradients   the schedules' gradients of the same responses, compared (`gradient_files`, which needs torch)
    gap, hbm    what one run left: log-probabilities of rollout and trainer; a GPU's memory against the books

From Python: `write_workload(folder, Wanted(...))`, then `run_schedules(Plan(...), say=print)`, then `report(result)`.
"""
