"""Measure what a kvpolicy costs: prompts, tasks, reports and the training of the embedded model."""
