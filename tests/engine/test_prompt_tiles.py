"""A prompt in tiles is attended to, and seen, as one in one piece: after slots, after held chunks, with padding."""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvpolicy import CountedMerge, DoubleSparsity, MiKV, Plain, SlidingWindow
from kvpolicy.engine.attention import attend
from kvpolicy.engine.columns import ExactColumns, attend_columns
from kvpolicy.engine.in_place_attention import attend_in_place
from kvpolicy.engine.layer_spec import LayerSpec
from kvpolicy.engine.layer_store import LayerStore
from kvpolicy.engine.prefill import PendingPrompt
from kvpolicy.engine.prompt_tiles import PromptTiles
from kvpolicy.engine.row_limits import RowBudget
from kvpolicy.engine.state import tensors
from kvpolicy.protocols import Estimated
from kvpolicy.selectors.a2sf import DecayedSum
from kvpolicy.selectors.blocks import BlockAttention
from kvpolicy.selectors.probe import ProbeQueries
from kvpolicy.selectors.scissorhands import BelowMean
from kvpolicy.statistics import AttentionSum, Forward, ModuleCall, Moments, NewestQueries, RecentQueries, Statistic
from kvpolicy.statistics.channel_sums import largest_queries
from kvpolicy.statistics.windows import Past, ScoreTransform
from tests.engine.parts import generator

HEADS = 2
GROUP = 2
DIM = 8
PARTS: list[dict[str, Any]] = [
    {},
    {"merger": CountedMerge()},
    {"codec": MiKV()},
    {"reader": DoubleSparsity(read=4, channels=2, dense=0)},
]
TOLERANCE: dict[str, Any] = {"atol": 1e-5, "rtol": 1e-4}


@dataclass(frozen=True, kw_only=True, slots=True)
class Everything(SlidingWindow):
    """A window that wants to see all that there is of a prompt."""

    sums: bool = True

    @property
    def statistics(self) -> tuple[Statistic[Any], ...]:
        """All statistics."""
        return (
            *((AttentionSum(),) if self.sums else ()),
            RecentQueries(5),
            ProbeQueries(0.2, 0.2, seed=1),
            BelowMean(3),
            DecayedSum(4, 0.7),
            NewestQueries(2),
            Moments(2),
            ModuleCall(),
            BlockAttention(6),
        )


def store(sums: bool, **parts: Any) -> LayerStore:
    return LayerStore(LayerSpec(0, Everything(sums=sums), parts.pop("codec", Plain()), "evict", **parts))


class Prompt:
    """Queries, keys, values, inputs and padding of a prompt of some rows."""

    def __init__(self, rows: int, columns: int, seed: int, padding: str) -> None:
        draw = generator(seed)
        self.q = torch.randn(rows, HEADS * GROUP, columns, DIM, generator=draw) * 2
        self.k, self.v = (torch.randn(rows, HEADS, columns, DIM, generator=draw) for _ in range(2))
        self.hidden = torch.randn(rows, columns, 6, generator=draw)
        self.valid: Tensor | None = None
        if padding != "none":
            self.valid = torch.rand(rows, columns, generator=draw) < 0.6
            self.valid[0] = True
        if self.valid is not None and padding == "left":
            self.valid = self.valid.sort(-1).values
        if self.valid is not None and rows > 2:
            self.valid[2] = False

    def forward(self, at: slice) -> Forward:
        return Forward(nn.Identity(), self.hidden[:, at], {"cos": self.hidden[:, at], "other": 3})

    def whole(self, layer: LayerStore, transform: ScoreTransform, held: PendingPrompt | None) -> Any:
        return layer.attend_prompt(self.q, self.k, self.v, self.valid, transform, self.forward(slice(None)), held)

    def tiled(self, layer: LayerStore, transform: ScoreTransform, held: PendingPrompt | None, dice: Random) -> Any:
        columns = self.q.shape[2]
        tiles: PromptTiles | None = None
        parts: list[Tensor] = []
        start = 0
        while start < columns:
            at = slice(start, min(start + dice.randint(1, 7), columns))
            q, k, v = (t[:, :, at] for t in (self.q, self.k, self.v))
            if tiles is None:
                tiles = layer.begin_tiles(q, k, columns, self.valid, held)
            parts.append(tiles.attend(q, k, v, transform))
            tiles.note_forward(self.forward(at), q, {"cos": self.hidden})
            start = at.stop
        assert tiles is not None
        return torch.cat(parts, 2), layer.end_prompt(tiles.prompt(transform), held)


def statistics_of(one: Any, other: Any) -> list[tuple[Tensor, Tensor]]:
    """The tensors of a statistic beside those of another one, but for queries that are absent."""
    assert type(one) is type(other)
    window = getattr(one, "window", None)
    if window is None:
        return [*zip(one.tensors, other.tensors, strict=True)]
    assert torch.equal(window.at, other.window.at)
    present = (window.at >= 0)[:, None, :, None]
    return [(window.queries * present, other.window.queries * present)]


