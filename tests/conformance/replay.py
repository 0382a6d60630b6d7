"""Record what an engine's layers were given and what they did, and do the same with the slow reference."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from kvpolicy import Policy, PolicyCache
from kvpolicy.engine.attention import ScoreTransform
from kvpolicy.engine.store import LayerStore
from kvpolicy.registry import name_of
from tests.conformance.access import (
    Attend,
    Slots,
    attending,
    coded_positions,
    kept_positions,
    noticing,
    store_of,
)
from tests.conformance.calibration import calibration
from tests.reference import codecs, coding
from tests.reference.engine import ReferenceLayer


@dataclass(kw_only=True)
class Turn:
    """One forward of one layer, and what it held when the whole model was done.

    Attributes:
        kept: The positions that each row and head holds.
        keep: Tokens that each row may keep of its prompt.
        budget: The same with room for generated tokens.
        coded: The position in each slot of each stage that a row and head holds, None where it is dead.
        hidden: The layer's input, [B, P, M], where the codec looks at it.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    valid: Tensor | None
    kernel: ScoreTransform
    out: Tensor
    kept: list[list[list[int]]] = field(default_factory=list)
    keep: list[int] = field(default_factory=list)
    budget: list[int] = field(default_factory=list)
    coded: list[list[Slots]] = field(default_factory=list)
    hidden: Tensor | None = None

    def own(self, b: int, t: Tensor) -> Tensor:
        """A row's own tokens of `t` [B, P, ...], without padding."""
        return t[b] if self.valid is None else t[b][self.valid[b]]

    def row(self, b: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """A row's own queries, keys, values and output, without padding, [H, n, D]."""
        keep = slice(None) if self.valid is None else self.valid[b]
        return self.q[b][:, keep], self.k[b][:, keep], self.v[b][:, keep], self.out[b][:, keep]


Tape = dict[int, list[Turn]]
"""Turns of each layer."""


class Recorder:
    """Fills a tape with every forward of a policy's layers."""

    def __init__(self) -> None:
        self.tape: Tape = {}
        self.keep: dict[int, list[int]] = {}
        self.hidden: dict[int, Tensor] = {}
        self._open: list[tuple[LayerStore, Turn]] = []

    def close(self) -> None:
        """Note what layers hold now that the model's forward is over."""
        for layer, turn in self._open:
            turn.kept, turn.budget = kept_positions(layer), layer.budget.tolist()
            turn.coded, turn.hidden = coded_positions(layer), self.hidden.pop(layer.layer_idx, None)
            turn.keep = self.keep[layer.layer_idx]
        self._open = []

    def note(self, layer: LayerStore, turn: Turn) -> None:
        self.tape.setdefault(layer.layer_idx, []).append(turn)
        self._open.append((layer, turn))


@contextmanager
def recording() -> Generator[Recorder]:
    """Record inside; call `close` after each forward of the model."""
    recorder = Recorder()

    def around(real: Attend) -> Attend:
        def attend(
            cache: PolicyCache,
            layer_idx: int,
            q: Tensor,
            k: Tensor,
            v: Tensor,
            valid: Tensor | None,
            kernel: ScoreTransform,
            *rest: Any,
        ) -> Tensor:
            given = [x.detach().clone() for x in (q, k, v)]
            out = real(cache, layer_idx, q, k, v, valid, kernel, *rest)
            flags = None if valid is None else valid.bool()
            turn = Turn(q=given[0], k=given[1], v=given[2], valid=flags, kernel=kernel, out=out.clone())
            recorder.note(store_of(cache, layer_idx), turn)
            return out

        return attend

    with noticing(recorder.keep.__setitem__, recorder.hidden.__setitem__), attending(around):
        yield recorder


def reference_selector(selector: Any) -> dict[str, Any]:
    """A selector as the reference takes it; its slow version must know all parameters."""
    name = name_of(type(selector))
    fields = {f.name: getattr(selector, f.name) for f in dataclasses.fields(selector) if f.name != "decode"}
    return {"name": name} | {key: reference_selector(x) if key == "base" else x for key, x in fields.items()}


def reference_merger(merger: Any) -> dict[str, Any]:
    """A merger as the reference takes it."""
    return {"name": name_of(type(merger))} | dataclasses.asdict(merger)


def reference_codec(codec: Any) -> codecs.Codec | None:
    """A codec as the reference takes it; None for `plain`."""
    name = name_of(type(codec))
    config = dataclasses.asdict(codec)
    return codecs.make(name, config, lambda layer: calibration(name, layer, config.get("seed", 0)))


class Verdict(NamedTuple):
    """How a tape compares with the reference: turns compared, kept tokens alike and in all, the largest error."""

    turns: int
    alike: int
    tokens: int
    error: float

    def __add__(self, other: Verdict) -> Verdict:  # pyright: ignore[reportIncompatibleMethodOverride]
        turns, alike, tokens, error = other
        return Verdict(self.turns + turns, self.alike + alike, self.tokens + tokens, max(self.error, error))


class Noise(NamedTuple):
    """What rounding may do.

    Attributes:
        error: Largest absolute error of an output.
        gap: Relative gap below which fp32 may order two scores in another way than fp64.
    """

    error: float = 2e-5
    gap: float = 3e-6


_SOME = Noise(2e-3, 1e-3)
ROUGH = {"ZipCache": Noise(0.2, 0.05), "CSR": _SOME, "RotateKV": _SOME, "TurboQuant": _SOME}
"""Codecs that round to fp16 what may be at a tie: ZipCache's root of a recoded token's largest number always is near
one, and the others round so many numbers that one of them is."""


class Twin(NamedTuple):
    """What the reference needs beside the policy.

    Attributes:
        codec: The reference codec.
        turns: The rotary embedding of a layer's keys: how to undo it, and how to apply it.
    """

    codec: codecs.Codec | None
    turns: Callable[[int], tuple[coding.Rotation, coding.Rotation]] = lambda layer: (
        coding.as_it_is,
        coding.as_it_is,
    )


def replay(
    policy: Policy, tape: Tape, noise: Noise | None = None, exact: bool = True, twin: Twin | None = None
) -> Verdict:
    """Hold every turn of every layer and row against the reference.

    Args:
        policy: The policy that was attached.
        tape: What was recorded.
        noise: What rounding may do; what it may do to the codec's own arithmetic, unless told.
        exact: Whether kept positions must be equal (but for choices within fp32's noise, after which a row is left).
        twin: The codec's slow version; found by its name where it is registered.
    """
    total = Verdict(0, 0, 0, 0.0)
    noise = noise or ROUGH.get(type(policy.codec).__name__, Noise())
    twin = twin or Twin(reference_codec(policy.codec))
    for layer_idx, turns in tape.items():
        for b in range(turns[0].q.shape[0]):
            slow = _reference(policy, turns[0], layer_idx, twin)
            total += _replay_row(slow, turns, f"layer {layer_idx}, row {b}", b, noise, exact)
    return total


def _replay_row(slow: ReferenceLayer, turns: list[Turn], where: str, b: int, noise: Noise, exact: bool) -> Verdict:
    compared, alike, tokens, error = 0, 0, 0, 0.0
    for number, turn in enumerate(turns):
        q, k, v, out = turn.row(b)
        if not q.shape[1]:
            continue
        want = slow.forward(
            q.float(), k.float(), v.float(), turn.kernel.scale, turn.keep[b], turn.budget[b],
            softcap=turn.kernel.softcap, sinks=turn.kernel.sinks, step=turn.q.shape[2] == 1,
            hidden=None if turn.hidden is None else turn.own(b, turn.hidden),
        )  # fmt: skip
        slow.tick()
        miss = float((out.double() - want).abs().max())
        wrong = [f"the output is off by {miss}"] if miss > noise.error else []
        wrong += ["kept other tokens"] if turn.kept[b] != slow.positions else []
        wrong += ["coded other tokens"] if _differ(turn.coded[b], slow.stage_slots) else []
        if exact and wrong and min(slow.margin, slow.order_margin) < noise.gap:
            break
        assert not exact or not wrong, f"{where}, turn {number}: {', '.join(wrong)}"
        compared, error = compared + 1, max(error, miss)
        for mine, its in zip(turn.kept[b], slow.positions, strict=True):
            alike, tokens = alike + len(set(mine) & set(its)), tokens + max(len(its), len(mine))
    return Verdict(compared, alike, tokens, error)


def _differ(mine: list[Slots], its: list[Slots]) -> bool:
    """Whether slots hold other tokens; a row alone has no more slots than it may use, and here all further are dead."""
    for head, other in zip(mine, its, strict=True):
        for at, stage in enumerate(head):
            used = other[at] if at < len(other) else []
            if stage[: len(used)] != used or any(p is not None for p in stage[len(used) :]):
                return True
    return False


def _reference(policy: Policy, turn: Turn, layer_idx: int, twin: Twin) -> ReferenceLayer:
    undo, apply = twin.turns(layer_idx)
    return ReferenceLayer(
        reference_selector(policy.selector), 1, num_heads=turn.q.shape[1], num_kv_heads=turn.k.shape[1],
        decode=policy.decode, codec=twin.codec, layer_idx=layer_idx, capacity=1, undo=undo, apply=apply,
        merger=reference_merger(policy.merger),
    )  # fmt: skip
