"""Layers that read what another layer chose."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

import kvpolicy
from kvpolicy import ExactTopK, PolicyCache, Reuse
from kvpolicy.engine.reading import Board
from kvpolicy.registry import name_of
from tests.conformance.models import build
from tests.conformance.play import make_batch, talk
from tests.engine.parts import index_of
from tests.readers.bench import GROUP, HEADS, Layer, draw, slow_output
from tests.reference.readers import count_of, ranked
from tests.reference.readers.reuse import DEFAULTS, chooser, followed

STEPS = 8
CASES = [
    "full+reuse:every=2:dense=0/exact:read=6",
    "streaming:sinks=2+reuse:every=2:dense=0:full=false/exact:read=6@0.5",
    "snapkv+reuse:every=2:dense=0:full=false/exact:read=6@0.5",
    "h2o+merge+reuse:every=2:dense=0/quest:read=6:page=2:dense=0:resort=3@0.5",
    "snapkv+reuse:every=2:dense=0/labels:read=0.3:channels=3:dense=0@0.5",
    "tokenwise:block_size=3:residual_length=2+reuse:every=2:dense=0:full=false/exact:read=6",
    "h2o+kivi:group_size=4:residual_length=3+reuse:every=2:dense=0/exact:read=5@0.5",
    "snapkv+reuse:every=2:dense=0/sparq:read=6:channels=3:correct=false@0.5",
]


UNEQUAL = [(16, 9), (6, 13), (3, 13)]
"""Tokens that the layer that chooses keeps, and those of the one behind it."""


def pair(policy: str, budgets: tuple[list[int], list[int]]) -> list[Layer]:
    """A layer that chooses, and the one behind it."""
    board = Board()
    return [Layer(policy, budgets[idx], new=STEPS, layer_idx=idx, board=board) for idx in (0, 1)]


def slow_order(layer: Layer, q: Tensor, prompt: tuple[Tensor, Tensor], head: int) -> list[int]:
    """What a head of the layer that chooses reads, the most needed first."""
    reader: Any = layer.policy.reader
    base = reader.base
    config = {field.name: getattr(base, field.name) for field in dataclasses.fields(base)}
    mine = slice(head * GROUP, (head + 1) * GROUP)
    channels: list[int] = []
    if name_of(type(base)) == "labels":
        from tests.reference.readers.labels import channels as slow_channels

        channels = slow_channels(config, prompt[0][0, mine].double().tolist(), prompt[1][0, head].double().tolist())
    held = layer.store.tensors.positions[0, head]
    return ranked(
        name_of(type(base)),
        config,
        layer.parts(0, head),
        q[0, mine, 0].double().tolist(),
        length=int(layer.store.tensors.length[0]),
        first=int(held[held >= 0].min()),
        scale=layer.transform.scale,
        group_size=layer.policy.codec.traits.group_size,
        channels=channels,
    )


def allowed(layer: Layer) -> int:
    """How many slots a head of a layer may read besides a codec's full-precision buffer."""
    base: Any = layer.policy.reader
    layout = layer.store.layout
    slots = sum(layout.coded) or layout.exact
    page = base.page_size(slots)
    count = count_of(base.base.read, slots, page)
    unit = -(-page // layer.policy.codec.traits.group_size) * layer.policy.codec.traits.group_size
    return count if page == 1 or count == slots else -(-count // unit) * unit


@pytest.mark.parametrize(
    ("policy", "sizes"),
    [*((policy, (13, 13)) for policy in CASES), *zip([*CASES[3:7:3], CASES[3]], UNEQUAL, strict=True)],
)
def test_reads_what_the_slow_version_reads(policy: str, sizes: tuple[int, int]) -> None:
    evicts = "@" in policy
    n = 26
    layers = pair(policy, ([sizes[0]], [sizes[1]]) if evicts else ([n], [n]))
    prompts = [draw(n, 1 + idx) for idx in (0, 1)]
    for layer, prompt in zip(layers, prompts, strict=True):
        layer.prompt(*prompt)
    # Where layers hold the same tokens, slots are passed on, and not searched for.
    assert index_of(layers[1].store).same_slots or not policy.startswith("streaming")
    for step in range(STEPS):
        now = [draw(1, 100 + 2 * step + idx) for idx in (0, 1)]
        outs = [layer.step(*tensors) for layer, tensors in zip(layers, now, strict=True)]
        orders = [slow_order(layers[0], now[0][0], prompts[0][:2], head) for head in range(HEADS)]
        parts = [layers[1].parts(0, head) for head in range(HEADS)]
        held = [{slot.position for part in each for slot in part if slot} for each in parts]
        newest = int(layers[1].store.tensors.length[0]) - 1
        want = [followed(orders[head], held[head], allowed(layers[1]), newest) for head in range(HEADS)]
        if index_of(layers[1].store).shape is None:
            want = held
        got = [layers[1].positions_read(0, head) for head in range(HEADS)]
        if index_of(layers[1].store).shape is not None:
            assert got == want
        assert torch.allclose(outs[1].double(), slow_output(layers[1], now[1][0], [want]), atol=1e-5)
        reader: Any = layers[0].policy.reader
        if not reader.full:
            choice = [set(order) for order in orders]
            assert torch.allclose(outs[0].double(), slow_output(layers[0], now[0][0], [choice]), atol=1e-5)
        for layer in layers:
            layer.between()


@pytest.mark.parametrize("policy", [CASES[0], CASES[2], CASES[5]])
def test_a_padded_row_reads_what_it_reads_alone(policy: str) -> None:
    lengths = [26, 17]
    budgets = [length // 2 for length in lengths] if "@" in policy else lengths
    both = pair(policy, (budgets, budgets))
    alone = pair(policy, (budgets[1:], budgets[1:]))
    valid = torch.arange(26) >= 26 - torch.tensor(lengths)[:, None]
    for idx in (0, 1):
        q, k, v = draw(26, 9 + idx, batch=2)
        both[idx].prompt(q, k.masked_fill(~valid[:, None, :, None], 7.0), v, valid)
        alone[idx].prompt(*(t[1:, :, 9:] for t in (q, k, v)))
    for step in range(STEPS):
        for idx in (0, 1):
            now = draw(1, 70 + 2 * step + idx, batch=2)
            outs = both[idx].step(*now), alone[idx].step(*(t[1:] for t in now))
            assert torch.allclose(outs[0][1], outs[1][0], atol=1e-5)
            both[idx].between()
            alone[idx].between()


def test_rows_are_reordered_with_the_choice() -> None:
    layers = pair(CASES[2], ([13, 10], [13, 10]))
    for idx, layer in enumerate(layers):
        layer.prompt(*draw(26, 1 + idx, batch=2))
        layer.step(*draw(1, 3 + idx, batch=2))
    for layer in layers:
        layer.store.map_rows(lambda t: t[[1, 0, 1]])
    reads: Any = layers[0].store.tensors.reads
    board: Any = index_of(layers[1].store).board
    assert board.choice is reads.choice and board.positions is layers[0].store.tensors.positions
    now = [tuple(t[[1, 0, 1]] for t in draw(1, 5 + idx, batch=2)) for idx in (0, 1)]
    outs = [layer.step(*tensors) for layer, tensors in zip(layers, now, strict=True)]
    assert torch.equal(outs[1][0], outs[1][2])


@pytest.mark.parametrize(
    "policy",
    [
        "reuse:layers=1_3/exact:read=6",
        "pyramid+snapkv+reuse:every=2:dense=1:full=false/labels:read=6:channels=3:dense=0@24KiB",
        "streaming:sinks=2+reuse:every=3:dense=1/quest:read=6:page=2:dense=0:resort=3@0.5",
        "tokenwise:block_size=3:residual_length=2+reuse:every=3:dense=0/exact:read=6",
    ],
)
def test_held_and_moved_are_planned(policy: str) -> None:
    model = build("llama", layers=4)
    turns = [40] + [1] * 4
    ids, mask = make_batch([40, 33], turns)
    with kvpolicy.attach(model, policy):
        cache = PolicyCache(model, new=4)
        talk(model, ids, mask, turns, cache)
    plan = kvpolicy.plan(model.config, policy, batch=2, prompt=[40, 33], new=4, dtype=torch.float32)
    assert [layer.held() for layer in cache.policy_layers] == [layer.nbytes for layer in plan.layers]
    assert [layer.moved for layer in cache.policy_layers] == [layer.moved for layer in plan.layers]
    reader: Any = cache.policy.reader
    config = {name: getattr(reader, name) for name in DEFAULTS}
    for layer in cache.policy_layers:
        source = chooser(config, reader.base.traits.dense, layer.layer_idx)
        assert reader.traits.source(layer.layer_idx) == source
        index = layer.held()["index"]
        assert (index == 0) == (source is None)
        if source not in (None, layer.layer_idx):
            assert index == 16, "a number for each row: how many slots it reads"


def test_a_choosing_layer_that_reads_everything_gives_what_it_gives_without_a_reader() -> None:
    one = pair(CASES[0], ([26], [26]))[0]
    other = Layer("full", [26], new=STEPS)
    for layer in (one, other):
        layer.prompt(*draw(26, 1))
    for step in range(STEPS):
        # `exact` looks at all products first, so that attention is not one fused call.
        assert torch.allclose(one.step(*draw(1, 20 + step)), other.step(*draw(1, 20 + step)), atol=1e-6)
    assert one.store.contents.link.moved == other.store.contents.link.moved


@pytest.mark.parametrize(
    ("policy", "short"),
    [
        ("h2o+reuse:dense=0:every=2/exact:read=12@0.5", 4),
        ("pyramid+snapkv:window=4+reuse:dense=0:every=2/exact:read=6@0.5", 13),
        ("snapkv:window=4+reuse:dense=0:every=2:full=false/quest:read=6:page=2:dense=0:resort=3@16", 4),
        ("h2o+kivi:group_size=4:residual_length=4+reuse:every=2:dense=0/exact:read=8@0.5", 13),
    ],
)
def test_a_short_row_reads_what_it_reads_alone(policy: str, short: int) -> None:
    """Alone, it may have no more tokens than are read, so that none of its layers follows another one."""
    model = build("llama", layers=4)
    turns = [50, *[1] * 6, 4, 1, 1]
    ids, mask = make_batch([50, short], turns)
    with kvpolicy.attach(model, policy):
        together = talk(model, ids, mask, turns, PolicyCache(model, new=sum(turns[1:])))
        skip = 50 - short
        cache = PolicyCache(model, new=sum(turns[1:]))
        alone = talk(model, ids[1:, skip:], mask[1:, skip:], [short, *turns[1:]], cache)
    assert (alone[0] - together[1, skip:]).abs().max() < (0.05 if "kivi" in policy else 5e-5)


def test_layers_that_read_everything() -> None:
    """Two, or as many as the base has; the first layer that chooses may be the next one."""
    dense = [Reuse().traits.dense, Reuse(base=ExactTopK(dense=5)).traits.dense, Reuse(dense=0).traits.dense]
    assert dense == [2, 5, 0] and Reuse(base=ExactTopK(dense=5), dense=3).traits.dense == 5
    assert Reuse(layers="2_9", dense=2).traits.dense == 2 and Reuse(layers="4").traits.dense == 4
    assert Reuse(layers="0_1").traits.source(0) == 0


def test_what_is_shown_begins_with_the_most_needed_tokens() -> None:
    """A layer behind may read fewer of them."""
    layer = Layer("full+reuse:every=2:dense=0:full=false/exact:read=6", [20], new=3, board=Board())
    layer.prompt(*draw(20, 1))
    for step in range(3):
        layer.step(*draw(1, 30 + step))
        reads: Any = layer.store.tensors.reads
        assert reads.choice.positions[..., :2].tolist() == [[[20 + step, 0]] * HEADS]
        layer.between()
