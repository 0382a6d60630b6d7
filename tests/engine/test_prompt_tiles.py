"""A prompt in tiles is attended to, and seen, as one in one piece: after slots, after held chunks, with padding."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kvpolicy import CountedMerge, DoubleSparsity, MiKV, Plain, SlidingWindow
from kvpolicy.engine.layer_spec import LayerSpec
from kvpolicy.engine.layer_store import LayerStore
from kvpolicy.engine.prefill import PendingPrompt
from kvpolicy.engine.prompt_tiles import PromptTiles
from kvpolicy.engine.row_limits import RowBudget
from kvpolicy.engine.state import tensors
from kvpolicy.selectors.a2sf import DecayedSum
from kvpolicy.selectors.blocks import BlockAttention
from kvpolicy.selectors.probe import ProbeQueries
from kvpolicy.selectors.scissorhands import BelowMean
from kvpolicy.statistics import AttentionSum, Forward, ModuleCall, Moments, NewestQueries, RecentQueries, Statistic
from kvpolicy.statistics.windows import ScoreTransform
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


def test_tensors_are_allocated_once() -> None:
    prompt = Prompt(1, 12, 0, "none")
    layer = store(True)
    layer.initialize(prompt.k, group=GROUP)
    tiles = layer.begin_tiles(prompt.q[:, :, :5], prompt.k[:, :, :5], 12, None)
    transform = ScoreTransform(0.4)
    tiles.attend(prompt.q[:, :, :5], prompt.k[:, :, :5], prompt.v[:, :, :5], transform)
    before = tiles.prompt(transform).keys.data_ptr()
    tiles.attend(prompt.q[:, :, 5:], prompt.k[:, :, 5:], prompt.v[:, :, 5:], transform)
    assert tiles.prompt(transform).keys.data_ptr() == before
    assert torch.equal(tiles.prompt(transform).keys, prompt.k)
