"""KVTC: keys and values of a cache file as quantized principal components."""
