"""Slow, obvious versions of every method, for one row and one layer, written from the equations alone.

Nothing here is shared with `kvpolicy`, so that the two can be held against each other. Tokens are plain Python
objects, attention is the full matrix, k-means tries every partition and a codec works scalar by scalar.

The slow version of a method stands in a file of its name, such as `selectors/tova.py` or `codecs/kivi.py`. The tests
find it there, so that a new method is compared with its slow version as soon as it is registered.
"""