def compare(found: PendingPrompt, expected: PendingPrompt) -> None:
    for name in found._fields:
        one: Any = getattr(found, name)
        other: Any = getattr(expected, name)
        if name == "transform":
            continue
        if name == "forward":
            assert other.kwargs["other"] == one.kwargs["other"]
            pairs = [(one.hidden_states, other.hidden_states), (one.queries, other.queries)]
            pairs.append((one.kwargs["cos"], other.kwargs["cos"]))
        elif name == "statistics":
            pairs = [pair for own in zip(one, other, strict=True) for pair in statistics_of(*own)]
        else:
            pairs = [*zip(tensors(one), tensors(other), strict=True)] if isinstance(one, tuple | Tensor) else []
            assert isinstance(one, tuple | Tensor) or one == other
        for pair in pairs:
            torch.testing.assert_close(*pair, **TOLERANCE, msg=lambda text, name=name: f"{name}: {text}")


def budget(keep: list[int]) -> RowBudget:
    tokens = torch.tensor(keep)
    return RowBudget(tokens, torch.zeros_like(tokens), tokens, tokens)


@pytest.mark.parametrize("seed", range(24))
def test_what_is_seen_and_what_comes_out(seed: int) -> None:
    dice = Random(seed)
    rows = dice.randint(1, 3)
    padding = dice.choice(["none", "left", "scattered"])
    sinks = torch.randn(HEADS * GROUP, generator=generator(seed)) if seed % 3 == 2 else None
    transform = ScoreTransform(0.4, dice.choice([None, 5.0]), sinks)
    parts = dice.choice(PARTS)
    first = Prompt(rows, dice.randint(1, 30), seed, padding)
    second = Prompt(rows, dice.randint(1, 20), seed + 100, padding)
    held = dice.random() < 0.4
    layers = [store(True, **parts), store(True, **parts)]
    for layer in layers:
        layer.initialize(first.k, group=GROUP)
    kept: list[PendingPrompt | None] = [None, None]
    for prompt in (first, second):
        out, pending = prompt.whole(layers[0], transform, kept[0])
        tiled_out, tiled = prompt.tiled(layers[1], transform, kept[1], dice)
        real = torch.ones_like(out[:, 0, :, 0]).bool() if prompt.valid is None else prompt.valid
        torch.testing.assert_close(tiled_out.transpose(1, 2)[real], out.transpose(1, 2)[real], **TOLERANCE)
        compare(tiled, pending)
        assert (
            layers[1].tensors.columns.equal(layers[0].tensors.columns)
            and layers[1].contents.scale == layers[0].contents.scale
        )
        if held:
            kept = [pending, tiled]
        else:
            for layer in layers:  # of the same prompt, so that both have the same slots for the next one
                layer.compress(pending, budget([9, 6, 7][:rows]))


