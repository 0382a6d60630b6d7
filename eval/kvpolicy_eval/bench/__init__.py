"""Side-by-side measurements of the engine against the stock cache, in one process."""
