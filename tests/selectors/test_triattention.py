"""TriAttention: products with the mean query at the distances to come, from a file of the model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvpolicy.kernels.rotary import KeyRotation
from kvpolicy.protocols import View
from kvpolicy.selectors.center_files import CENTER_FILES, CenterFile, Centers
from kvpolicy.selectors.triattention import TriAttention
from kvpolicy.statistics import Candidates, Results, Rotation, Vectors
from tests.conformance.fakes import Roll


def seen_of(keys: torch.Tensor, rotation: KeyRotation) -> Results:
    return Results({Vectors: Candidates(keys, keys, 1.0), Rotation: rotation})


@pytest.mark.parametrize("offset", [None, 3])
def test_scores_are_products_at_each_distance(offset: int | None, tmp_path: Path) -> None:
    """With an embedding, two query heads per KV head, and positions of the model that are further on."""
    generator = torch.Generator().manual_seed(0)
    mean = torch.randn(4, 8, generator=generator)
    lengths = torch.rand(4, 1, generator=generator) * 4
    CENTER_FILES.save(tmp_path / "c.safetensors", CenterFile({0: Centers(mean, lengths)}))
    selector = TriAttention(file=str(tmp_path / "c.safetensors"), reach=9)
    keys = torch.randn(1, 2, 6, 8, generator=generator)
    rotation = KeyRotation(Roll(), None if offset is None else torch.tensor([offset]))  # pyright: ignore[reportArgumentType]
    view = View(torch.arange(6).int().expand(1, 2, -1), torch.tensor([6]), torch.tensor([4]), 0)
    state = selector.observe(selector.alloc(1, 2, 6, "cpu"), seen_of(keys, rotation), view)
    for head in range(2):
        for token in range(6):
            scores = []
            for hq in (2 * head, 2 * head + 1):
                places = [mean[hq].roll(6 + (offset or 0) + ahead) for ahead in (1, 2, 4, 8)]
                products = sum(float(place @ keys[0, head, token]) for place in places) / 4
                scores.append(products + float((lengths[hq] - mean[hq].norm()) * keys[0, head, token].norm()))
            assert float(state.score[0, head, token]) == pytest.approx(max(scores), abs=1e-4)
    again = selector.rerank(state, seen_of(keys, KeyRotation(Roll())), view)  # pyright: ignore[reportArgumentType]
    assert torch.equal(again.score, state.score), "the offset of a row is remembered"