@pytest.mark.parametrize("padding", ["none", "left", "scattered"])
@pytest.mark.parametrize("elements", [1, 1 << 24])
def test_without_sums_attention_is_fused(padding: str, elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In several calls where a mask would be too large."""
    monkeypatch.setattr("kvpolicy.engine.attention.MASK_ELEMENTS", elements)
    monkeypatch.setattr("kvpolicy.engine.attention._attend_scores", None)
    prompt = Prompt(3, 67, 5, padding)
    layers = [store(False), store(False)]
    for layer in layers:
        layer.initialize(prompt.k, group=GROUP)
    transform = ScoreTransform(0.4)
    out, pending = prompt.whole(layers[0], transform, None)
    tiled_out, tiled = prompt.tiled(layers[1], transform, None, Random(1))
    torch.testing.assert_close(tiled_out, out, **TOLERANCE)
    compare(tiled, pending)


QUERIES_PER_HEAD = 3

PADDINGS = {
    "left": ["001111", "111111", "000001"],
    "right": ["111100", "111111", "100000"],
    "both": ["011110", "011110", "001100"],
    "between": ["101101", "110011", "011111"],
    "every other row": ["001111", "000000", "001111"],
    "empty row": ["000000", "001111", "000000"],
    "nothing": ["000000", "000000", "000000"],
    "everything": ["111111", "111111", "111111"],
    "one token": ["0", "1", "1"],
}


def _expected(q: Tensor, k: Tensor, v: Tensor, valid: Tensor, transform: ScoreTransform) -> tuple[Tensor, Tensor]:
    """The output and the summed weights, query by query."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    total = torch.zeros(*q.shape[:3], dtype=torch.float64)
    for row in range(len(q)):
        for head in range(q.shape[1]):
            for at in range(q.shape[2]):
                seen = [column for column in range(at + 1) if valid[row, column]]
                if not valid[row, at]:
                    continue
                scores = [float(q[row, head, at].double() @ k[row, head // QUERIES_PER_HEAD, j].double()) for j in seen]
                scores = [score * transform.scale for score in scores]
                if transform.softcap is not None:
                    scores = [transform.softcap * math.tanh(score / transform.softcap) for score in scores]
                sink = [] if transform.sinks is None else [float(transform.sinks[head])]
                weights = torch.tensor([*scores, *sink], dtype=torch.float64).softmax(0)
                for weight, column in zip(weights, seen, strict=False):
                    out[row, head, at] += weight * v[row, head // QUERIES_PER_HEAD, column].double()
                    total[row, head, column] += weight
    return out, total


def _tensors(size: int, rows: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(size)
    q = torch.randn(rows, size, HEADS * QUERIES_PER_HEAD, DIM).transpose(1, 2)
    k, v = (torch.randn(rows, size, HEADS, DIM).transpose(1, 2) for _ in range(2))
    return q, k, v


@pytest.mark.parametrize(
    "transform",
    [ScoreTransform(0.3), ScoreTransform(1.0, softcap=2.0), ScoreTransform(0.5, sinks=torch.arange(6.0))],
    ids=["plain", "softcap", "sinks"],
)
@pytest.mark.parametrize("name", PADDINGS)
def test_prompts_with_padding(name: str, transform: ScoreTransform) -> None:
    valid = torch.tensor([[mark == "1" for mark in row] for row in PADDINGS[name]])
    q, k, v = _tensors(valid.shape[1])
    expected, expected_total = _expected(q, k, v, valid, transform)
    for sum_weights in (False, True):
        out, total = attend(q, k, v, transform, None, valid, sum_weights)
        torch.testing.assert_close(out.double(), expected, atol=1e-6, rtol=1e-5)
        if total is not None:
            torch.testing.assert_close(total.double(), expected_total, atol=1e-6, rtol=1e-5)
        assert (total is not None) == sum_weights


@pytest.mark.parametrize("held", [0, 3])
def test_several_tiles_are_those_of_one(held: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding at any place, in the first tile and in later ones; slots before the prompt are seen by all of them."""
    monkeypatch.setattr("kvpolicy.engine.attention.TILE_ELEMENTS", 1)  # tiles of 16 queries
    size = 37
    q, k, v = _tensors(held + size)
    valid = torch.rand(3, held + size, generator=torch.Generator().manual_seed(0)) < 0.7
    valid[1, held + 16 :] = False
    transform = ScoreTransform(0.3)
    past = Past(k[:, :, :held], v[:, :, :held], valid[:, None, :held].expand(-1, HEADS, -1)) if held else None
    own = slice(held, None)
    out, total = attend(q[:, :, own], k[:, :, own], v[:, :, own], transform, past, valid[:, own], True)
    # Queries of the slots have no part in the sums.
    expected, sums = _expected(q, k, v, valid, transform)
    _, before = _expected(q[:, :, :held], k[:, :, :held], v[:, :, :held], valid[:, :held], transform)
    sums = sums - F.pad(before, (0, size))
    torch.testing.assert_close(out.double(), expected[:, :, own], atol=1e-6, rtol=1e-5)
    assert total is not None
    torch.testing.assert_close(total.double(), sums, atol=1e-6, rtol=1e-5)


def test_the_largest_queries_are_those_of_tokens() -> None:
    q = torch.tensor([[[[1.0], [-5], [9]], [[2], [3], [-99]]], [[[4], [0], [0]], [[-6], [7], [8]]]])
    assert largest_queries(q, 1, None).tolist() == [[[99]], [[8]]]
    valid = torch.tensor([[True, True, False], [False, False, False]])
    assert largest_queries(q, 1, valid).tolist() == [[[5]], [[0]]]
    assert largest_queries(q, 2, valid).tolist() == [[[5], [3]], [[0], [0]]]


@pytest.mark.parametrize("want_weights", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_counts_of_thousands_are_not_rounded(dtype: torch.dtype, want_weights: bool) -> None:
    """Of keys that are equal, the slot that stands for a few more tokens has so much more weight."""
    counts = torch.tensor([[[3074.0, 2981.0, 5000.0]]]).log()
    occupied = torch.tensor([[[True, True, False]]])
    q = torch.zeros(1, 1, 1, 2, dtype=dtype)
    k = torch.zeros(1, 1, 3, 2, dtype=dtype)
    v = torch.tensor([[[[1.0, 0.0], [-1.0, 1.0], [9.0, 9.0]]]], dtype=dtype)
    out, _ = attend_columns(q, ExactColumns(k, v), (), ~occupied, ScoreTransform(1.0), want_weights, counts)
    assert out[0, 0, 0].tolist() == pytest.approx([93 / 6055, 2981 / 6055], abs=2e-3)


@pytest.mark.parametrize("estimated", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
def test_a_head_without_a_token_has_no_output(in_place: bool, estimated: bool) -> None:
    q = torch.randn(1, GROUP, 1, DIM)
    k, v = torch.randn(2, 1, 1, 5, DIM)
    occupied = torch.zeros(1, 1, 5, dtype=torch.bool)

    def nothing(normalizer: Tensor) -> Estimated:
        return Estimated(torch.full((1, 1, GROUP, 2), -torch.inf), torch.ones(1, 1, 2, DIM))

    rest = nothing if estimated else None
    transform = ScoreTransform(1.0)
    if in_place:
        out, _ = attend_in_place(q, k, v, torch.arange(5)[None, None], occupied, transform, rest=rest)
    else:
        out, _ = attend_columns(q, ExactColumns(k, v), (), ~occupied, transform, False, rest=rest)
    assert torch.equal(out, torch.zeros_like(out))
