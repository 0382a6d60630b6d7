"""Policies on a model with real weights."""
