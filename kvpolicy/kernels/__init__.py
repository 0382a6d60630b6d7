"""Numerical primitives that the engine and the codecs share."""
