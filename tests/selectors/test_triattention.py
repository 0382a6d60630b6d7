"""TriAttention: products with the mean query at the distances to come, from a file of the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvpolicy import KVPolicyError
from kvpolicy.kernels.rotary import KeyRotation
from kvpolicy.protocols import View
from kvpolicy.selectors.center_files import CENTER_FILES, CenterFile, Centers
from kvpolicy.selectors.triattention import TriAttention
from kvpolicy.statistics import Candidates, Results, Rotation, Vectors
from tests.conformance.calibration import write
from tests.conformance.fakes import Roll

FILE = write("triattention") / "centers.safetensors"


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


def test_normalized_scores_have_a_deviation_of_one() -> None:
    selector = TriAttention(file=str(FILE), normalize=True, of_group="mean")
    keys = torch.randn(1, 1, 50, 8, generator=torch.Generator().manual_seed(1)) * 9
    positions = torch.cat([torch.full((10,), -1), torch.arange(40)]).int()[None, None]
    view = View(positions, torch.tensor([40]), torch.tensor([4]), 0)
    state: Any = selector.observe(selector.alloc(1, 1, 50, "cpu"), seen_of(keys, KeyRotation(None)), view)
    own = state.score[0, 0, 10:]
    assert float(own.mean()) == pytest.approx(0, abs=1e-5) and float(own.std(correction=0)) == pytest.approx(
        1, abs=1e-5
    )


def test_an_empty_file_name() -> None:
    with pytest.raises(KVPolicyError, match=r"TriAttention\.file must be a file or 'tiny', got an empty string"):
        TriAttention(file="")
