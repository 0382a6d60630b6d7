"""Conformance checks for custom parts of policies, and the invariants of a cache."""

from kvpolicy.testing.conformance import check as check
from kvpolicy.testing.conformance import check_cache as check_cache
