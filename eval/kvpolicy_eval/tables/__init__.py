"""Measured tables of the documentation, which one command prints and puts into its pages."""
