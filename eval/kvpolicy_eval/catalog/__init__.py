"""Lists of all methods in the code and the documentation, generated from the registry."""
