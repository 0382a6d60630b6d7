"""The checks of `kvpolicy.testing.check` that look at what a part returns, or whether layers may drop tokens early."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, cast, get_args
from unittest import mock

import torch
from torch import Tensor

from kvpolicy.engine.state import empty_slots, slot_tensors, tensors
from kvpolicy.protocols import (
    Allocator,
    AttentionNeeds,
    BoundsBudgets,
    Candidates,
    Codec,
    DecodeMode,
    Guarantee,
    HeadAllocator,
    HeadRequest,
    HeadShape,
    LayerAttention,
    LayerBounds,
    LayerMetric,
    MeasuresAttention,
    Merger,
    Selector,
    Tokens,
    View,
)
from kvpolicy.statistics import RecentQueries, ReplayedRows
from kvpolicy.statistics.statistic import first_of
from kvpolicy.text.budget import waterfill


@dataclass(frozen=True, kw_only=True, slots=True)
class FallingBudgets(Allocator):
    """Half as many tokens again for each earlier layer, after every layer was measured."""

    layer_metric: ClassVar[LayerMetric] = "attention"  # pyright: ignore[reportIncompatibleMethodOverride]

    @property
    def attention(self) -> AttentionNeeds:
        """None."""
        return AttentionNeeds()

    def measure(self, seen: LayerAttention) -> Tensor:
        """The same for every layer."""
        return torch.ones(len(seen.length))

    def budgets(self, metrics: Tensor | None, total: Tensor, floor: int, ceiling: Tensor, layers: int) -> Tensor:
        """Tokens per layer and row, [B, L] int64."""
        shares = 1.5 ** -torch.arange(layers, dtype=torch.float64)
        return waterfill(total[:, None] * shares / shares.sum(), total, floor, ceiling)


@dataclass(frozen=True, kw_only=True, slots=True)
class FallingBounds(FallingBudgets):
    """The same with bounds, so that layers drop tokens under a larger budget than they are given."""

    def bounds(
        self, metrics: Tensor, total: Tensor, floor: int, ceiling: Tensor, layers: int, queries: int
    ) -> LayerBounds:
        """The budgets of the layers, and twice as much."""
        known = self.budgets(None, total, floor, ceiling, layers)[:, : metrics.shape[1]]
        return LayerBounds(known, 2 * known)

    def guarantee(self, total: Tensor, floor: int, ceiling: Tensor, layers: int) -> Guarantee:
        """The last layer has the fewest tokens."""
        return Guarantee(self.budgets(None, total, floor, ceiling, layers)[:, -1], 2 * total)


_TOKENS = 1000

MAX_LOSS = 1.0
"""The maximum relative error of decoded vectors: that of decoding everything to zero."""

MAX_BATCH_DIFFERENCE = 0.1
"""The maximum relative difference of decoded vectors between a row on its own and in a batch."""

MAX_SUM_DIFFERENCE = 1e-3
"""The maximum relative difference of `score` and `mix` from the same products with decoded vectors."""


def check_budgets(part: Allocator, layers: int) -> None:
    """Check the sums and bounds of an allocator, for a model of `layers` layers."""
    metric = part.layer_metric
    known = get_args(LayerMetric)
    assert metric in known, f"{part}: layer_metric must be one of {known}, got {metric!r}"
    measures = isinstance(part, MeasuresAttention)
    assert metric not in ("attention", "curve") or measures, f"{part}: lacks attention or measure for its layer_metric"
    total = torch.tensor([20, 15, 66]) * layers
    ceiling = torch.tensor([60, 20, 90])
    drawn = torch.rand(3, layers, 90, generator=torch.Generator().manual_seed(0)).sort(-1, descending=True).values
    if isinstance(part, MeasuresAttention) and metric == "attention":
        metrics = torch.stack([_measured(part, drawn[:, layer]) for layer in range(layers)], 1)
    else:
        metrics = {"": None, "cosine": drawn[:, :, 0], "curve": drawn}[metric]
    budgets = _budgets(part, metrics, total, ceiling, layers)
    shown = f"{budgets.tolist()} for {layers} layers"
    assert budgets.sum(-1).tolist() == total.tolist(), f"{part}: budgets must sum to {total.tolist()}, got {shown}"
    assert int(budgets.min()) >= 3, f"{part}: budgets must be at least the floor, 3, got {shown}"
    is_usable = bool((budgets <= ceiling[:, None]).all())
    assert is_usable, f"{part}: budgets must be at most the ceiling, {ceiling.tolist()}, got {shown}"
    if isinstance(part, BoundsBudgets) and metrics is not None and metrics.dim() == 2:
        whole = ceiling.clamp_min(drawn.shape[-1])  # a layer can use all tokens that were measured
        _check_bounds(part, metrics, total, whole, _budgets(part, metrics, total, whole, layers))
    again = _budgets(part, metrics, total, ceiling, layers)
    assert torch.equal(again, budgets), f"{part}: budgets must be deterministic, got others in a second call"
    for row in range(3):
        one = slice(row, row + 1)
        alone = _budgets(part, None if metrics is None else metrics[one], total[one], ceiling[one], layers)
        same = torch.equal(alone, budgets[one])
        assert same, f"{part}: the budgets of a row must not depend on other rows, got others without them"


def _check_bounds(part: BoundsBudgets, metrics: Tensor, total: Tensor, ceiling: Tensor, budgets: Tensor) -> None:
    """Check that budgets [B, L] are within the bounds that were known before all layers were measured."""
    layers = metrics.shape[1]
    least, together = part.guarantee(total, 3, ceiling, layers)
    is_less = bool((budgets >= least[:, None]).all())
    assert is_less, f"{part}: guarantee must be at most the budgets, got {least.tolist()} for {budgets.tolist()}"
    for seen in range(1, layers + 1):
        bounds = part.bounds(metrics[:, :seen], total, 3, ceiling, layers, 2)
        own = budgets[:, :seen]
        within = bool(((bounds.least <= own) & (own <= bounds.most)).all())
        assert within, f"{part}: budgets must be within bounds, got {own.tolist()} for {bounds} after {seen} layers"
        fits = bool((bounds.most.sum(-1) <= together).all())
        assert fits, f"{part}: bounds must fit the guarantee {together.tolist()}, got {bounds.most.tolist()}"


def _measured(part: MeasuresAttention, drawn: Tensor) -> Tensor:
    """The numbers of a layer of two query heads by drawn statistics [B, N], after checking them."""
    batch, tokens = drawn.shape
    both = torch.stack([drawn / drawn.sum(-1, keepdim=True), drawn.flip(-1) / drawn.sum(-1, keepdim=True)], 1)
    given: dict[str, Tensor] = {
        "mean": both,
        "variance": both / 10,
        "entropy": -(both * both.log()),
        "total": both * tokens,
        "value_size": both[:, :, 0],
    }
    seen = LayerAttention(
        torch.arange(tokens).expand(batch, -1),
        torch.full((batch,), tokens),
        torch.full((batch,), min(part.attention.queries, tokens)),
        kv_heads=2,
    )._replace(**{name: given[name] for name in part.attention.reductions})
    numbers: Any = part.measure(seen)
    is_tensor = isinstance(numbers, Tensor) and len(numbers) == batch
    is_finite = (
        is_tensor and bool((numbers < torch.inf).all()) and (numbers.dim() > 1 or bool(numbers.isfinite().all()))
    )
    assert is_finite, f"{part}: measure must return finite numbers of each row, got {describe(numbers)}"
    return numbers.float()


def _budgets(part: Allocator, metrics: Tensor | None, total: Tensor, ceiling: Tensor, layers: int) -> Tensor:
    """The budgets of a part, after checking their type and that the arguments were not modified."""
    given = [None if metrics is None else metrics.clone(), total.clone(), ceiling.clone()]
    budgets: Any = part.budgets(given[0], given[1], 3, given[2], layers)  # pyright: ignore[reportArgumentType]
    shape = (len(total), layers)
    is_valid = isinstance(budgets, Tensor) and budgets.dtype == torch.int64 and budgets.shape == shape
    assert is_valid, f"{part}: budgets must be int64 {list(shape)}, got {describe(budgets)}"
    for name, now, then in zip(("metrics", "total", "ceiling"), given, (metrics, total, ceiling), strict=True):
        same = now is None or then is None or torch.equal(now, then)
        assert same, f"{part}: budgets must not modify its arguments, got another {name} after the call"
    return budgets


def check_divided(part: HeadAllocator, heads: int) -> None:
    """Check the pages that a head allocator gives each of `heads` heads."""
    positions = torch.arange(40, dtype=torch.int32).expand(3, heads, -1)
    length = torch.full((3,), 40)
    pages = torch.tensor([1, 4, 9]) * heads + torch.tensor([0, 0, heads - 1])
    for priority in _uneven_priorities(heads, 40):
        priority = priority.expand(3, -1, -1).masked_fill(positions >= 37, torch.inf)
        request = HeadRequest(priority, View(positions, length, 4 * pages // heads, 0), pages, length // 10, pages)
        divided = _divided(part, request, heads)
        again = _divided(part, request, heads)
        assert torch.equal(again, divided), f"{part}: divide must be deterministic, got others in a second call"
        for row in range(3):
            one = slice(row, row + 1)
            view = request.view._replace(positions=positions[one], length=length[one], budget=request.view.budget[one])
            alone = HeadRequest(priority[one], view, *(column[one] for column in request[2:]))
            same = torch.equal(_divided(part, alone, heads), divided[one])
            assert same, f"{part}: the pages of a row must not depend on other rows, got others without them"


def _uneven_priorities(heads: int, tokens: int) -> list[Tensor]:
    """Priorities [1, H, N]: random ones, equal ones, and those that put everything into one head."""
    random = torch.rand(1, heads, tokens, generator=torch.Generator().manual_seed(0))
    of_one_head = [random * (torch.arange(heads) == head)[:, None] for head in (0, heads - 1)]
    return [random, torch.zeros_like(random), *of_one_head]


def _divided(part: HeadAllocator, request: HeadRequest, heads: int) -> Tensor:
    """The pages that a part gives, after checking them."""
    pages: Any = part.divide(request)
    shape = (len(request.pages), heads)
    is_valid = isinstance(pages, Tensor) and pages.dtype == torch.int64 and pages.shape == shape
    assert is_valid, f"{part}: divide must return int64 {list(shape)}, got {describe(pages)}"
    total = request.pages.tolist()
    assert pages.sum(-1).tolist() == total, f"{part}: pages must sum to {total}, got {pages.tolist()}"
    assert int(pages.min()) >= 1, f"{part}: every head must have a page, got {pages.tolist()}"
    protected = (request.priority == torch.inf).sum(-1)
    fair = (request.pages // heads * request.size)[:, None]
    has_room = bool((pages * request.size[:, None] >= torch.minimum(protected, fair)).all())
    assert has_room, f"{part}: a head must have room for what its selector always keeps, got {pages.tolist()} pages"
    return pages


def check_selector(part: Selector) -> None:
    """Check the properties of a selector, and its empty state."""
    min_tokens: Any = part.min_tokens
    modes = get_args(DecodeMode)
    assert part.decode in modes, f"{part}: decode must be one of {', '.join(map(repr, modes))}, got {part.decode!r}"
    is_count = isinstance(min_tokens, int) and not isinstance(min_tokens, bool) and min_tokens >= 1
    assert is_count, f"{part}: min_tokens must be an integer of at least 1, got {min_tokens!r}"
    state = part.alloc(2, 2, 5, "cpu", HeadShape(3, 4))
    for each in slot_tensors(state):
        is_per_slot = each.shape == (2, 2, 5)
        assert is_per_slot, f"{part}: the tensors of a state must be [B, H, S] = [2, 2, 5], got {describe(each)}"
    for each in tensors(state):
        assert each.shape[0] == 2, (
            f"{part}: the tensors of a state must have 2 rows like the batch, got {describe(each)}"
        )
        assert not bool(each.any()), f"{part}: a new state must be zero, got other numbers"


def check_merger(part: Merger) -> None:
    """Check the state of a merger, and what it returns of random tokens."""
    when = part.traits.when
    assert when in ("never", "prompt", "always"), f"{part}: when must be never, prompt or always, got {when!r}"
    for state in tensors(part.alloc(2, 3, "cpu")):
        assert state.shape[:2] == (2, 3), f"{part}: the tensors of a state must be [B, H, ...], got {describe(state)}"
        assert not bool(state.any()), f"{part}: a new state must be zero, got other numbers"
    # Where nothing is evicted, a prompt stays bit for bit.
    whole = _candidates(part, evicted=0)
    result = part.merge_prompt(part.alloc(2, 3, "cpu"), whole)
    for name, before in (("values", whole.values), ("keys", whole.keys), ("counts", whole.counts)):
        after = getattr(result, name)
        same = after is None or (before is not None and torch.equal(after, whole.at_targets(before)))
        assert same, f"{part}: merge_prompt must return {name} as they are if nothing is evicted, got other numbers"
    # Where something is, arguments are only read: the engine uses them afterwards.
    given = _candidates(part, evicted=5)
    passed = [t for t in given if isinstance(t, Tensor)]
    copies = [t.clone() for t in passed]
    result = part.merge_prompt(part.alloc(2, 3, "cpu"), given)
    for now, then in zip(passed, copies, strict=True):
        same = torch.equal(now, then)
        assert same, f"{part}: merge_prompt must not modify its arguments, got other numbers after the call"
    _check_merged(part, "merge_prompt", result, (2, 3, given.targets.shape[-1]))
    # In decoding, one victim of each head goes into a slot.
    if when == "always":
        pick = torch.tensor([[[0]] * 3] * 2)
        counts = None if given.counts is None else given.counts[:, :, :1]
        there = torch.ones_like(pick, dtype=torch.bool)
        victim = Tokens(given.keys[:, :, :1], given.values[:, :, :1], given.positions[:, :, :1], counts, there)
        slots = Tokens(given.keys, given.values, given.positions, given.counts, given.positions > 0, given.priority)
        merge = part.merge_token(part.alloc(2, 3, "cpu"), victim, slots)
        for name, dtype in (("slot", torch.int64), ("write_mask", torch.bool)):
            got = getattr(merge, name)
            is_valid = got.dtype == dtype and got.shape == (2, 3, 1)
            assert is_valid, f"{part}: {name} must be {dtype} [2, 3, 1], got {describe(got)}"
        _check_merged(part, "merge_token", merge, (2, 3, 1))


def _candidates(part: Merger, evicted: int) -> Candidates:
    """Two rows of three heads with 12 random tokens, of which the first `evicted` after the first are evicted."""
    generator = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(2, 3, 12, 8, generator=generator) for _ in range(2))
    positions = torch.arange(12, dtype=torch.int32).expand(2, 3, -1).contiguous()
    kept = (positions == 0) | (positions > evicted)
    targets = kept.int().argsort(dim=-1, descending=True, stable=True)[..., : 12 - evicted]
    counts = torch.zeros(2, 3, 12) if part.traits.counted else None
    recent = first_of(RecentQueries, part.statistics)
    width = 0 if recent is None else recent.width
    attention = torch.rand(2, 6, width, 12, generator=generator).softmax(-1) if width else None
    again = first_of(ReplayedRows, part.statistics)
    width = 0 if again is None else again.width
    replayed = torch.rand(2, 6, width, 12, generator=generator).softmax(-1) if width else None
    length = torch.tensor([12, 12])
    priority = positions.float() if part.traits.ranked else None
    return Candidates(
        keys,
        values,
        positions,
        kept,
        targets,
        torch.ones_like(targets, dtype=torch.bool),
        counts,
        attention,
        length,
        priority,
        replay_attention=replayed,
    )


def _check_merged(part: Merger, method: str, result: Any, shape: tuple[int, int, int]) -> None:
    """Check the shapes and numbers of the result of a merge."""
    for name, wanted in (("values", [*shape, 8]), ("keys", [*shape, 8]), ("counts", [*shape])):
        got = getattr(result, name)
        if got is None:
            continue
        assert list(got.shape) == wanted, f"{part}: {method} must return {name} {wanted}, got {describe(got)}"
        assert bool(got.isfinite().all()), f"{part}: the {name} of {method} must be finite, got NaN or inf"
    has_counts = result.counts is None or part.traits.counted
    assert has_counts, f"{part}: {method} must return no counts unless the merger is counted, got {result.counts}"


def _is_state(result: Any) -> bool:
    return isinstance(result, Tensor) or (isinstance(result, tuple) and all(map(_is_state, cast("Any", result))))


@contextmanager
def watched(part: Any) -> Generator[None, None, None]:
    """Check what `priority` and `observe` of a selector return, whenever they are called in the context."""
    if not isinstance(part, Selector):
        yield
        return
    # On the class, since an instance is frozen and cannot be patched.
    cls: Any = type(part)
    priority = cls.priority
    observe = cls.observe

    def checked_priority(self: Any, state: Any, view: View) -> Tensor:
        result = priority(self, state, view)
        shape = view.positions.shape
        is_valid = isinstance(result, Tensor) and result.dtype == torch.float32 and result.shape == shape
        assert is_valid, f"{self}: priority must be float32 {list(shape)}, got {describe(result)}"
        has_nan = bool((result.isnan() & view.valid).any())
        assert not has_nan, f"{self}: the priority of a token must be a number or infinite, got NaN"
        return result

    def checked_observe(self: Any, state: Any, seen: Any, view: View) -> Any:
        result = observe(self, state, seen, view)
        assert _is_state(result), f"{self}: observe must return tensors as alloc does, got {describe(result)}"
        shapes = [list(each.shape) for each in tensors(result)]
        expected = [list(each.shape) for each in tensors(empty_slots(state, view.positions.shape[-1]))]
        assert shapes == expected, f"{self}: observe must return tensors of shapes {expected}, got {shapes}"
        return result

    with (
        mock.patch.object(cls, "priority", checked_priority),
        mock.patch.object(cls, "observe", checked_observe),
    ):
        yield


def check_layout(part: Codec) -> None:
    """Check the layout of a codec, and the sizes of its empty codes."""
    traits = part.traits
    stages = part.stages
    layout = part.layout(_TOKENS)
    fits = len(layout.coded) in (0, len(stages))  # 0 if all slots are in full precision
    assert fits, f"{part}: the layout must have slots for {len(stages)} stages, got {len(layout.coded)}"
    has_block = bool(stages) == bool(traits.block)
    assert has_block, f"{part}: block must be at least 1 with stages and 0 without, got {traits.block}"
    assert layout.slots >= _TOKENS, (
        f"{part}: the layout must have {_TOKENS} slots for as many tokens, got {layout.slots}"
    )
    for stage, size in zip(stages, layout.coded, strict=False):
        actual, planned = (
            [(list(each.shape), each.dtype) for each in tensors(stage.alloc(1, 2, size, 16, device))]
            for device in ("cpu", "meta")
        )
        same = actual == planned
        assert same, f"{part}: codes must have the same sizes on the device meta, as a plan needs, got {planned}"


def check_reading(part: Codec, layer: Any, keys: Tensor, values: Tensor) -> None:
    """Check what a codec decodes from a layer.

    Args:
        part: The codec.
        layer: The first layer of the cache; its inputs do not depend on the codec.
        keys: Keys of all tokens, as attention sees them, [B, H, N, D].
        values: Values of all tokens, [B, H, N, D].
    """
    coded = None if layer.slots is None else layer.slots.codes.view()
    if coded is None:
        return
    readings = [coded.read(torch.float32), coded.read(torch.float32)]
    positions = layer.tensors.positions[..., layer.layout.exact :]
    occupied = positions >= 0
    at = positions.clamp_min(0).long()[..., None].expand(-1, -1, -1, keys.shape[-1])
    for which, name, original in ((0, "keys", keys), (1, "values", values)):
        first, second = (torch.cat([pair[which] for pair in reading], 2) for reading in readings)
        assert first.shape == at.shape, f"{part}: decoded {name} must be {list(at.shape)}, got {list(first.shape)}"
        same = torch.equal(first[occupied], second[occupied])
        assert same, f"{part}: decoding must be deterministic, got other {name} in a second call"
        loss = _difference(original.gather(2, at)[occupied], first[occupied])
        assert loss < MAX_LOSS, f"{part}: decoded {name} must be closer to the original than zeros are, got {loss:.2f}"
    _check_products(part, layer)


def _check_products(part: Codec, layer: Any) -> None:
    """Check that `score` and `mix` are the products with what `keys` and `values` decode."""
    if layer.slots is None:
        return
    codes = layer.slots.codes
    coded = codes.view()
    if coded is None:
        return
    starts = layer.layout.starts()
    stages = [stage for stage, size in enumerate(layer.layout.coded) if size]
    occupied_by_stage = [
        layer.tensors.positions[..., starts[stage] : starts[stage] + layer.layout.coded[stage]] >= 0 for stage in stages
    ]
    weights_by_stage = [_equal_weights(occupied) for occupied in occupied_by_stage]
    decoded = coded.read(torch.float32)
    shape = (*occupied_by_stage[0].shape[:2], 2, decoded[0][0].shape[-1])
    queries = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    results = zip(
        stages,
        [columns.score(queries) for columns in coded],
        [columns.mix(weights) for columns, weights in zip(coded, weights_by_stage, strict=True)],
        decoded,
        weights_by_stage,
        occupied_by_stage,
        strict=True,
    )
    for stage, score, mixed, (keys, values), weights, occupied in results:
        stored = part.stages[stage].keys(codes.stage_store(stage), slice(0, occupied.shape[-1]))
        for name, tensor in (("keys", stored), ("score", score), ("mix", mixed)):
            assert tensor.dtype == torch.float32, f"{part}: {name} must return float32, got {describe(tensor)}"
        # A codec that searches hides tokens from a step by a score of -inf (`Traits.search`).
        visible = occupied[:, :, None] & (score > -torch.inf)
        assert bool(visible.any()) or not bool(occupied.any()), (
            f"{part}: score must not hide every token, got only -inf"
        )
        difference = _difference((queries @ keys.mT)[visible], score[visible])
        is_close = difference < MAX_SUM_DIFFERENCE
        assert is_close, (
            f"{part}: score must be the product of queries and decoded keys, got a difference of {difference}"
        )
        difference = _difference(weights @ values, mixed)
        is_close = difference < MAX_SUM_DIFFERENCE
        assert is_close, f"{part}: mix must be the weighted sum of decoded values, got a difference of {difference}"


def _equal_weights(occupied: Tensor) -> Tensor:
    """The same attention weight for every token of a head, [B, H, 2, C]."""
    weights = occupied.float() / occupied.sum(-1, keepdim=True).clamp_min(1)
    return weights[:, :, None].expand(-1, -1, 2, -1)


def check_batch(part: Codec, alone: Any, together: Any, row: int) -> None:
    """Check that a codec decodes the same for a row in a batch as for the row on its own, given their first layers."""
    _check_products(part, together)
    for which, name in ((0, "keys"), (1, "values")):
        one, two = (_by_position(layer, at)[which] for layer, at in ((alone, 0), (together, row)))
        difference = _difference(one, two) if one.shape == two.shape else 0.0
        assert difference < MAX_BATCH_DIFFERENCE, (
            f"{part}: the {name} of a row must not depend on padding or other rows, got a difference of "
            f"{difference:.2f}"
        )


def _by_position(layer: Any, row: int) -> tuple[Tensor, Tensor]:
    """Keys and values of the tokens of a row, in order of position."""
    past = layer.past()
    order = layer.tensors.positions[row].argsort(-1)
    occupied = layer.tensors.positions[row].gather(-1, order) >= 0
    index = order[..., None].expand(-1, -1, past.keys.shape[-1])
    keys, values = (each[row].gather(1, index)[occupied] for each in (past.keys, past.values))
    return keys, values


def _difference(expected: Tensor, actual: Tensor) -> float:
    """The norm of the difference relative to the norm of `expected`; infinite if it is NaN."""
    if not expected.numel():
        return 0.0
    difference = float((expected - actual).norm() / expected.norm().clamp_min(1e-9))
    return difference if difference == difference else float("inf")


def describe(result: Any) -> str:
    """Describe a result in an error message: a tensor by its dtype and shape, a tuple by what it has."""
    if isinstance(result, tuple) and result:
        return f"a {type(result).__name__} of {', '.join(map(describe, result))}"  # pyright: ignore
    if not isinstance(result, Tensor):
        return f"a {type(result).__name__}"
    return f"{str(result.dtype).removeprefix('torch.')} {list(result.shape)}"
