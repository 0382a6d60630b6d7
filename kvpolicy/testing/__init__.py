"""Conformance checks for custom allocators, selectors, codecs and readers."""

from kvpolicy.testing.conformance import check as check
