"""Calibrations: what codecs must know of a model, learned from its keys and values."""
