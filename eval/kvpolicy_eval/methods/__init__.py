"""Measurements of each method on the embedded model, for the table on its documentation page."""
