"""What a sweep found, as one page or as Markdown."""
