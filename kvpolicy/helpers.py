"""Helper functions for custom strategies.

`strategy` and the constraints of fields are for all kinds, `waterfill` for allocators, and the others are for codecs.
Those for codecs do not synchronize with the host, and they are traced without graph breaks.
"""

from kvpolicy.codecs.common import SingleStage as SingleStage
from kvpolicy.codecs.common import mix_by_chunks as mix_by_chunks
from kvpolicy.codecs.common import ordinary_layout as ordinary_layout
from kvpolicy.codecs.common import put as put
from kvpolicy.codecs.common import score_by_chunks as score_by_chunks
from kvpolicy.codecs.common import take as take
from kvpolicy.text.arguments import named_options as named_options
from kvpolicy.text.budget import waterfill as waterfill
from kvpolicy.text.strategy import between as between
from kvpolicy.text.strategy import checked as checked
from kvpolicy.text.strategy import finite as finite
from kvpolicy.text.strategy import fraction as fraction
from kvpolicy.text.strategy import least as least
from kvpolicy.text.strategy import odd as odd
from kvpolicy.text.strategy import strategy as strategy
from kvpolicy.text.strategy import where as where
