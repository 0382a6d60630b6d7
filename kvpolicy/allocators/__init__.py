"""Allocators: how many tokens each layer may keep."""
