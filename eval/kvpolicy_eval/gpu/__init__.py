"""Throughput and memory on a GPU, compared with the stock caches and with kvpress."""
