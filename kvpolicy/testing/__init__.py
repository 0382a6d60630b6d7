"""Conformance checks for custom allocators, selectors and codecs."""

from kvpolicy.testing.conformance import check as check
