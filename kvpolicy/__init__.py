"""Keep the KV cache of Hugging Face language models small: any allocator, any selector, any merger, any codec.

A policy consists of interchangeable parts and a budget:

    >>> import kvpolicy
    >>> kvpolicy.Policy.parse("squeeze+kvcrush/h2o+kivi:bits=4@0.2").budget
    0.2

`attach` applies it to a model, and `plan` computes in advance what its cache will hold.
"""

from typing import TYPE_CHECKING, Any

from kvpolicy.registry import built_in_classes as _built_in_classes
from kvpolicy.text.version import __version__ as __version__

if TYPE_CHECKING:
    # generated: imports
    from kvpolicy.allocators.adakv import AdaKV as AdaKV
    from kvpolicy.allocators.cake import CAKE as CAKE
    from kvpolicy.allocators.d2olayers import D2OLayers as D2OLayers
    from kvpolicy.allocators.duo import DuoAttention as DuoAttention
    from kvpolicy.allocators.dynamickv import DynamicKV as DynamicKV
    from kvpolicy.allocators.even import Even as Even
    from kvpolicy.allocators.kvcompose import KVCompose as KVCompose
    from kvpolicy.allocators.lava import LAVa as LAVa
    from kvpolicy.allocators.mass import AttentionMass as AttentionMass
    from kvpolicy.allocators.pyramid import Pyramid as Pyramid
    from kvpolicy.allocators.simlayer import SimLayerKV as SimLayerKV
    from kvpolicy.allocators.squeeze import SqueezeAttention as SqueezeAttention
    from kvpolicy.allocators.threshold import GlobalThreshold as GlobalThreshold
    from kvpolicy.allocators.uniform import Uniform as Uniform
    from kvpolicy.allocators.zigzag import ZigZagKV as ZigZagKV
    from kvpolicy.calibration.layer_profile import profile as profile
    from kvpolicy.codecs.bfp import BFP as BFP
    from kvpolicy.codecs.csr.csr import CSR as CSR
    from kvpolicy.codecs.gear import GEAR as GEAR
    from kvpolicy.codecs.kivi import KIVI as KIVI
    from kvpolicy.codecs.kvarn import KVarN as KVarN
    from kvpolicy.codecs.kvquant import KVQuant as KVQuant
    from kvpolicy.codecs.lowrank.lowrank import LowRank as LowRank
    from kvpolicy.codecs.mikv import MiKV as MiKV
    from kvpolicy.codecs.minicache import MiniCache as MiniCache
    from kvpolicy.codecs.oscar import OSCAR as OSCAR
    from kvpolicy.codecs.plain import Plain as Plain
    from kvpolicy.codecs.rotate import RotateKV as RotateKV
    from kvpolicy.codecs.staircase import Staircase as Staircase
    from kvpolicy.codecs.think import ThinK as ThinK
    from kvpolicy.codecs.tokenwise import TokenWise as TokenWise
    from kvpolicy.codecs.turboquant import TurboQuant as TurboQuant
    from kvpolicy.codecs.zipcache import ZipCache as ZipCache
    from kvpolicy.distortion import Distortion as Distortion
    from kvpolicy.hf.attach import Handle as Handle
    from kvpolicy.hf.attach import attach as attach
    from kvpolicy.hf.cache import PolicyCache as PolicyCache
    from kvpolicy.hf.embedded import tiny as tiny
    from kvpolicy.hf.plan import plan as plan
    from kvpolicy.hf.speculation import SpeculationStats as SpeculationStats
    from kvpolicy.hf.speculation import speculate as speculate
    from kvpolicy.hf.weights import weights_per_rank as weights_per_rank
    from kvpolicy.mergers.blend import Blend as Blend
    from kvpolicy.mergers.compensate import Compensate as Compensate
    from kvpolicy.mergers.d2o import D2O as D2O
    from kvpolicy.mergers.drop import Drop as Drop
    from kvpolicy.mergers.elastic import Elastic as Elastic
    from kvpolicy.mergers.keepkv import KeepKV as KeepKV
    from kvpolicy.mergers.kvmerger import KVMerger as KVMerger
    from kvpolicy.mergers.merge import CountedMerge as CountedMerge
    from kvpolicy.mergers.regress import Regress as Regress
    from kvpolicy.mergers.zsmerge import ZSMerge as ZSMerge
    from kvpolicy.parallel.runtime import Weights as Weights
    from kvpolicy.planning.result import CachePlan as CachePlan
    from kvpolicy.policy import Policy as Policy
    from kvpolicy.readers.all import ReadAll as ReadAll
    from kvpolicy.readers.centroids import Centroids as Centroids
    from kvpolicy.readers.exact import ExactTopK as ExactTopK
    from kvpolicy.readers.labels import DoubleSparsity as DoubleSparsity
    from kvpolicy.readers.loki import Loki as Loki
    from kvpolicy.readers.quest import Quest as Quest
    from kvpolicy.readers.retrieval import Retrieval as Retrieval
    from kvpolicy.readers.reuse import Reuse as Reuse
    from kvpolicy.readers.rocket import RocketKV as RocketKV
    from kvpolicy.readers.shadowkv import ShadowKV as ShadowKV
    from kvpolicy.readers.sparq import SparQ as SparQ
    from kvpolicy.selectors.a2sf import A2SF as A2SF
    from kvpolicy.selectors.caote import CAOTE as CAOTE
    from kvpolicy.selectors.chunk import ChunkKV as ChunkKV
    from kvpolicy.selectors.compactor import Compactor as Compactor
    from kvpolicy.selectors.critical import CriticalKV as CriticalKV
    from kvpolicy.selectors.cur import CUR as CUR
    from kvpolicy.selectors.defensive import DefensiveKV as DefensiveKV
    from kvpolicy.selectors.dropkv import DropKV as DropKV
    from kvpolicy.selectors.expected import ExpectedAttention as ExpectedAttention
    from kvpolicy.selectors.fair import FairEviction as FairEviction
    from kvpolicy.selectors.full import KeepAll as KeepAll
    from kvpolicy.selectors.h2o import H2O as H2O
    from kvpolicy.selectors.keydiff import KeyDiff as KeyDiff
    from kvpolicy.selectors.keyformer import Keyformer as Keyformer
    from kvpolicy.selectors.knorm import KeyNorm as KeyNorm
    from kvpolicy.selectors.kvcrush import KVCrush as KVCrush
    from kvpolicy.selectors.kvzap import KVzap as KVzap
    from kvpolicy.selectors.kvzip import KVzip as KVzip
    from kvpolicy.selectors.lagkv import LagKV as LagKV
    from kvpolicy.selectors.probe import ProbeSalience as ProbeSalience
    from kvpolicy.selectors.qfilters import QFilters as QFilters
    from kvpolicy.selectors.random import RandomTokens as RandomTokens
    from kvpolicy.selectors.rkv import RKV as RKV
    from kvpolicy.selectors.scissorhands import Scissorhands as Scissorhands
    from kvpolicy.selectors.snapkv import SnapKV as SnapKV
    from kvpolicy.selectors.streaming import StreamingLLM as StreamingLLM
    from kvpolicy.selectors.tova import TOVA as TOVA
    from kvpolicy.selectors.triattention import TriAttention as TriAttention
    from kvpolicy.selectors.vase import VaSE as VaSE
    from kvpolicy.selectors.window import SlidingWindow as SlidingWindow
    from kvpolicy.text.budget import Share as Share
    from kvpolicy.text.errors import KVPolicyError as KVPolicyError
    from kvpolicy.text.errors import KVPolicyStateError as KVPolicyStateError
    from kvpolicy.text.errors import KVPolicyTypeError as KVPolicyTypeError
    from kvpolicy.text.errors import KVPolicyWarning as KVPolicyWarning
    # /generated

