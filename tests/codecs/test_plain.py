"""Plain codes nothing."""

from __future__ import annotations

from kvpolicy.codecs.plain import Plain
from kvpolicy.protocols import Codec, ModelInfo, Traits


def test_plain_codes_nothing() -> None:
    plain = Plain()
    assert isinstance(plain, Codec)
    assert plain.traits == Traits() and plain.traits.block == 0
    assert plain.stages == ()
    assert plain.layout(70) == (70, ())
    plain.check(ModelInfo(1, 1, 7))
