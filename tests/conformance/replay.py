"""Record what an engine's layers were given and what they did, and do the same with the slow reference."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from kvpolicy import KeepKV, Plain, Policy, PolicyCache, Regress, ZSMerge
from kvpolicy.hf.layer import PolicyLayer
from kvpolicy.registry import name_of
from kvpolicy.statistics import InputScores, Moments, NewestQueries, OutputNorms
from kvpolicy.statistics.windows import ScoreTransform, together
from tests.conformance.access import (
    Attend,
    Slots,
    always_folded,
    attending,
    coded_positions,
    kept_positions,
    noticing,
    replaying,
)
from tests.conformance.calibration import calibration
from tests.reference import codecs, coding
from tests.reference.engine import ReferenceLayer
from tests.reference.selectors import kvzip


class Replayed(NamedTuple):
    """One replay of a chunk through one layer: see `kvzip.Text`, here of all rows, of which `valid` [B, R] has some."""

    number: int
    q: Tensor
    k: Tensor
    valid: Tensor
    inputs: Tensor | None = None
    projection: Tensor | None = None

    def row(self, b: int) -> kvzip.Text | None:
        """What a row replays; None if it has no token of this chunk."""
        own = self.valid[b]
        if not bool(own.any()):
            return None
        inputs = None if self.inputs is None else self.inputs[b][own]
        return kvzip.Text(self.number, self.q[b][:, own], self.k[b][:, own], inputs, self.projection)


@dataclass(kw_only=True)
class Turn:
    """One forward of one layer, and what it held when the whole model was done.

    Attributes:
        kept: The positions that each row and head holds.
        keep: Tokens that each row may keep of its prompt.
        budget: The same with room for generated tokens.
        coded: The position in each slot of each stage that a row and head holds, None where it is dead.
        hidden: The layer's input, [B, P, M], where the codec looks at it.
        inputs: The input of its attention, [B, P, M], where the selector looks at it.
        held: Whether the prompt waits for another chunk.
        replays: The replays of the prompt that it ends.
        projection: The output projection of the layer, [M, Hq * D], where the selector looks at it.
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
    inputs: Tensor | None = None
    held: bool = False
    replays: list[Replayed] = field(default_factory=list)
    projection: Tensor | None = None

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
        self.replays: dict[int, list[Replayed]] = {}
        self._open: list[tuple[PolicyLayer, Turn]] = []

    def close(self) -> None:
        """Note what layers hold now that the model's forward is over."""
        for layer, turn in self._open:
            turn.kept = kept_positions(layer)
            turn.budget = layer.budget.tolist()
            turn.coded = coded_positions(layer.store)
            turn.hidden = self.hidden.pop(layer.layer_idx, None)
            turn.held = layer.pending is not None
            turn.keep = layer.budget.tolist() if turn.held else self.keep[layer.layer_idx]
            turn.replays = self.replays.pop(layer.layer_idx, [])
        self._open = []

    def join(self, owner: int, q: Tensor, out: Tensor) -> None:
        """Note queries and outputs of a layer that reads the keys of another: as those of more heads of its groups."""
        turn = self.tape[owner][-1]
        turn.q, turn.out = (together(*pair, turn.k.shape[1]) for pair in ((turn.q, q), (turn.out, out)))

    def note(self, layer: PolicyLayer, turn: Turn) -> None:
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
            whole = real(cache, layer_idx, q, k, v, valid, kernel, *rest)
            # Values that are a part of their keys are handed over as such, and the output is of whole keys.
            latent = cache.attachment.model_shape.shape.latent
            v, out = (k[..., :latent], whole[..., :latent]) if latent else (v, whole)
            given = [x.detach().clone() for x in (q, k, v)]
            owner: Any = cache.layers[layer_idx]
            if not isinstance(owner, PolicyLayer):
                asked = cache.policy.at(owner.reads).selector.statistics
                if not any(isinstance(each, Moments | NewestQueries) for each in asked):  # else no query is looked at
                    recorder.join(owner.reads, given[0], out.clone())
                return out
            flags = None if valid is None else valid.bool()
            turn = Turn(q=given[0], k=given[1], v=given[2], valid=flags, kernel=kernel, out=out.clone())
            asked = {type(each) for each in cache.policy.at(layer_idx).selector.statistics}
            if InputScores in asked:
                turn.inputs = rest[0].hidden_states.detach().clone()
            if OutputNorms in asked:
                turn.projection = cache.attachment.projections[layer_idx]()
            layer: Any = cache.layers[layer_idx]
            recorder.note(layer, turn)
            return whole

        return attend

    def replayed(layer_idx: int, *given: Any) -> None:
        known = recorder.replays.setdefault(layer_idx, [])
        new = Replayed(*given)
        if known and known[-1].number == new.number:  # of a layer that reads the same keys
            known[-1] = known[-1]._replace(q=together(known[-1].q, new.q, new.k.shape[1]))
        else:
            known.append(new)

    noted = noticing(recorder.keep.__setitem__, recorder.hidden.__setitem__)
    with noted, always_folded(), attending(around), replaying(replayed):
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
    config = _codec_config(codec)
    return codecs.make(name, config, lambda layer: calibration(name, layer, config.get("seed", 0)))


