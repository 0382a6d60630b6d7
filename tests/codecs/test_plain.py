"""Plain codes nothing."""

from __future__ import annotations

import pytest
import torch

from kvpolicy.codecs.plain import Plain
from kvpolicy.protocols import Codec


def test_plain_codes_nothing() -> None:
    plain = Plain()
    assert isinstance(plain, Codec)
    assert (plain.block, plain.residual) == (0, 0)
    assert plain.layout(70) == (70, 0)
    plain.check(7)
    assert plain.alloc(1, 2, 0, 8, "cpu") == ()
    empty = torch.zeros(1, 2, 0, 8)
    plain.write((), empty, empty, empty[..., 0].long(), empty[..., 0].bool(), empty[..., 0].bool())
    with pytest.raises(AssertionError):
        plain.read((), torch.float32)
