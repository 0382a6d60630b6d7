"""The public conformance checks pass what is right, and name the rule that a wrong part breaks."""

from __future__ import annotations

from dataclasses import dataclass, make_dataclass
from typing import Any, Literal, cast

import pytest
import torch
from torch import Tensor

from kvpolicy import KVPolicyError, Policy, TokenWise
from kvpolicy.protocols import (
    SMALLEST_HEAD,
    At,
    DecodeMode,
    Guarantee,
    HeadRequest,
    HeadShape,
    LayerBounds,
    Layout,
    ModelInfo,
    RotaryView,
    Scores,
    Selector,
    StageStore,
    State,
    Traits,
    View,
)
from kvpolicy.registry import lookup, names
from kvpolicy.statistics import AttentionSum, Results, Statistic
from kvpolicy.testing.conformance import check
from kvpolicy.testing.part_checks import FallingBounds
from kvpolicy.text.budget import waterfill
from tests.conformance.policies import words

SOME = ("squeeze", "adakv", "kvcrush", "kivi", "mikv")
PARTS = [
    pytest.param(name, marks=() if name in SOME else pytest.mark.slow)
    for name in names()
    # Nothing to check, and calibrated for other models.
    if name not in ("full", "csr", "kvquant", "duo", "lowrank", "oscar", "qfilters", "triattention", "kvzap", "loki")
]


@pytest.mark.parametrize("name", PARTS)
def test_every_part_passes(name: str) -> None:
    kind, cls = lookup(name)
    if kind == "head_allocator":
        return check(cls())
    policy = Policy.parse(words(*(("h2o", name) if kind != "selector" else (name,))))
    check(getattr(policy, kind))


@dataclass(frozen=True, kw_only=True)
class Layers:
    """An allocator that can go wrong."""

    how: str = "right"

    @property
    def layer_metric(self) -> Literal["", "cosine"]:
        return cast("Any", "entropy") if self.how == "measure" else ""

    def budgets(self, metrics: Tensor | None, total: Tensor, floor: int, ceiling: Tensor, layers: int) -> Tensor:
        wish = torch.ones(len(total), layers, dtype=torch.float64)
        if self.how == "total":
            total -= 1
        if self.how == "random":
            wish = torch.rand(len(total), layers, dtype=torch.float64) + 0.1
        if self.how == "rows":
            wish[:, 0] += len(total)
        found = waterfill(wish * (total / wish.sum(-1))[:, None], total, floor, ceiling)
        if self.how == "sum" or (self.how == "deep" and layers != 3):
            found[:, 0] += 1
        if self.how == "list":
            return cast("Any", found.tolist())
        return found.int() if self.how == "dtype" else found