def _codec_config(codec: Any) -> dict[str, Any]:
    """All parameters of a codec; those of its base beside its name."""
    config: dict[str, Any] = {field.name: getattr(codec, field.name) for field in dataclasses.fields(codec)}
    if "base" in config:
        config["base"] = {"name": name_of(type(config["base"])), **_codec_config(config["base"])}
    return config


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
        tie: How near to a tie, as a share of a vector's largest number, fp32 may round a number that is coded the other
            way than fp64.
    """

    error: float = 2e-5
    gap: float = 3e-6
    tie: float = 3e-7


ROUGH = {"ZipCache": Noise(0.2, 0.05), "CSR": Noise(5e-3, 1e-3)}
"""Codecs that round to fp16 what may be at a tie, and do not say when: ZipCache's root of a recoded token's largest
number always is near one, and a coefficient of CSR carries more of a key than a code does. Codecs that code sums
(RotateKV, TurboQuant, KVQuant) say how near to a tie they came."""


def noise_of(policy: Policy) -> Noise:
    """What rounding may do to the numbers of a policy's codec and merger."""
    rough = ROUGH.get(type(policy.codec).__name__, Noise())
    if isinstance(policy.merger, Regress):
        # The ridge regression solves for values with the errors of fp32 attention, divided by small eigenvalues.
        return rough._replace(error=max(rough.error, 5e-4))
    if isinstance(policy.merger, KeepKV | ZSMerge) and policy.codec != Plain():
        # Means of keys with the rounding of attention, or of many numbers, and codecs that round means of such to fp16.
        return rough._replace(error=max(rough.error, 5e-4), tie=max(rough.tie, 3e-5))
    return rough


class Twin(NamedTuple):
    """What the reference needs beside the policy.

    Attributes:
        codec: The reference codec.
        turns: The rotary embedding of a layer's keys: how to undo it, and how to apply it.
        projection: The output projection of a layer, [M, Hq * D], for selectors that ask for it.
    """

    codec: codecs.Codec | None
    turns: Callable[[int], tuple[coding.Rotation, coding.Rotation]] = lambda layer: (
        coding.as_it_is,
        coding.as_it_is,
    )
    projection: Callable[[int], Tensor | None] = lambda layer: None


def replay(
    policy: Policy, tape: Tape, noise: Noise | None = None, exact: bool = True, twin: Twin | None = None
) -> Verdict:
    """Hold every turn of every layer and row against the reference.

    Args:
        policy: The policy that was attached.
        tape: What was recorded.
        noise: What rounding may do; what it may do to the policy's own arithmetic, unless told.
        exact: Whether kept positions must be equal (but for choices and codes within fp32's noise, after which a row is
            left).
        twin: The codec's slow version; found by its name where it is registered.
    """
    total = Verdict(0, 0, 0, 0.0)
    noise = noise or noise_of(policy)
    if policy.codec.traits.groups is not None and len(tape) > 1:
        # A layer reads what several have written, and the reference has one. What they keep and where is compared here,
        # what they read in `tests/engine/test_layer_group.py`.
        noise = noise._replace(error=math.inf)
    twin = twin or Twin(reference_codec(policy.codec))
    for layer_idx, turns in tape.items():
        for b in range(turns[0].q.shape[0]):
            slow = _reference(policy, turns[0], layer_idx, twin)
            total += _replay_row(slow, turns, f"layer {layer_idx}, row {b}", b, noise, exact)
    return total


def _replay_row(slow: ReferenceLayer, turns: list[Turn], where: str, b: int, noise: Noise, exact: bool) -> Verdict:
    compared = 0
    alike = 0
    tokens = 0
    error = 0.0
    for number, turn in enumerate(turns):
        q, k, v, out = turn.row(b)
        texts = [text for text in (replayed.row(b) for replayed in turn.replays) if text is not None]
        if not q.shape[1] and not texts:
            continue
        learned = turn.kernel.sinks
        tie = slow.code_margin  # of tokens that are read in this turn; those that it codes are read in the next one
        want = slow.forward(
            q.float(),
            k.float(),
            v.float(),
            turn.kernel.scale,
            turn.keep[b],
            turn.budget[b],
            softcap=turn.kernel.softcap,
            sinks=None if learned is None else learned.detach(),
            step=turn.q.shape[2] == 1,
            hidden=None if turn.hidden is None else turn.own(b, turn.hidden),
            held=turn.held,
            texts=texts,
            inputs=None if turn.inputs is None else turn.own(b, turn.inputs),
        )
        miss = float((out.double() - want).abs().amax()) if q.shape[1] else 0.0
        if turn.held:
            assert not exact or miss <= noise.error, f"{where}, turn {number}: the output is off by {miss}"
            continue
        slow.tick()
        wrong = [f"the output is off by {miss}"] if miss > noise.error else []
        wrong += ["kept other tokens"] if turn.kept[b] != slow.positions else []
        wrong += ["coded other tokens"] if _differ(turn.coded[b], slow.stage_slots) else []
        if exact and wrong and (min(slow.margin, slow.order_margin) < noise.gap or tie < noise.tie):
            break
        assert not exact or not wrong, f"{where}, turn {number}: {', '.join(wrong)}"
        compared += 1
        error = max(error, miss)
        for mine, its in zip(turn.kept[b], slow.positions, strict=True):
            alike += len(set(mine) & set(its))
            tokens += max(len(its), len(mine))
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
    projection = twin.projection(layer_idx) if turn.projection is None else turn.projection
    return ReferenceLayer(
        reference_selector(policy.selector),
        1,
        num_heads=turn.q.shape[1],
        num_kv_heads=turn.k.shape[1],
        decode=policy.decode,
        codec=twin.codec,
        layer_idx=layer_idx,
        capacity=1,
        undo=undo,
        apply=apply,
        merger=reference_merger(policy.merger),
        projection=projection,
    )
