"""Everything that knows transformers: hooks, caches, model descriptions."""
