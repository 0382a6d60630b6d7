"""Finding a policy that differs by layer, from what it does to a model's outputs on the user's text."""
