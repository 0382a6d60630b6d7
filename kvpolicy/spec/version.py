"""The version of kvpolicy."""

__version__ = "0.1.0"
