"""Sweeps: policies x budgets x tasks x models through lm-eval, cell by cell."""
