"""Mergers: what becomes of a token that is not kept."""
