"""Layers whose values have another size than their keys, or are a part of them, against attention written out."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kvpolicy import Policy
from kvpolicy.engine import snapshot
from kvpolicy.engine.layer_store import LayerStore
from kvpolicy.engine.row_limits import RowBudget
from kvpolicy.kernels.mixed_values import mixed_values, read_values
from kvpolicy.planning.memory import layer_bytes, layer_spec
from kvpolicy.protocols import SINGLE_RANK, LayerShape
from kvpolicy.statistics.windows import ScoreTransform

HEADS = 2
GROUP = 2
DIM = 8
SHAPES = {
    "narrow": LayerShape(HEADS, DIM, torch.float32, GROUP, value_dim=4),
    "wide": LayerShape(HEADS, DIM, torch.float32, GROUP, value_dim=16),
    "latent": LayerShape(1, DIM, torch.float32, 2 * GROUP, value_dim=0, latent=6),
    "latent of one head": LayerShape(1, DIM, torch.float32, 1, value_dim=0, latent=6),
}
POLICIES = [
    "full@1.0",
    "window@8",
    "h2o@8",
    "snapkv:window=2:kernel=1@8",
    "knorm+d2o@8",
    "streaming:sinks=2+quest:read=4:page=2:dense=0:resort=3@8",
    "h2o+tokenwise:bits=8:group_size=4:residual_length=2:block_size=2@10",
    "h2o+kivi:bits=8:group_size=4:residual_length=2@12",
]


def test_what_is_mixed() -> None:
    keys = torch.arange(6.0).view(2, 3)
    values = torch.ones(2, 2)
    assert mixed_values(keys, values) is values and mixed_values(keys, values[:, :0]) is keys
    assert read_values(keys, values, 0) is values
    assert read_values(keys, values[:, :0], 2).tolist() == [[0, 1], [3, 4]]


def drawn(shape: LayerShape, new: int, dice: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    q = torch.randn(2, shape.heads * shape.group, new, DIM, generator=dice)
    k = torch.randn(2, shape.heads, new, DIM, generator=dice)
    return q, k, torch.randn(2, shape.heads, new, shape.held_value_dim, generator=dice)


def store_of(policy: Policy, shape: LayerShape) -> LayerStore:
    store = LayerStore(layer_spec(policy, 0, shape=shape))
    keys = torch.empty(2, shape.heads, 0, shape.head_dim)
    store.initialize(keys, SINGLE_RANK, shape.group, shape.held_value_dim)
    return store


def prompt(store: LayerStore, given: tuple[Tensor, Tensor, Tensor], keep: int) -> Tensor:
    out, pending = store.attend_prompt(*given, None, ScoreTransform(DIM**-0.5))
    tokens = torch.full((2,), keep)
    store.compress(pending, RowBudget(tokens, torch.zeros_like(tokens), tokens))
    return out


def forward(store: LayerStore, given: tuple[Tensor, Tensor, Tensor], keep: int) -> Tensor:
    """A prompt, or a step."""
    if given[0].shape[2] > 1:
        return prompt(store, given, keep)
    store.ensure_capacity()
    return store.append(*given, None, ScoreTransform(DIM**-0.5))


def kept(spec: str) -> int:
    budget = Policy.parse(spec).budget
    return budget if isinstance(budget, int) else 30


def ordinary(kind: str, given: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of one size that have the same products and sums: with zeros, or keys as values."""
    q, k, v = given
    if "latent" in kind:
        return q, k, k
    return (q, k, F.pad(v, (0, 4))) if kind == "narrow" else (F.pad(q, (0, 8)), F.pad(k, (0, 8)), v)


def attended(store: LayerStore, q: Tensor) -> Tensor:
    """Attention of a token to all that a store without values holds, decoded."""
    past = store.past()
    assert past is not None and past.keys.shape[1] == 1
    scores = (q @ past.keys.mT / DIM**0.5).masked_fill(~past.occupied[:, :, None], -torch.inf)
    return scores.softmax(-1) @ past.keys


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("spec", POLICIES)
def test_it_is_as_with_values_of_the_size_of_keys(kind: str, spec: str) -> None:
    """With codecs, mergers and readers too; and again after the content went through a snapshot."""
    shape = SHAPES[kind]
    policy = Policy.parse(spec)
    dice = torch.Generator().manual_seed(0)
    dim = 16 if kind == "wide" else DIM
    store = store_of(policy, shape)
    twin = store_of(policy, shape._replace(head_dim=dim, value_dim=None, latent=0))
    for new in (12, 1, 1, 4, 1, 1, 1, 1, 1):
        given = drawn(shape, new, dice)
        found = forward(store, given, kept(spec))
        expected = forward(twin, ordinary(kind, given), kept(spec))
        assert found.shape[3] == (shape.held_value_dim or DIM)
        if policy.codec.stages and "latent" in kind:  # values have other codes than the keys that stand for them
            assert new > 1 or torch.allclose(found, attended(store, given[0]), atol=1e-5), new
        else:
            assert torch.allclose(found, expected[..., : found.shape[3]], atol=1e-6), new
        for each in (store, twin) if new == 1 else ():
            each.count_step()
        assert torch.equal(store.geometry.head_positions(), twin.geometry.head_positions())
        if new == 4:
            content = copy.deepcopy(snapshot.take(store))
            held = store.nbytes_by_kind()
            store = LayerStore(store.spec)
            snapshot.put(store, content, SINGLE_RANK, torch.float32, torch.device("cpu"))
            assert (store.shape, store.nbytes_by_kind()) == (shape, held)


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("spec", POLICIES)
def test_planned_bytes_are_held(kind: str, spec: str) -> None:
    shape = SHAPES[kind]
    policy = Policy.parse(spec)
    store = store_of(policy, shape)
    prompt(store, drawn(shape, 12, torch.Generator().manual_seed(0)), 8)
    assert layer_bytes(policy, 2, shape, store.layout).held == store.nbytes_by_kind()
