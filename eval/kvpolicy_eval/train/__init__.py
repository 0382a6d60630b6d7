"""Training of the embedded model, a small Llama, from scratch on one CPU thread."""
