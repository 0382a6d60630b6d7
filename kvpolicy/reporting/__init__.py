"""Reports, HTML tables, plots and log messages."""
