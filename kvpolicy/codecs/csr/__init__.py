"""CSR, and the dictionaries that calibrations make for it."""
