"""kvpolicy for lm-eval: the model `kvpolicy`, the task group `kvpolicy`, and their registration.

This module imports nothing, because Python imports it at every start (see `startup`).
"""
