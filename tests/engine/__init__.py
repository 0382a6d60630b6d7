"""Every rule of the engine, on tiny models."""
