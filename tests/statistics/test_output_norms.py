"""Norms of values behind the output projection, and their way to a selector."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kvpolicy
from kvpolicy import KVPolicyError, PolicyCache
from kvpolicy.hf.projection import output_projection
from kvpolicy.statistics import output_norms
from kvpolicy.statistics.output_norms import absolute_norms, euclidean_norms
from tests.conformance.models import build


def by_hand(values: Tensor, projection: Tensor, order: float) -> Tensor:
    """Each value behind the slice of each query head of its group, whole."""
    heads = values.shape[1]
    dim = values.shape[3]
    slices = projection.unflatten(1, (-1, dim))  # [hidden, Hq, D]
    group = slices.shape[1] // heads
    rows = [
        torch.stack([torch.linalg.vector_norm(values[:, hq // group] @ slices[:, hq].T, order, dim=-1)])
        for hq in range(slices.shape[1])
    ]
    return torch.cat(rows).transpose(0, 1)


@pytest.mark.parametrize("tile", [1 << 20, 64, 1])
def test_as_by_hand(tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In tiles of any size; of 16 tokens at least."""
    monkeypatch.setattr(output_norms, "TILE_ELEMENTS", tile)
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(2, 3, 37, 4, generator=generator)
    projection = torch.randn(11, 6 * 4, generator=generator)
    torch.testing.assert_close(absolute_norms(values, projection), by_hand(values, projection, 1))
    torch.testing.assert_close(euclidean_norms(values, projection), by_hand(values, projection, 2))


@pytest.mark.parametrize("norms", [absolute_norms, euclidean_norms])
def test_rows_with_a_projection_each(norms: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(2, 3, 9, 4, generator=generator)
    projections = torch.randn(2, 11, 6 * 4, generator=generator)
    alone = [norms(values[row : row + 1], projections[row]) for row in range(2)]
    assert torch.equal(norms(values, projections), torch.cat(alone))


def test_in_half_precision_sums_are_fp32() -> None:
    values = torch.full((1, 1, 3, 8), 100.0, dtype=torch.bfloat16)
    projection = torch.ones(4096, 8, dtype=torch.bfloat16)
    got = absolute_norms(values, projection)
    assert got.dtype == torch.float32 and got.unique().tolist() == [4096 * 800]


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2"])
@pytest.mark.parametrize("how", [{}, {"tile": 7}])
def test_a_model_gives_its_own_projection(family: str, how: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The norms of what `o_proj` makes of a value alone; Conv1D of GPT-2 has its weight the other way round."""
    given: list[tuple[Tensor, Tensor]] = []
    real = output_norms.absolute_norms

    def noted(values: Tensor, projection: Tensor) -> Tensor:
        given.append((values, projection))
        return real(values, projection)

    monkeypatch.setattr("kvpolicy.statistics.output_norms.absolute_norms", noted)
    model = build(family, layers=2)
    ids = torch.randint(3, 30, (1, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), kvpolicy.attach(model, "defensive:window=4@0.5", **how):
        model(ids, cache=PolicyCache(model))
    modules = [part for part in model.modules() if type(part).__name__.endswith("Attention")]
    assert len(given) == len(modules) == 2
    for (values, projection), module in zip(given, modules, strict=True):
        layer: Any = next(getattr(module, name) for name in ("o_proj", "c_proj") if hasattr(module, name))
        heads = projection.shape[1] // values.shape[3]
        alone = torch.zeros(1, heads * values.shape[3])
        alone[:, : values.shape[3]] = values[0, 0, 5]
        bias = 0 if layer.bias is None else layer.bias
        torch.testing.assert_close(real(values, projection)[0, 0, 5], (layer(alone) - bias).abs().sum())


@pytest.mark.parametrize("policy", ["critical/h2o@0.5", "kvzip:plus=true@0.5"])
def test_a_model_without_a_projection_is_left_as_it_was(policy: str) -> None:
    model = copy.deepcopy(build("llama", layers=2))  # built models are shared between tests
    before = set(model.model.layers[1].self_attn._modules)
    model.model.layers[1].self_attn.o_proj = nn.Identity()
    with pytest.raises(KVPolicyError, match=r"must have a weight in floating point .* try kvzip"):
        kvpolicy.attach(model, policy)
    assert set(model.model.layers[1].self_attn._modules) == before
    kvpolicy.attach(model, "h2o@0.5").detach()


def test_offloaded_weights_are_refused() -> None:
    module = copy.deepcopy(build("llama", layers=1).model.layers[0].self_attn)
    module.o_proj.to("meta")
    with pytest.raises(KVPolicyError, match=r"must be in memory while its layer runs, .* try another selector"):
        output_projection(module)
