"""Low-rank codes, and the ranks of layers."""
