"""Allocators: how many tokens each layer may keep."""

# generated: methods
from kvpolicy.allocators.kvcompose import KVCompose as KVCompose
from kvpolicy.allocators.profile import load_profile as load_profile
from kvpolicy.allocators.profile import save_profile as save_profile
from kvpolicy.allocators.pyramid import Pyramid as Pyramid
from kvpolicy.allocators.squeeze import SqueezeAttention as SqueezeAttention
from kvpolicy.allocators.threshold import GlobalThreshold as GlobalThreshold
from kvpolicy.allocators.uniform import Uniform as Uniform
# /generated
