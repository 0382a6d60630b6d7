"""Helpers for custom strategies: the division of tokens among layers, and access to the slots of a stage.

`waterfill` is for allocators, the others are for codecs. Those can be traced by `torch.compile` and do not synchronize.
"""

from kvpolicy.codecs._common import mix_by_chunks as mix_by_chunks
from kvpolicy.codecs._common import ordinary_layout as ordinary_layout
from kvpolicy.codecs._common import put as put
from kvpolicy.codecs._common import score_by_chunks as score_by_chunks
from kvpolicy.codecs._common import take as take
from kvpolicy.spec.budget import waterfill as waterfill
