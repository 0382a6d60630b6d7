"""The version of kvpolicy."""

__version__ = "0.2.0"