_LAZY = {
    "attach": "kvpolicy.hf.attach",
    "Handle": "kvpolicy.hf.attach",
    "PolicyCache": "kvpolicy.hf.cache",
    "Distortion": "kvpolicy.distortion",
    "tiny": "kvpolicy.hf.embedded",
    "speculate": "kvpolicy.hf.speculation",
    "SpeculationStats": "kvpolicy.hf.speculation",
    "KVPolicyError": "kvpolicy.text.errors",
    "KVPolicyStateError": "kvpolicy.text.errors",
    "KVPolicyTypeError": "kvpolicy.text.errors",
    "KVPolicyWarning": "kvpolicy.text.errors",
    "plan": "kvpolicy.hf.plan",
    "CachePlan": "kvpolicy.planning.result",
    "Policy": "kvpolicy.policy",
    "Share": "kvpolicy.text.budget",
    "profile": "kvpolicy.calibration.layer_profile",
    "Weights": "kvpolicy.parallel.runtime",
    "weights_per_rank": "kvpolicy.hf.weights",
} | _built_in_classes()
"""The module of each name, which is imported on first use, so that `import kvpolicy` does not wait for PyTorch.

`python -m kvpolicy_eval.catalog` writes the imports above, which only type checkers read.
"""


if not TYPE_CHECKING:  # a type checker would accept every misspelled name
    __all__ = [*_LAZY]

    def __getattr__(name: str) -> Any:
        import importlib
        import sys

        if name not in _LAZY:
            raise AttributeError(f"module 'kvpolicy' has no attribute {name!r}")
        try:
            module = importlib.import_module(_LAZY[name])
        except ImportError as error:
            if (error.name or "").partition(".")[0] != "transformers":
                raise
            # A module, or a name in one, that an older version does not have.
            found = getattr(sys.modules.get("transformers"), "__version__", None)
            if found is None:
                message = f"kvpolicy.{name} needs transformers, which is not installed; run pip install 'kvpolicy[hf]'."
            else:
                needed = f"kvpolicy.{name} needs transformers 5.18 or newer"
                message = f"{needed}, got {found}; run pip install --upgrade transformers."
            raise type(error)(message, name=error.name) from error
        value = getattr(module, name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted(["__version__", *_LAZY])
