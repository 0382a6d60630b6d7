"""Adapters for scorers of other libraries."""

from kvpolicy.hf.adapters import KVPressScorer as KVPressScorer
from kvpolicy.hf.adapters import Scorer as Scorer
