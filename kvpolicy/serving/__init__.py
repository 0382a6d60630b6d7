"""An OpenAI-compatible server whose model has a policy attached."""
