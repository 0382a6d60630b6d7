"""Keep the KV cache of Hugging Face language models small: any allocator, any selector, any codec.

A policy is three interchangeable parts under one budget:

    >>> import kvpolicy
    >>> kvpolicy.Policy.parse("squeeze+kvcrush/h2o+kivi:bits=4@0.2").budget
    0.2

`attach` puts it to work on a model, `plan` says beforehand what it will hold.
"""

from typing import TYPE_CHECKING, Any

from kvpolicy.allocators.pyramid import Pyramid as Pyramid
from kvpolicy.allocators.squeeze import SqueezeAttention as SqueezeAttention
from kvpolicy.allocators.uniform import Uniform as Uniform
from kvpolicy.codecs.bfp import BFP as BFP
from kvpolicy.codecs.csr import CSR as CSR
from kvpolicy.codecs.gear import GEAR as GEAR
from kvpolicy.codecs.kivi import KIVI as KIVI
from kvpolicy.codecs.kvquant import KVQuant as KVQuant
from kvpolicy.codecs.mikv import MiKV as MiKV
from kvpolicy.codecs.plain import Plain as Plain
from kvpolicy.codecs.rotate import RotateKV as RotateKV
from kvpolicy.codecs.staircase import Staircase as Staircase
from kvpolicy.codecs.tokenwise import TokenWise as TokenWise
from kvpolicy.codecs.turboquant import TurboQuant as TurboQuant
from kvpolicy.codecs.zipcache import ZipCache as ZipCache
from kvpolicy.policy import Policy as Policy
from kvpolicy.selectors.full import KeepAll as KeepAll
from kvpolicy.selectors.h2o import H2O as H2O
from kvpolicy.selectors.kvcrush import KVCrush as KVCrush
from kvpolicy.selectors.probe import ProbeSalience as ProbeSalience
from kvpolicy.selectors.snapkv import SnapKV as SnapKV
from kvpolicy.selectors.streaming import StreamingLLM as StreamingLLM
from kvpolicy.selectors.tova import TOVA as TOVA
from kvpolicy.selectors.window import SlidingWindow as SlidingWindow

if TYPE_CHECKING:
    from kvpolicy.attachment import Handle as Handle
    from kvpolicy.attachment import attach as attach
    from kvpolicy.cache import PolicyCache as PolicyCache
    from kvpolicy.distortion import Distortion as Distortion
    from kvpolicy.embedded import tiny as tiny
    from kvpolicy.planning import CachePlan as CachePlan
    from kvpolicy.planning import plan as plan
    from kvpolicy.profiling import profile as profile

__version__ = "0.1.0"

_LAZY = {
    "Handle": "kvpolicy.attachment",
    "attach": "kvpolicy.attachment",
    "PolicyCache": "kvpolicy.cache",
    "Distortion": "kvpolicy.distortion",
    "CachePlan": "kvpolicy.planning",
    "plan": "kvpolicy.planning",
    "profile": "kvpolicy.profiling",
    "tiny": "kvpolicy.embedded",
}
"""Names that need transformers, imported when they are first used: policies can be parsed without it."""


def __getattr__(name: str) -> Any:
    import importlib

    if name not in _LAZY:
        raise AttributeError(f"module 'kvpolicy' has no attribute {name!r}")
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY])
