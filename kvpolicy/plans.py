"""Plans: tokens and bytes of a cache before anything runs."""

from kvpolicy.planning.result import CachePlan as CachePlan
from kvpolicy.planning.result import LayerPlan as LayerPlan