@dataclass(frozen=True, kw_only=True)
class Bounded(FallingBounds):
    """Bounds that can be wrong."""

    how: str = "right"

    def bounds(
        self, metrics: Tensor, total: Tensor, floor: int, ceiling: Tensor, layers: int, queries: int
    ) -> LayerBounds:
        least, most = FallingBounds.bounds(self, metrics, total, floor, ceiling, layers, queries)
        return LayerBounds(least + int(self.how == "least"), most // (3 if self.how == "most" else 1))

    def guarantee(self, total: Tensor, floor: int, ceiling: Tensor, layers: int) -> Guarantee:
        least, together = FallingBounds.guarantee(self, total, floor, ceiling, layers)
        return Guarantee(least + int(self.how == "guarantee"), together // (3 if self.how == "together" else 1))


@dataclass(frozen=True, kw_only=True)
class Halving(Selector):
    """Keeps the newest tokens, or those of the middle under a small budget, and says that this is nested."""

    nested_from: int | None = 1
    decode: DecodeMode = "evict"

    def priority(self, state: State, view: View) -> Tensor:
        worth = view.positions.float()
        small = (view.budget < 20)[:, None, None]
        return torch.where(small, -(worth - 40).abs(), worth).masked_fill(view.newest(1), torch.inf)


@dataclass(frozen=True, kw_only=True)
class Heads:
    """A head allocator that can go wrong."""

    how: str = "right"
    compares_heads: bool = False

    def check(self, model: ModelInfo) -> None:
        pass

    def divide(self, request: HeadRequest) -> Tensor:
        heads = request.priority.shape[1]
        found = (request.pages // heads)[:, None].repeat(1, heads)
        found[:, 0] += request.pages % heads
        if self.how == "greedy":
            found = torch.cat([found.sum(-1, keepdim=True), torch.zeros_like(found[:, 1:])], -1)
        if self.how == "rows" and len(found) > 1:
            found[-1] += torch.tensor([1, -1])
        return {"sum": found + 1, "dtype": found.int()}.get(self.how, found)


@dataclass(frozen=True, kw_only=True)
class Tokens(Selector):
    """A selector that can go wrong."""

    how: str = "right"
    decode: DecodeMode = "evict"

    @property
    def statistics(self) -> tuple[Statistic[Any], ...]:
        return ()

    @property
    def min_tokens(self) -> int:
        return 0 if self.how == "zero" else 1

    def alloc(
        self, batch: int, heads: int, slots: int, device: torch.device | str, head: HeadShape = SMALLEST_HEAD
    ) -> State:
        return torch.zeros(batch, heads, slots + 1) if self.how == "alloc" else ()

    def observe(self, state: State, seen: Results, view: View) -> State:
        if self.how == "no state":
            return cast("Any", Scores(cast("Any", None)))
        return torch.zeros(3) if self.how == "observe" else state

    def step(self, state: State, row: Tensor, view: View) -> None:
        pass

    def priority(self, state: State, view: View) -> Tensor:
        worth = view.positions.float()
        if self.how == "random":
            worth = torch.rand(worth.shape)
        if self.how == "columns":
            worth = -torch.arange(worth.shape[-1]).expand(worth.shape).float().sub(50).abs()
        if self.how == "nan":
            worth = worth.masked_fill(view.positions % 3 == 0, torch.nan)
        if self.how == "first":  # four that always stay, though the floor is one
            worth = worth.masked_fill(view.positions < 4, torch.inf)
        if self.how in ("whole", "double"):
            return worth.long() if self.how == "whole" else worth.double()
        if self.how == "shape":
            return worth[:, 0]
        return worth if self.how == "newest" else worth.masked_fill(view.newest(1), torch.inf)

    def statistic(self, seen: Results, view: View) -> Tensor | None:
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Bytes(TokenWise):
    """A codec that can go wrong."""

    how: str = "right"
    group_size: int = 16
    residual_length: int = 8
    block_size: int = 8

    @property
    def traits(self) -> Traits:
        return Traits(block=0 if self.how == "block" else self.block_size, residual=self.residual_length)

    def layout(self, tokens: int) -> Layout:
        found = Layout(16, (max(tokens - 8, 0) // 8 * 8 + 8,))
        wrong = {"few": Layout(8, (tokens // 16 * 8,)), "stages": Layout(16, (*found.coded, 8))}
        return wrong.get(self.how, found)

    def alloc(self, batch: int, heads: int, slots: int, head_dim: int, device: torch.device | str) -> Any:
        found = TokenWise.alloc(self, batch, heads, slots, head_dim, device)
        if self.how == "meta" and str(device) == "meta":
            return found._replace(keys=found.keys[..., :1])
        return found

    def write(
        self, store: StageStore, keys: Tensor, values: Tensor, slots: Tensor, write_mask: Tensor, occupied: Tensor
    ) -> None:
        if self.how == "rows":
            keys = keys.mean(0, keepdim=True).expand_as(keys)
        if self.how == "shift":
            slots = (slots + 1) % store.codes.keys.shape[2]
        if self.how == "inactive":
            write_mask = torch.ones_like(write_mask)
        if self.how == "batch":
            scale = keys.abs().amax() / 127
            keys = (keys / scale).round() * scale
        if self.how == "clears":
            store.codes.keys.masked_fill_(~write_mask.any(-1)[..., None, None], 0)
        if self.how == "once" and bool(store.codes.keys.any()):
            return
        if self.how != "nothing":
            TokenWise.write(self, store, keys, values, slots, write_mask, occupied)

    def keys(self, store: StageStore, at: At) -> Tensor:
        found = TokenWise.keys(self, store, at)
        found = found + torch.randn_like(found) if self.how == "noise" else found
        return found.bfloat16() if self.how == "short" else found

    def score(self, store: StageStore, queries: Tensor, rope: RotaryView | None) -> Tensor:
        found = TokenWise.score(self, store, queries, rope)
        return {"score": found * 2, "hidden": torch.full_like(found, -torch.inf)}.get(self.how, found)

    def mix(self, store: StageStore, weights: Tensor) -> Tensor:
        found = TokenWise.mix(self, store, weights)
        return found.mean(0, keepdim=True).expand_as(found) if self.how == "mix" else found


class Unshared(TokenWise):
    """A codec that forgets that the mean of a channel belongs to a head."""

    def traits_for(self, tokens: int | None) -> Traits:
        return TokenWise.traits_for(self, tokens)._replace(per_head=("channel_scale",))


def test_right_ones_pass() -> None:
    check(Bytes())
    check(Layers())
    check(Heads())
    check(Tokens())
    check(Bounded())
    check(Halving(nested_from=None))
    check(Halving(nested_from=20))


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (Layers(how="sum"), "budgets must sum to"),
        (Layers(how="dtype"), r"must be int64 \[3, 3\], got int32"),
        (Layers(how="rows"), "must not depend on other rows"),
        (Layers(how="measure"), "layer_metric must be one of .*, got 'entropy'"),
        (Layers(how="total"), "must not modify its arguments, got another total"),
        (Layers(how="random"), "budgets must be deterministic, got others in a second call"),
        (Layers(how="deep"), "must sum to .* for 1 layers"),
        (Layers(how="list"), "must be int64 .*, got a list"),
        (Bounded(how="least"), "budgets must be within bounds"),
        (Bounded(how="most"), "budgets must be within bounds"),
        (Bounded(how="guarantee"), "guarantee must be at most the budgets"),
        (Bounded(how="together"), "bounds must fit the guarantee"),
        (Halving(), "must keep tokens that a larger one keeps, got others from 1 on"),
        (Heads(how="sum"), "pages must sum to"),
        (Heads(how="dtype"), r"divide must return int64 \[3, 2\], got int32"),
        (Heads(how="greedy"), "every head must have a page"),
        (Heads(how="rows"), "pages of a row must not depend on other rows"),
        (Tokens(how="random"), "must be deterministic, got other tokens in a second run"),
        (Tokens(how="columns"), "must not depend on padding"),
        (Tokens(how="nan"), "priority of a token must be a number or infinite, got NaN"),
        (Tokens(how="first"), "newest token must be kept"),
        (Tokens(how="whole"), "priority must be float32 .*, got int64"),
        (Tokens(how="double"), "priority must be float32 .*, got float64"),
        (Tokens(how="shape"), r"float32 \[1, 2, 96\], got float32 \[1, 96\]"),
        (Tokens(how="zero"), "min_tokens must be an integer of at least 1, got 0"),
        (Tokens(how="alloc"), r"= \[2, 2, 5\], got float32 \[2, 2, 6\]"),
        (Tokens(how="observe"), "observe must return tensors of shapes"),
        (Tokens(how="no state"), "observe must return tensors as alloc does, got a Scores of a NoneType"),
        (Bytes(how="block"), "block must be at least 1 with stages and 0 without, got 0"),
        (Bytes(how="few"), "layout must have 1000 slots for as many tokens, got"),
        (Bytes(how="stages"), "layout must have slots for 1 stages, got 2"),
        (Bytes(how="meta"), "same sizes on the device meta"),
        (Bytes(how="rows"), "the keys of a row must not depend on padding or other rows, got a difference"),
        (Bytes(how="inactive"), "write must ignore tokens outside write_mask, got other codes with NaN there: keys"),
        (Bytes(how="batch"), "write must encode a row as on its own, got other codes in a batch: keys differs"),
        (Bytes(how="clears"), "write must not change heads without a token in write_mask, got a change of keys"),
        (Bytes(how="once"), "write must replace codes, got the same for other tokens"),
        (Bytes(how="shift"), "must be closer to the original than zeros are, got"),
        (Bytes(how="nothing"), "must be closer to the original than zeros are, got"),
        (Bytes(how="noise"), "decoding must be deterministic, got other keys in a second call"),
        (Bytes(how="short"), "keys must return float32, got bfloat16"),
        (Bytes(how="score"), "score must be the product of queries and decoded keys, got"),
        (Bytes(how="hidden"), "score must not hide every token, got only -inf"),
        (Bytes(how="mix"), "mix must be the weighted sum of decoded values, got"),
        (Unshared(), "per_head must name all fields .* channel_zero has 1 entries"),
        (Tokens(decode=cast("Any", "keep")), "decode must be one of 'evict', 'grow', got 'keep'"),
    ],
)
def test_wrong_ones_are_told(part: Any, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check(part)


def test_what_is_no_strategy() -> None:
    with pytest.raises(AssertionError, match="must be a dataclass"):
        check("h2o")  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"The strategy must be an instance, got the class Tokens; try Tokens\(\)\."):
        check(Tokens)  # pyright: ignore[reportArgumentType]


def test_what_would_fail_in_a_forward_is_refused_with_the_policy() -> None:
    class Mutable(Tokens):
        __hash__: Any = None  # as of a dataclass that is not frozen

    @dataclass(frozen=True, kw_only=True)
    class Listed(Tokens):
        of: Any = ()

    @dataclass(frozen=True, kw_only=True)
    class Asking(Tokens):
        of: Any = ()

        @property
        def statistics(self) -> Any:
            return self.of

    for part in (Mutable, lambda: Listed(of=[1])):
        with pytest.raises(KVPolicyError, match=r"selector must be immutable, got .*; try @dataclass\(frozen=True\)"):
            Policy(selector=part(), budget=8)
    for given in ((AttentionSum,), AttentionSum(), AttentionSum):
        with pytest.raises(KVPolicyError, match="The selector must hand over statistics as a tuple of objects, got"):
            Policy(selector=Asking(of=given), budget=8)
    assert Policy(selector=Asking(of=(AttentionSum(),)), budget=8).selector.statistics == (AttentionSum(),)


def test_what_is_missing_is_named() -> None:
    names = ("statistics", "min_tokens", "alloc", "observe", "step", "statistic", "decode")
    for left_out, told in ((0, "lacks priority of"), (1, "lacks decode, priority of")):
        members = {name: getattr(Tokens, name) for name in names[: len(names) - left_out]}
        part = make_dataclass("Part", [("how", str, "right")], namespace=members, frozen=True, kw_only=True)()
        with pytest.raises(
            TypeError,
            match=r"an allocator, a selector, a merger, a codec or a reader, got .*; "
            rf"it {told} kvpolicy\.protocols\.Selector\.",
        ):
            check(part)
    part = make_dataclass("Part", [], namespace={"budgets": Layers.budgets}, frozen=True, kw_only=True)()
    with pytest.raises(TypeError, match=r"lacks layer_metric of kvpolicy\.protocols\.Allocator"):
        check(part)
    with pytest.raises(TypeError, match=r"or a reader, got .*; see kvpolicy\.protocols"):
        check(make_dataclass("Part", [], frozen=True, kw_only=True)())
