"""Numeric primitives that codecs and the engine share."""
