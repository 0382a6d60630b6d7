"""The pictures of the documentation, drawn from runs of the engine on the embedded model."""
