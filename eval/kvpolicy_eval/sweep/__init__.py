"""A sweep: policies x budgets x tasks x models through lm-eval, one cell after the other."""
