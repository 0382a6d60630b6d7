"""The engine: slots, attention and eviction of one layer, in torch alone."""
