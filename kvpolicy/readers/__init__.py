"""Readers: which of the kept tokens a decode step reads."""
