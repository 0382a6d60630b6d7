"""Codecs: how a kept token is stored."""

# generated: methods
from kvpolicy.codecs.bfp import BFP as BFP
from kvpolicy.codecs.csr import CSR as CSR
from kvpolicy.codecs.gear import GEAR as GEAR
from kvpolicy.codecs.kivi import KIVI as KIVI
from kvpolicy.codecs.kvquant import KVQuant as KVQuant
from kvpolicy.codecs.lowrank import LowRank as LowRank
from kvpolicy.codecs.mikv import MiKV as MiKV
from kvpolicy.codecs.minicache import MiniCache as MiniCache
from kvpolicy.codecs.plain import Plain as Plain
from kvpolicy.codecs.rotate import RotateKV as RotateKV
from kvpolicy.codecs.staircase import Staircase as Staircase
from kvpolicy.codecs.think import ThinK as ThinK
from kvpolicy.codecs.tokenwise import TokenWise as TokenWise
from kvpolicy.codecs.turboquant import TurboQuant as TurboQuant
from kvpolicy.codecs.zipcache import ZipCache as ZipCache
# /generated
