"""What strategies are written with: division among layers, and slots of codes.

An allocator needs `waterfill`; a codec needs the others. All of them stay on the device and trace whole.
"""

from kvpolicy.codecs._common import mix_by_chunks as mix_by_chunks
from kvpolicy.codecs._common import ordinary_layout as ordinary_layout
from kvpolicy.codecs._common import put as put
from kvpolicy.codecs._common import score_by_chunks as score_by_chunks
from kvpolicy.codecs._common import take as take
from kvpolicy.spec.budget import waterfill as waterfill
