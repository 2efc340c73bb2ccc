"""Pure descriptions of where numbers lie: parameters, K/V, shapes. No torch."""
