"""The interfaces that the parts of a policy implement.

Parts are frozen dataclasses of hyper-parameters. They inherit defaults from their interface; an object that has all its
members is a part too. Tensors belong to the cache, in NamedTuples that the part declares.
Shapes: B batch, H KV heads, G query heads per KV head, Hq = H * G, N candidate tokens, S slots, C coded slots,
D head dim, L layers.
"""

from kvpolicy.kernels.ranks import SINGLE_RANK as SINGLE_RANK
from kvpolicy.kernels.ranks import Ranks as Ranks
from kvpolicy.protocols.allocator import Allocator as Allocator
from kvpolicy.protocols.allocator import AttentionNeeds as AttentionNeeds
from kvpolicy.protocols.allocator import BoundsBudgets as BoundsBudgets
from kvpolicy.protocols.allocator import DividesHeads as DividesHeads
from kvpolicy.protocols.allocator import DrawsCurves as DrawsCurves
from kvpolicy.protocols.allocator import Guarantee as Guarantee
from kvpolicy.protocols.allocator import HeadAllocator as HeadAllocator
from kvpolicy.protocols.allocator import HeadRequest as HeadRequest
from kvpolicy.protocols.allocator import LayerAttention as LayerAttention
from kvpolicy.protocols.allocator import LayerBounds as LayerBounds
from kvpolicy.protocols.allocator import LayerMetric as LayerMetric
from kvpolicy.protocols.allocator import MeasuresAttention as MeasuresAttention
from kvpolicy.protocols.allocator import Reduction as Reduction
from kvpolicy.protocols.allocator import attention_of as attention_of
from kvpolicy.protocols.allocator import heads_of as heads_of
from kvpolicy.protocols.codec import ALL_HEADS as ALL_HEADS
from kvpolicy.protocols.codec import At as At
from kvpolicy.protocols.codec import Calibration as Calibration
from kvpolicy.protocols.codec import Codec as Codec
from kvpolicy.protocols.codec import Codes as Codes
from kvpolicy.protocols.codec import DiffersByLayer as DiffersByLayer
from kvpolicy.protocols.codec import GroupsLayers as GroupsLayers
from kvpolicy.protocols.codec import GroupStage as GroupStage
from kvpolicy.protocols.codec import Layout as Layout
from kvpolicy.protocols.codec import ModelInfo as ModelInfo
from kvpolicy.protocols.codec import RotaryView as RotaryView
from kvpolicy.protocols.codec import SizedCodec as SizedCodec
from kvpolicy.protocols.codec import Stage as Stage
from kvpolicy.protocols.codec import StageStore as StageStore
from kvpolicy.protocols.codec import Traits as Traits
from kvpolicy.protocols.codec import differs_by_layer as differs_by_layer
from kvpolicy.protocols.codec import traits_for as traits_for
from kvpolicy.protocols.merger import Candidates as Candidates
from kvpolicy.protocols.merger import Merge as Merge
from kvpolicy.protocols.merger import Merged as Merged
from kvpolicy.protocols.merger import Merger as Merger
from kvpolicy.protocols.merger import MergerTraits as MergerTraits
from kvpolicy.protocols.merger import Tokens as Tokens
from kvpolicy.protocols.reader import Choosers as Choosers
from kvpolicy.protocols.reader import Clusters as Clusters
from kvpolicy.protocols.reader import Estimated as Estimated
from kvpolicy.protocols.reader import Estimates as Estimates
from kvpolicy.protocols.reader import Index as Index
from kvpolicy.protocols.reader import KeyScan as KeyScan
from kvpolicy.protocols.reader import LoadsBasis as LoadsBasis
from kvpolicy.protocols.reader import Products as Products
from kvpolicy.protocols.reader import Reader as Reader
from kvpolicy.protocols.reader import ReaderTraits as ReaderTraits
from kvpolicy.protocols.reader import RebuildsKeys as RebuildsKeys
from kvpolicy.protocols.reader import Salience as Salience
from kvpolicy.protocols.selector import ChecksModel as ChecksModel
from kvpolicy.protocols.selector import ComparesHeads as ComparesHeads
from kvpolicy.protocols.selector import DecodeMode as DecodeMode
from kvpolicy.protocols.selector import DecodesJointly as DecodesJointly
from kvpolicy.protocols.selector import HoldsAttention as HoldsAttention
from kvpolicy.protocols.selector import KeepsNested as KeepsNested
from kvpolicy.protocols.selector import NewToken as NewToken
from kvpolicy.protocols.selector import RanksPositions as RanksPositions
from kvpolicy.protocols.selector import RanksWholeHeads as RanksWholeHeads
from kvpolicy.protocols.selector import Reranks as Reranks
from kvpolicy.protocols.selector import Scored as Scored
from kvpolicy.protocols.selector import ScoredByKeys as ScoredByKeys
from kvpolicy.protocols.selector import Scores as Scores
from kvpolicy.protocols.selector import Selector as Selector
from kvpolicy.protocols.selector import State as State
from kvpolicy.protocols.selector import View as View
from kvpolicy.protocols.selector import compares_heads as compares_heads
from kvpolicy.protocols.selector import joint_decode as joint_decode
from kvpolicy.protocols.selector import nested_from as nested_from
from kvpolicy.protocols.selector import positions_only as positions_only
from kvpolicy.protocols.selector import rerank_every as rerank_every
from kvpolicy.protocols.selector import same_in_heads as same_in_heads
from kvpolicy.protocols.selector import scoped as scoped
from kvpolicy.protocols.selector import whole_heads as whole_heads
from kvpolicy.protocols.shapes import SMALLEST_HEAD as SMALLEST_HEAD
from kvpolicy.protocols.shapes import HeadShape as HeadShape
from kvpolicy.protocols.shapes import LayerShape as LayerShape
