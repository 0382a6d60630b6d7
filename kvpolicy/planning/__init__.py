"""Tokens and bytes of a cache, computed before anything runs."""
