"""Reports, notebook tables, plots and log messages."""
