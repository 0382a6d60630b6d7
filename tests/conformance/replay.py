"""Record what an engine's layers were given and what they did, and do the same with the slow reference."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
from torch import Tensor

from kvpolicy import Policy
from kvpolicy.attention import Kernel
from kvpolicy.layer import PolicyLayer
from kvpolicy.registry import name_of
from tests.reference import selectors
from tests.reference.engine import ReferenceLayer

NOISE = 3e-6
"""Relative gap below which fp32 may order two scores in another way than fp64."""


@dataclass(kw_only=True)
class Turn:
    """One forward of one layer, and what it held when the whole model was done.

    Attributes:
        kept: The positions that each row and head holds.
        keep: Tokens that each row may keep of its prompt.
        budget: The same with room for generated tokens.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    valid: Tensor | None
    kernel: Kernel
    out: Tensor
    kept: list[list[list[int]]] = field(default_factory=list)
    keep: list[int] = field(default_factory=list)
    budget: list[int] = field(default_factory=list)

    def row(self, b: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """A row's own queries, keys, values and output, without padding, [H, n, D]."""
        keep = slice(None) if self.valid is None else self.valid[b]
        return self.q[b][:, keep], self.k[b][:, keep], self.v[b][:, keep], self.out[b][:, keep]


Tape = dict[int, list[Turn]]
"""Turns of each layer."""


def kept_positions(layer: PolicyLayer) -> list[list[list[int]]]:
    """The positions that each row and head holds, ascending."""
    return [[sorted(p for p in head if p >= 0) for head in row] for row in layer.positions.tolist()]


class Recorder:
    """Fills a tape with every forward of a policy's layers."""

    def __init__(self) -> None:
        self.tape: Tape = {}
        self.keep: dict[int, list[int]] = {}
        self._open: list[tuple[PolicyLayer, Turn]] = []

    def close(self) -> None:
        """Note what layers hold now that the model's forward is over."""
        for layer, turn in self._open:
            turn.kept, turn.budget = kept_positions(layer), layer.budget.tolist()
            turn.keep = self.keep[layer.layer_idx]
        self._open = []

    def note(self, layer: PolicyLayer, turn: Turn) -> None:
        self.tape.setdefault(layer.layer_idx, []).append(turn)
        self._open.append((layer, turn))


@contextmanager
def recording() -> Generator[Recorder]:
    """Record inside; call `close` after each forward of the model."""
    recorder, real, real_settle = Recorder(), PolicyLayer.forward, PolicyLayer.settle

    def settle(self: PolicyLayer, keep: Tensor, room: Tensor, tokens: int) -> None:
        recorder.keep[self.layer_idx] = keep.tolist()
        real_settle(self, keep, room, tokens)

    def forward(self: PolicyLayer, q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None, kernel: Kernel) -> Tensor:
        given = [x.detach().clone() for x in (q, k, v)]
        out = real(self, q, k, v, valid, kernel)
        flags = None if valid is None else valid.bool()
        recorder.note(self, Turn(q=given[0], k=given[1], v=given[2], valid=flags, kernel=kernel, out=out.clone()))
        return out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PolicyLayer, "forward", forward)
        patch.setattr(PolicyLayer, "settle", settle)
        yield recorder


def reference_selector(selector: Any) -> dict[str, Any]:
    """A selector as the reference takes it; its absence there is a method without a slow version, which is an error."""
    name = name_of(type(selector))
    if name == "full":
        return {"name": "window"}
    assert name in selectors.DEFAULTS, f"tests/reference has no slow version of the selector {name}"
    fields = {f.name: getattr(selector, f.name) for f in dataclasses.fields(selector) if f.name != "decode"}
    return {"name": name} | {key: reference_selector(x) if key == "base" else x for key, x in fields.items()}


def reference_codec(codec: Any) -> dict[str, Any] | None:
    """A codec as the reference takes it."""
    name = name_of(type(codec))
    assert name in ("plain", "kivi"), f"tests/reference has no slow version of the codec {name}"
    return None if name == "plain" else dataclasses.asdict(codec)


class Verdict(NamedTuple):
    """How a tape compares with the reference: turns compared, kept tokens alike and in all, the largest error."""

    turns: int
    alike: int
    tokens: int
    error: float

    def __add__(self, other: Verdict) -> Verdict:  # pyright: ignore[reportIncompatibleMethodOverride]
        turns, alike, tokens, error = other
        return Verdict(self.turns + turns, self.alike + alike, self.tokens + tokens, max(self.error, error))


def replay(policy: Policy, tape: Tape, tolerance: float = 2e-5, exact: bool = True) -> Verdict:
    """Hold every turn of every layer and row against the reference.

    Args:
        policy: The policy that was attached.
        tape: What was recorded.
        tolerance: Largest absolute error of an output.
        exact: Whether kept positions must be equal (but for choices within fp32's noise, after which a row is left).
    """
    total = Verdict(0, 0, 0, 0.0)
    for layer_idx, turns in tape.items():
        for b in range(turns[0].q.shape[0]):
            total += _replay_row(policy, turns, layer_idx, b, tolerance, exact)
    return total


def _replay_row(policy: Policy, turns: list[Turn], layer_idx: int, b: int, tolerance: float, exact: bool) -> Verdict:
    slow = _reference(policy, turns[0], layer_idx)
    compared, alike, tokens, error = 0, 0, 0, 0.0
    for number, turn in enumerate(turns):
        q, k, v, out = turn.row(b)
        if not q.shape[1]:
            continue
        want = slow.forward(
            q.float(), k.float(), v.float(), turn.kernel.scale, turn.keep[b], turn.budget[b],
            softcap=turn.kernel.softcap, step=turn.q.shape[2] == 1,
        )  # fmt: skip
        where = f"layer {layer_idx}, row {b}, turn {number}"
        miss = float((out.double() - want).abs().max())
        assert not exact or miss <= tolerance, f"{where}: the output is off by {miss}"
        if exact and turn.kept[b] != slow.positions and slow.margin < NOISE:
            break
        assert not exact or turn.kept[b] == slow.positions, f"{where}: kept other tokens"
        compared, error = compared + 1, max(error, miss)
        for mine, its in zip(turn.kept[b], slow.positions, strict=True):
            alike, tokens = alike + len(set(mine) & set(its)), tokens + max(len(its), len(mine))
    return Verdict(compared, alike, tokens, error)


def _reference(policy: Policy, turn: Turn, layer_idx: int) -> ReferenceLayer:
    return ReferenceLayer(
        reference_selector(policy.selector), 1, num_heads=turn.q.shape[1], num_kv_heads=turn.k.shape[1],
        decode=policy.selector.decode, codec=reference_codec(policy.codec), layer_idx=layer_idx, capacity=1,
    )  # fmt: skip
