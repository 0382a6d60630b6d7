"""The pictures of the docs, each drawn by a command from a run of the engine."""
