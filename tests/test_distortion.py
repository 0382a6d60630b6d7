"""Distortions count what is encoded, in full precision whatever the dtype of keys and values."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvpolicy import KIVI, KVPolicyTypeError
from kvpolicy.distortion import distortion


def drawn(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(1, 2, count, 32, generator=generator) for _ in range(2))
    return keys, values


def test_numbers_whose_squares_and_sums_do_not_fit_into_half_precision() -> None:
    keys, values = (x.half() for x in drawn(4096))
    codec = KIVI(bits=4)
    plain = distortion(codec, keys.float(), values.float())
    half = distortion(codec, keys, values)
    large = distortion(codec, keys * 300, values * 300)
    for found in (half, large):
        assert found.keys == pytest.approx(plain.keys, rel=0.02)
        assert found.values == pytest.approx(plain.values, rel=0.02)


def test_tokens_in_full_precision_do_not_count() -> None:
    """The same tokens are encoded, whatever stands behind them in the full-precision buffer."""
    keys, values = drawn(256)
    codec = KIVI(bits=2, residual_length=128)
    whole = distortion(codec, keys, values)
    assert 0 < whole.coded < 256
    changed = keys.clone()
    changed[:, :, int(whole.coded) :] *= 100
    other = distortion(codec, changed, values)
    assert other.coded == whole.coded
    assert (other.keys, other.values) == pytest.approx((whole.keys, whole.values), rel=1e-5)


def test_a_spec_is_no_codec() -> None:
    wrong: Any = "kivi:bits=4"
    with pytest.raises(KVPolicyTypeError, match=r"The codec must implement .*, got 'kivi:bits=4'; read a spec with"):
        distortion(wrong, *drawn(64))
