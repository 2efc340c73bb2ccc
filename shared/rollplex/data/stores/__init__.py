"""Where raw rows come from: one module a format behind one contract (`base`), chosen by `factory`."""
