"""Everything that depends on transformers: hooks, caches, and descriptions of models."""
