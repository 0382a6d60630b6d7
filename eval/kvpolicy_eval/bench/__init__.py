"""Benchmarks on a CPU: times and memory under a policy, compared with the stock cache."""
