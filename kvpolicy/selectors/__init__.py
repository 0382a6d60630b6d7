"""Which tokens are kept."""
