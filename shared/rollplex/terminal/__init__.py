"""What a terminal shows of a run that goes on: one table, redrawn in place. No torch; rich is imported where it draws.

pace + status, memory, services ──► view (plain values) ──► table (a rich renderable) ──► screen (the terminal)
"""
