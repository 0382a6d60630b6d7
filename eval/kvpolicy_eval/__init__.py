"""Evaluation of kvpolicy: prompts and tasks, sweeps and reports, benchmarks, and the training of the embedded model."""
