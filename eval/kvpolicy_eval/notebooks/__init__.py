"""The notebooks of the documentation: their execution, and their pages."""
