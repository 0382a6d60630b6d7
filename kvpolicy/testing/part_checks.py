"""The rules of `kvpolicy.testing.check` that a part is held to by looking at what it returns."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, get_args
from unittest import mock

import torch
from torch import Tensor

from kvpolicy.engine.state import tensors
from kvpolicy.protocols import Allocator, Codec, DecodeMode, Selector, View

_TOKENS = 1000
LOST, APART, CLOSE = 1.0, 0.1, 1e-3
"""How far a coded vector may be from the original, from itself in another batch, and sums from those of what is read,
as shares of them."""


def check_budgets(part: Allocator, layers: int) -> None:
    """Hold an allocator to its sums and bounds, for a model of some layers.

    Args:
        part: The allocator.
        layers: How many.
    """
    assert part.layer_metric in ("", "cosine"), f"{part}: measure is {part.layer_metric!r}, and may be '' or 'cosine'"
    total, ceiling = torch.tensor([20, 15, 66]) * layers, torch.tensor([60, 20, 90])
    metrics = torch.rand(3, layers, generator=torch.Generator().manual_seed(0)) if part.layer_metric else None
    found = _budgets(part, metrics, total, ceiling, layers)
    shown = f"budgets {found.tolist()} of {layers} layers"
    assert found.sum(-1).tolist() == total.tolist(), f"{part}: {shown} do not sum to {total.tolist()}"
    assert int(found.min()) >= 3, f"{part}: a layer gets less than the floor, 3: {shown}"
    assert bool((found <= ceiling[:, None]).all()), f"{part}: a layer gets more than it can use: {shown}"
    again = _budgets(part, metrics, total, ceiling, layers)
    assert torch.equal(again, found), f"{part}: budgets are others when asked a second time"
    for row in range(3):
        one = slice(row, row + 1)
        alone = _budgets(part, None if metrics is None else metrics[one], total[one], ceiling[one], layers)
        assert torch.equal(alone, found[one]), f"{part}: a row's budgets depend on the other rows"


def _budgets(part: Allocator, metrics: Tensor | None, total: Tensor, ceiling: Tensor, layers: int) -> Tensor:
    given = [None if metrics is None else metrics.clone(), total.clone(), ceiling.clone()]
    found: Any = part.budgets(given[0], given[1], 3, given[2], layers)  # pyright: ignore[reportArgumentType]
    is_right = isinstance(found, Tensor) and found.dtype == torch.int64 and found.shape == (len(total), layers)
    assert is_right, f"{part}: budgets are int64 [B, L], here {[len(total), layers]}, and not {_told(found)}"
    for name, now, then in zip(("measures", "total", "ceiling"), given, (metrics, total, ceiling), strict=True):
        same = now is None or then is None or torch.equal(now, then)
        assert same, f"{part}: budgets changes its argument {name} in place"
    return found


def check_words(part: Selector) -> None:
    """Hold a selector to what it says of itself before anything runs."""
    floor: Any = part.min_tokens
    modes = get_args(DecodeMode)
    assert part.decode in modes, f"{part}: decode is {part.decode!r}, and may be {' or '.join(map(repr, modes))}"
    is_count = isinstance(floor, int) and not isinstance(floor, bool) and floor >= 1
    assert is_count, f"{part}: the floor is {floor!r}, and must be a whole number of tokens, at least 1"
    for held in tensors(part.alloc(2, 2, 5, "cpu")):
        assert held.shape == (2, 2, 5), (
            f"{part}: a state's tensors are [B, H, S], here [2, 2, 5], and not {_told(held)}"
        )
        assert not bool(held.any()), f"{part}: a new state is not all zeros"


@contextmanager
def watched(part: Any) -> Generator[None, None, None]:
    """Hold a selector to the shapes of what it returns, and to numbers, in all that runs meanwhile."""
    if not isinstance(part, Selector):
        yield
        return
    kind: Any = type(part)
    priority, observe = kind.priority, kind.observe

    def priority_(self: Any, state: Any, view: View) -> Tensor:
        worth = priority(self, state, view)
        is_right = isinstance(worth, Tensor) and worth.dtype == torch.float32 and worth.shape == view.positions.shape
        assert is_right, f"{self}: the priority is fp32 {list(view.positions.shape)}, and not {_told(worth)}"
        assert not bool((worth.isnan() & view.valid).any()), f"{self}: the priority of a token is NaN"
        return worth

    def observe_(self: Any, state: Any, seen: Any, view: View) -> Any:
        found = observe(self, state, seen, view)
        shapes, wanted = [list(held.shape) for held in tensors(found)], list(view.positions.shape)
        assert shapes == [wanted for _ in tensors(state)], f"{self}: observe returns {shapes} in place of {wanted}"
        return found

    with mock.patch.object(kind, "priority", priority_), mock.patch.object(kind, "observe", observe_):
        yield


def check_layout(part: Codec) -> None:
    """Hold a codec to what it says of itself before anything is coded."""
    traits, stages, layout = part.traits, part.stages, part.layout(_TOKENS)
    fits = len(layout.coded) in (0, len(stages))  # none where all is exact
    assert fits, f"{part}: {len(stages)} stages, and the layout has {len(layout.coded)}"
    assert bool(stages) == bool(traits.block), f"{part}: a codec with stages has a block of at least 1, others 0"
    assert layout.slots >= _TOKENS, f"{part}: a layout of {layout.slots} slots for {_TOKENS} tokens"
    for stage, size in zip(stages, layout.coded, strict=False):
        real, planned = (
            [(list(held.shape), held.dtype) for held in tensors(stage.alloc(1, 2, size, 16, device))]
            for device in ("cpu", "meta")
        )
        assert real == planned, f"{part}: codes are of other sizes on the device meta, so that a plan is wrong"


def check_reading(part: Codec, layer: Any, keys: Tensor, values: Tensor) -> None:
    """Hold a codec to what it wrote into a layer.

    Args:
        part: The codec.
        layer: Whose hidden states it did not change: the first.
        keys: Of every token, as attention sees them, [B, H, N, D].
        values: Likewise.
    """
    coded = layer.coded_view()
    if coded is None:
        return
    stages = [coded.read(torch.float32), coded.read(torch.float32)]
    occupied = layer.positions[..., layer.layout.exact :] >= 0
    at = layer.positions[..., layer.layout.exact :].clamp_min(0).long()[..., None].expand(-1, -1, -1, keys.shape[-1])
    for which, name, truth in ((0, "keys", keys), (1, "values", values)):
        first, second = (torch.cat([pair[which] for pair in read], 2) for read in stages)
        assert first.shape == at.shape, f"{part}: {name} read are {list(at.shape)}, and not {list(first.shape)}"
        assert torch.equal(first[occupied], second[occupied]), f"{part}: {name} read twice are not the same"
        lost = _apart(truth.gather(2, at)[occupied], first[occupied])
        assert lost < LOST, f"{part}: {name} read are no nearer to those written than zeros are ({lost:.2f})"
    _check_products(part, layer)


def _check_products(part: Codec, layer: Any) -> None:
    """What attention asks of a codec is what reading the vectors would give."""
    coded, starts = layer.coded_view(), layer.layout.starts()
    if coded is None:
        return
    stages = [stage for stage, size in enumerate(layer.layout.coded) if size]
    lives = [layer.positions[..., starts[at] : starts[at] + layer.layout.coded[at]] >= 0 for at in stages]
    shares = [_even(occupied) for occupied in lives]
    read = coded.read(torch.float32)
    shape = (*lives[0].shape[:2], 2, read[0][0].shape[-1])
    queries = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    found = zip(stages, coded.score(queries), coded.mix(shares), read, shares, lives, strict=True)
    for stage, score, mixed, (keys, values), share, occupied in found:
        raw = part.stages[stage].keys(layer.stage_store(stage), slice(0, occupied.shape[-1]))
        for name, tensor in (("keys", raw), ("score", score), ("mix", mixed)):
            assert tensor.dtype == torch.float32, f"{part}: {name} returns fp32, and not {_told(tensor)}"
        wanted, seen = queries @ keys.mT, occupied[:, :, None] & (score > -torch.inf)
        assert bool(seen.any()) or not bool(occupied.any()), f"{part}: score hides every token"
        close = _apart(wanted[seen], score[seen]) < CLOSE
        assert close, f"{part}: score is not the products of the queries with the keys that it reads"
        close = _apart(share @ values, mixed) < CLOSE
        assert close, f"{part}: mix is not the weighted sum of the values that it reads"


def _even(occupied: Tensor) -> Tensor:
    """The same share for every token of a head, [B, H, 2, C]."""
    share = occupied.float() / occupied.sum(-1, keepdim=True).clamp_min(1)
    return share[:, :, None].expand(-1, -1, 2, -1)


def check_apart(part: Codec, alone: Any, together: Any, row: int) -> None:
    """Hold a codec to reading the same of a row, alone or beside another; of the first layer."""
    _check_products(part, together)
    for which, name in ((0, "keys"), (1, "values")):
        one, two = (_by_position(layer, at)[which] for layer, at in ((alone, 0), (together, row)))
        apart = _apart(one, two) if one.shape == two.shape else 0.0
        assert apart < APART, f"{part}: padding, or the other row, changes the {name} of a row ({apart:.2f} of them)"


def _by_position(layer: Any, row: int) -> tuple[Tensor, Tensor]:
    """Keys and values of a row's tokens, in order."""
    past, order = layer.past(), layer.positions[row].argsort(-1)
    occupied = past.occupied[row].gather(-1, order)
    index = order[..., None].expand(-1, -1, past.keys.shape[-1])
    keys, values = (held[row].gather(1, index)[occupied] for held in (past.keys, past.values))
    return keys, values


def _apart(wanted: Tensor, found: Tensor) -> float:
    """How far vectors are apart, as a share of the wanted; infinite where they are no numbers."""
    if not wanted.numel():
        return 0.0
    apart = float((wanted - found).norm() / wanted.norm().clamp_min(1e-9))
    return apart if apart == apart else float("inf")


def _told(found: Any) -> str:
    if not isinstance(found, Tensor):
        return f"a {type(found).__name__}"
    return f"{str(found.dtype).removeprefix('torch.')} {list(found.shape)}"
