"""Evaluation of kvpolicy: prompts and tasks, sweeps and reports, benchmarks, and the training of the embedded model."""

import warnings

# What is measured are budgets as they are, at every size.
warnings.filterwarnings("ignore", "The budget .* leaves fewer than")
