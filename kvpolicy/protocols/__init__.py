"""Every interface of a policy: what an allocator, a selector and a codec must answer.

Strategies are frozen dataclasses of hyper-parameters. All tensors live in the cache, in NamedTuples that the
strategy names. Shapes: B batch, H KV heads, G query heads per KV head, Hq = H*G, N tokens on offer, S slots,
C coded slots, D head dim, L layers.
"""

from kvpolicy.protocols.choosing import Allocator as Allocator
from kvpolicy.protocols.choosing import DecodeMode as DecodeMode
from kvpolicy.protocols.choosing import Forward as Forward
from kvpolicy.protocols.choosing import Needs as Needs
from kvpolicy.protocols.choosing import Probes as Probes
from kvpolicy.protocols.choosing import Seen as Seen
from kvpolicy.protocols.choosing import Selector as Selector
from kvpolicy.protocols.choosing import State as State
from kvpolicy.protocols.choosing import View as View
from kvpolicy.protocols.storing import ALL_HEADS as ALL_HEADS
from kvpolicy.protocols.storing import At as At
from kvpolicy.protocols.storing import Book as Book
from kvpolicy.protocols.storing import Codec as Codec
from kvpolicy.protocols.storing import Codes as Codes
from kvpolicy.protocols.storing import Layout as Layout
from kvpolicy.protocols.storing import ModelInfo as ModelInfo
from kvpolicy.protocols.storing import Stage as Stage
from kvpolicy.protocols.storing import Store as Store
from kvpolicy.protocols.storing import Traits as Traits
from kvpolicy.protocols.storing import Turn as Turn
