"""Two parts of attention, joined by their normalizers."""

from __future__ import annotations

import torch

from kvpolicy.engine.attention_part import Part
from tests.engine.parts import generator

HEADS = 2
DIM = 8


def drawn(seed: int, scale: float = 1.0) -> Part:
    dice = generator(seed)
    return Part(torch.randn(1, HEADS, 1, 3, DIM, generator=dice), scale * torch.randn(1, HEADS, 1, 3, generator=dice))


def test_parts_weigh_as_much_as_their_exponentials() -> None:
    for scale in (1.0, 60.0):  # also where one of them has all weight
        one = drawn(0, scale)
        other = drawn(1, scale)
        weights = torch.stack([one.normalizer, other.normalizer]).double().softmax(0)[..., None]
        want = weights[0] * one.output.double() + weights[1] * other.output.double()
        normalizer = torch.logaddexp(one.normalizer.double(), other.normalizer.double())
        found = one.joined(other)
        torch.testing.assert_close(found.output.double(), want, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(found.normalizer.double(), normalizer, atol=1e-6, rtol=1e-5)


def test_a_part_without_another_is_itself() -> None:
    part = drawn(0)
    assert part.joined(None) is part
