"""Tensor parallelism: the ranks that a model is sharded over, and how its parameters are sharded."""

from kvpolicy.parallel.runtime import share as share
from kvpolicy.statistics.ranks import Ranks as Ranks
