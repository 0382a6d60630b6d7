"""The report of a sweep, as an HTML page and as Markdown."""
