"""Conformance checks for custom parts of policies."""

from kvpolicy.testing.conformance import check as check
