"""One storage under two tensor-parallel layouts: what is shared, copied after an update, or kept twice. No torch."""
