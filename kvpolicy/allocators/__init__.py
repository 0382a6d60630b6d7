"""Allocators: how many tokens each layer may keep."""

# generated: methods
from kvpolicy.allocators.cake import CAKE as CAKE
from kvpolicy.allocators.d2olayers import D2OLayers as D2OLayers
from kvpolicy.allocators.dynamickv import DynamicKV as DynamicKV
from kvpolicy.allocators.kvcompose import KVCompose as KVCompose
from kvpolicy.allocators.lava import LAVa as LAVa
from kvpolicy.allocators.mass import AttentionMass as AttentionMass
from kvpolicy.allocators.profile import load_profile as load_profile
from kvpolicy.allocators.profile import save_profile as save_profile
from kvpolicy.allocators.pyramid import Pyramid as Pyramid
from kvpolicy.allocators.simlayer import SimLayerKV as SimLayerKV
from kvpolicy.allocators.squeeze import SqueezeAttention as SqueezeAttention
from kvpolicy.allocators.threshold import GlobalThreshold as GlobalThreshold
from kvpolicy.allocators.uniform import Uniform as Uniform
from kvpolicy.allocators.zigzag import ZigZagKV as ZigZagKV
# /generated
