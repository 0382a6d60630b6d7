"""Codecs that only exist to show how tokens move: what is read back says which stages a token went through.

Every operation of theirs is exact in fp32, so that two engines agree to the bit or not at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from kvpolicy.codecs._common import coarse, mix_by_chunks, put, score_by_chunks, take
from kvpolicy.protocols import ALL_HEADS, At, Book, Layout, ModelInfo, Stage, Store, Traits, Turn
from tests.reference import coding

STEPS = (2.0**-7, 2.0**-4, 2.0**-2)
"""What numbers are rounded to multiples of, stage by stage."""


class FakeCodes(NamedTuple):
    """Tensors of a stage; `g` is the grain.

    Attributes:
        keys: [B, H, C, D].
        values: [B, H, C, D].
        top: The largest key numbers that a group may hold, fixed when it is empty, [B, H, C / g, D].
        peak: The largest value numbers of a head, fixed when it is empty, [B, H, 1, D].
    """

    keys: Tensor
    values: Tensor
    top: Tensor
    peak: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class FakeStage:
    """Rounds to multiples of `step`, and clips to what was fixed for a group and a head, to atoms and to peaks."""

    step: float
    grain: int

    def open(self, layer_idx: int, device: torch.device | str, heads: slice = ALL_HEADS) -> Book:
        return ()

    def alloc(self, batch: int, heads: int, slots: int, head_dim: int, device: torch.device | str) -> FakeCodes:
        assert slots % self.grain == 0, "whole groups"
        counts = (slots, slots, slots // self.grain, 1)
        return FakeCodes(*(torch.zeros(batch, heads, count, head_dim, device=device) for count in counts))

    def write(self, store: Store, keys: Tensor, values: Tensor, slots: Tensor, active: Tensor, live: Tensor) -> None:
        codes: FakeCodes = store.codes
        if not keys.shape[2] or not codes.keys.shape[2]:
            return
        keys, values = ((x.float() / self.step).round() * self.step for x in (keys, values))
        group, used = coarse(slots, self.grain), active[..., None]
        assert isinstance(group, Tensor)
        sizes = keys.abs().masked_fill(~used, -1)
        top = torch.full_like(codes.top, -1).scatter_reduce(2, group[..., None].expand_as(sizes), sizes, "amax")
        held = live.unflatten(-1, (-1, self.grain)).any(-1)[..., None]
        codes.top.copy_(torch.where(held | (top < 0), codes.top, top))
        peak = values.abs().masked_fill(~used, -1).amax(2, keepdim=True)
        codes.peak.copy_(torch.where(live.any(-1)[..., None, None] | (peak < 0), codes.peak, peak))
        keys = _clip(keys, take(codes.top, group))
        keys = keys if store.peaks is None else _clip(keys, store.peaks[:, :, None])
        values = values if store.atoms is None else _clip(values, _largest(store.atoms[1]))
        put(codes.keys, keys, slots, active)
        put(codes.values, _clip(values, codes.peak), slots, active)

    def keys(self, store: Store, at: At) -> Tensor:
        keys = take(store.codes.keys, at)
        return keys if store.atoms is None else _clip(keys, _largest(store.atoms[0]))

    def values(self, store: Store, at: At) -> Tensor:
        return take(store.codes.values, at)

    def score(self, store: Store, queries: Tensor, turn: Turn | None) -> Tensor:
        return score_by_chunks(self.keys, store, queries, turn, store.codes.keys.shape[2], self.grain)

    def mix(self, store: Store, share: Tensor) -> Tensor:
        return mix_by_chunks(self.values, store, share, self.grain)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fake:
    """A codec of one to three fake stages.

    Attributes:
        caps: The most tokens of each stage but the last.
    """

    caps: tuple[int, ...] = ()
    block: int = 4
    grain: int = 1
    residual: int = 0
    frame: Literal["post", "pre"] = "post"
    order: Literal["age", "worth"] = "age"
    pins: Literal["none", "first", "massive", "newest"] = "none"
    pinned: int = 0
    recode: bool = False
    peaks: bool = False

    @property
    def traits(self) -> Traits:
        return Traits(
            self.block, self.grain, self.residual, self.frame, self.order, self.pins, self.pinned, self.recode,
            self.peaks,
        )  # fmt: skip

    @property
    def stages(self) -> tuple[Stage, ...]:
        return tuple(FakeStage(step=step, grain=self.grain) for step in STEPS[: len(self.caps) + 1])

    def layout(self, tokens: int) -> Layout:
        exact = self.pinned + self.residual + self.block
        if tokens < exact:
            return Layout(tokens)
        left = -(-(tokens - self.residual - (0 if self.pins == "newest" else self.pinned)) // self.grain) * self.grain
        coded: list[int] = []
        for cap in self.caps:
            coded.append(min(cap, left))
            left -= coded[-1]
        return Layout(exact, (*coded, left))

    def check(self, model: ModelInfo) -> None:
        return None

    def slow(self) -> coding.Codec:
        """The same for the reference."""

        def layout(tokens: int) -> tuple[int, list[int]]:
            at = self.layout(tokens)
            return at.exact, list(at.coded)

        fields: dict[str, Any] = {name: getattr(self, name) for name in Traits._fields if name != "peaks"}
        return coding.Codec(
            layout=layout, coder=lambda stage, layer, head: FakeHead(STEPS[stage], self.grain, self.peaks), **fields
        )


class FakeHead:
    """The reference of a stage; see `coding.Coder`."""

    def __init__(self, step: float, grain: int, peaks: bool) -> None:
        self.step, self.grain, self.peaks = step, grain, peaks
        self.top: dict[int, Tensor] = {}
        self.peak: Tensor | None = None

    def write(
        self, slots: list[int], tokens: list[coding.Pair], live: list[bool], given: coding.Given
    ) -> list[coding.Pair]:
        near = [(self._round(key), self._round(value)) for key, value in tokens]
        for group in {slot // self.grain for slot in slots}:
            if not any(live[group * self.grain : (group + 1) * self.grain]):
                own = [key for slot, (key, _) in zip(slots, near, strict=True) if slot // self.grain == group]
                self.top[group] = torch.stack(own).abs().amax(0)
        if not any(live):
            self.peak = torch.stack([value for _, value in near]).abs().amax(0)
        assert self.peak is not None
        read: list[coding.Pair] = []
        for slot, (key, value) in zip(slots, near, strict=True):
            key, value = _clip(key, self.top[slot // self.grain]), _clip(value, self.peak)
            if self.peaks:
                assert given.peaks is not None
                key = _clip(key, given.peaks)
            if given.own is not None:
                key, value = (_clip(x, _largest(atoms)[0]) for x, atoms in zip((key, value), given.own, strict=True))
            read.append((key, value))
        return read

    def _round(self, x: Tensor) -> Tensor:
        return (x / self.step).round() * self.step


class Roll:
    """A rotary embedding that is undone to the bit: channels move on by one for each position."""

    scaling = 1.0

    def apply(self, keys: Tensor, positions: Tensor) -> Tensor:
        return self._move(keys, positions)

    def undo(self, keys: Tensor, positions: Tensor) -> Tensor:
        return self._move(keys, -positions)

    def _move(self, keys: Tensor, by: Tensor) -> Tensor:
        channel = torch.arange(keys.shape[-1], device=keys.device)
        at = (channel - by[..., None]) % keys.shape[-1]
        return keys.float().gather(-1, at.expand_as(keys))


def undo(key: Tensor, position: int) -> Tensor:
    """What `Roll.undo` does, of one key."""
    return key.roll(-position)


def apply(key: Tensor, position: int) -> Tensor:
    """What `Roll.apply` does, of one key."""
    return key.roll(position)


def _largest(atoms: Tensor) -> Tensor:
    """The largest number of each channel of atoms [..., W, D], [..., 1, D]; zeros say that there are none."""
    most = atoms.float().abs().amax(-2, keepdim=True)
    return most.masked_fill(most == 0, torch.inf)


def _clip(x: Tensor, most: Tensor) -> Tensor:
    return torch.minimum(torch.maximum(x, -most), most)
