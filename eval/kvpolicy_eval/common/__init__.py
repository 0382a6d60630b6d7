"""Measurements and output that several rooms share."""
