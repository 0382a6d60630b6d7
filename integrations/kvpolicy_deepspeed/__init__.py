"""Tensor parallelism for kvpolicy: load a model sharded over ranks, and end the ranks of a script as one job."""

from kvpolicy.parallel.launch import world as world
from kvpolicy_deepspeed.launch import ranks as ranks
from kvpolicy_deepspeed.loading import load as load
