"""Centers are the means of the queries that the model's own projections give, and kept tokens follow from them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import kvpolicy
from kvpolicy.calibration import calibrate_triattention, query_centers
from kvpolicy.selectors.center_files import CENTER_FILES
from tests.calibration.test_heads import THETA, gemma, llama, projected, qwen, windows


@pytest.mark.parametrize("make", [llama, qwen, gemma])
def test_centers_are_means_of_projected_queries(make: Callable[[], Any]) -> None:
    model = make()
    texts = [windows(1, 9)[0], windows(1, 14)[0]]
    found = query_centers(model, texts)
    assert sorted(found) == ([1] if make is gemma else [0, 1])
    every = [projected(model, ids) for ids in texts]
    for layer, centers in found.items():
        queries = torch.cat([each[layer][0] for each in every], 1).double()  # [Hq, n, D]
        torch.testing.assert_close(centers.mean.double(), queries.mean(1), atol=1e-5, rtol=1e-5)
        first, second = queries.chunk(2, -1)
        torch.testing.assert_close(centers.lengths.double(), first.hypot(second).mean(1), atol=1e-5, rtol=1e-5)


def expected_scores(centers: Any, keys: Tensor, length: int, heads: int) -> Tensor:
    """By complex numbers and the cosine of every distance, [H, N], of keys [H, N, D] without their rotation."""
    half = keys.shape[-1] // 2
    omega = THETA ** (-np.arange(half) / half)
    scores = np.zeros((heads, keys.shape[1]))
    for head in range(heads):
        rows = []
        for hq in range(2 * head, 2 * head + 2):
            mean = centers.mean[hq].double().numpy()
            middle = mean[:half] + 1j * mean[half:]
            row = []
            for position, key in enumerate(keys[head].double().numpy()):
                other = key[:half] + 1j * key[half:]
                relative = middle * other.conj()
                ahead = length - position + 2.0 ** np.arange(17)
                phase = ahead[:, None] * omega + np.angle(relative)
                trigonometric = (np.abs(relative) * np.cos(phase)).sum(1).mean()
                row.append(trigonometric + ((centers.lengths[hq].numpy() - np.abs(middle)) * np.abs(other)).sum())
            rows.append(row)
        scores[head] = np.max(rows, 0)
    return torch.from_numpy(scores)


@pytest.mark.parametrize("make", [llama, qwen])
@pytest.mark.parametrize("generated", [False, True])
def test_kept_tokens_of_a_padded_batch(make: Callable[[], Any], generated: bool, tmp_path: Path) -> None:
    """Where the model counts padding as positions, since it gets none, and where it does not."""
    model = make()
    length = 40
    file = str(tmp_path / "centers.safetensors")
    calibrate_triattention(model, [windows(1, 140)[0]], file)
    ids = torch.stack([windows(1, length)[0], windows(2, length)[1]])
    mask = torch.ones(2, length, dtype=torch.int64)
    mask[1, :7] = 0
    how = {"position_ids": (mask.cumsum(-1) - 1).clamp_min(0)} if generated else {}
    with torch.no_grad(), kvpolicy.attach(model, f"triattention:file={file}@12"):
        cache = kvpolicy.PolicyCache(model, prompt=mask.sum(1), new=4)
        model(ids, attention_mask=mask, cache=cache, **how)
    for row, first in ((0, 0), (1, 7)):
        own = ids[row, first:]
        for index, layer in enumerate(cache.policy_layers):
            keys = projected(model, own)[index][1]
            scores = expected_scores(CENTER_FILES.load(file).centers[index], keys, len(own), 2)
            scores[:, -1] = torch.inf
            kept = layer.store.tensors.positions[row].sort(-1).values
            want = scores.topk(12, dim=-1).indices.sort(-1).values
            assert kept.tolist() == want.tolist(), (row, index)
