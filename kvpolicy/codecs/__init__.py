"""Codecs: how is a kept token stored?"""

from kvpolicy.codecs.kivi import KIVI as KIVI
from kvpolicy.codecs.plain import Plain as Plain
