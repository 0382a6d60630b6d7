"""Slow, obvious versions of every method, for one row and one layer, written from the equations alone.

Nothing here is shared with `kvpolicy`, so that the two can be held against each other. Tokens are plain Python
objects, attention is the full matrix, k-means tries every partition and a codec works scalar by scalar.
"""
