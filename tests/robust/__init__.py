"""Hostile use: the right answer or one clear sentence, and never a wrong answer in silence."""
