"""Every method on every family against the slow references."""
