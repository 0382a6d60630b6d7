"""Selectors: which tokens are kept."""
