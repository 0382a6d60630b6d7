"""Comparison with other libraries, each in a separate environment and process."""
