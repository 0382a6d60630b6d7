"""Side by side with the peers, each in its own environment and process."""
