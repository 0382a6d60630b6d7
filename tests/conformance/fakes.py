"""Codecs that only exist to show how tokens move: what is read back says which stages a token went through.

Every operation of theirs is exact in fp32, so that two engines agree to the bit or not at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from kvpolicy.codecs.common import mix_by_chunks, put, score_by_chunks, take, to_groups
from kvpolicy.codecs.demotion import ByPriority
from kvpolicy.protocols import (
    ALL_HEADS,
    At,
    Calibration,
    Layout,
    ModelInfo,
    Others,
    RotaryView,
    Stage,
    StageStore,
    Traits,
)
from kvpolicy.statistics import KeptStatistic
from kvpolicy.statistics.channel_sums import LargestQueries, QuerySquares
from tests.reference import coding

STEPS = (2.0**-7, 2.0**-4, 2.0**-2)
"""What numbers are rounded to multiples of, stage by stage."""


class FakeCodes(NamedTuple):
    """Tensors of a stage; `g` is the group_size.

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
    """Rounds to multiples of `step`, and clips to the bounds of a group and a head, atoms and the largest queries."""

    step: float
    group_size: int

    def load_calibration(self, layer_idx: int, device: torch.device | str, heads: slice = ALL_HEADS) -> Calibration:
        return ()

    def alloc(self, batch: int, heads: int, slots: int, head_dim: int, device: torch.device | str) -> FakeCodes:
        assert slots % self.group_size == 0, "whole groups"
        counts = (slots, slots, slots // self.group_size, 1)
        return FakeCodes(*(torch.zeros(batch, heads, count, head_dim, device=device) for count in counts))

    def write(
        self, store: StageStore, keys: Tensor, values: Tensor, slots: Tensor, write_mask: Tensor, occupied: Tensor
    ) -> None:
        codes: FakeCodes = store.codes
        if not keys.shape[2] or not codes.keys.shape[2]:
            return
        keys, values = ((x.float() / self.step).round() * self.step for x in (keys, values))
        group = to_groups(slots, self.group_size)
        used = write_mask[..., None]
        assert isinstance(group, Tensor)
        sizes = keys.abs().masked_fill(~used, -1)
        top = torch.full_like(codes.top, -1).scatter_reduce(2, group[..., None].expand_as(sizes), sizes, "amax")
        held = occupied.unflatten(-1, (-1, self.group_size)).any(-1)[..., None]
        codes.top.copy_(torch.where(held | (top < 0), codes.top, top))
        peak = values.abs().masked_fill(~used, -1).amax(2, keepdim=True)
        codes.peak.copy_(torch.where(occupied.any(-1)[..., None, None] | (peak < 0), codes.peak, peak))
        keys = _clip(keys, take(codes.top, group))
        largest = store.statistics.get(LargestQueries)
        keys = keys if largest is None else _clip(keys, largest[:, :, None])
        values = values if store.atoms is None else _clip(values, _largest(store.atoms[1]))
        put(codes.keys, keys, slots, write_mask)
        put(codes.values, _clip(values, codes.peak), slots, write_mask)

    def keys(self, store: StageStore, at: At) -> Tensor:
        keys = take(store.codes.keys, at)
        return keys if store.atoms is None else _clip(keys, _largest(store.atoms[0]))

    def values(self, store: StageStore, at: At) -> Tensor:
        return take(store.codes.values, at)

    def score(self, store: StageStore, queries: Tensor, rope: RotaryView | None) -> Tensor:
        return score_by_chunks(self.keys, store, queries, rope, store.codes.keys.shape[2], self.group_size)

    def mix(self, store: StageStore, weights: Tensor) -> Tensor:
        return mix_by_chunks(self.values, store, weights, self.group_size)


_SLOW = (
    "block",
    "group_size",
    "residual",
    "key_space",
    "demote_by",
    "pins",
    "pinned",
    "recode_all",
    "query_squares",
)
"""Fields that the slow reference has too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fake:
    """A codec of one to three fake stages.

    Attributes:
        caps: The most tokens of each stage but the last.
    """

    caps: tuple[int, ...] = ()
    block: int = 4
    group_size: int = 1
    residual: int = 0
    key_space: Literal["rotated", "unrotated"] = "rotated"
    demote_by: Literal["age", "priority"] = "age"
    pins: Literal["none", "first", "massive", "newest"] = "none"
    pinned: int = 0
    recode_all: bool = False
    query_absmax: bool = False
    query_squares: int = 0

    @property
    def traits(self) -> Traits:
        assert not self.recode_all or self.demote_by == "priority", "a demotion says whether all is encoded again"
        return Traits(
            block=self.block,
            group_size=self.group_size,
            residual=self.residual,
            key_space=self.key_space,
            demotion=ByPriority(self.recode_all) if self.demote_by == "priority" else None,
            pins=self.pins,
            pinned=self.pinned,
        )

    @property
    def statistics(self) -> tuple[KeptStatistic, ...]:
        largest = (LargestQueries(),) if self.query_absmax else ()
        squares = (QuerySquares(self.query_squares),) if self.query_squares else ()
        return (*largest, *squares)

    @property
    def stages(self) -> tuple[Stage, ...]:
        return tuple(FakeStage(step=step, group_size=self.group_size) for step in STEPS[: len(self.caps) + 1])

    def layout(self, tokens: int) -> Layout:
        exact = self.pinned + self.residual + self.block
        if tokens < exact:
            return Layout(tokens)
        left = (
            -(-(tokens - self.residual - (0 if self.pins == "newest" else self.pinned)) // self.group_size)
            * self.group_size
        )
        coded: list[int] = []
        for cap in self.caps:
            coded.append(min(cap, left))
            left -= coded[-1]
        return Layout(exact, (*coded, left))

    def check(self, model: ModelInfo) -> None:
        return None

    def check_others(self, others: Others) -> None:
        return None

    def slow(self) -> coding.Codec:
        """The same for the reference."""

        def layout(tokens: int) -> tuple[int, list[int]]:
            at = self.layout(tokens)
            return at.exact, list(at.coded)

        fields: dict[str, Any] = {name: getattr(self, name) for name in _SLOW}
        return coding.Codec(
            layout=layout,
            coder=lambda stage, layer, head: FakeHead(STEPS[stage], self.group_size, self.query_absmax),
            **fields,
        )


class FakeHead:
    """The reference of a stage; see `coding.Coder`."""

    def __init__(self, step: float, group_size: int, query_absmax: bool) -> None:
        self.step = step
        self.group_size = group_size
        self.query_absmax = query_absmax
        self.top: dict[int, Tensor] = {}
        self.peak: Tensor | None = None

    def write(
        self, slots: list[int], tokens: list[coding.Pair], live: list[bool], given: coding.Given
    ) -> list[coding.Pair]:
        near = [(self._round(key), self._round(value)) for key, value in tokens]
        for group in {slot // self.group_size for slot in slots}:
            if not any(live[group * self.group_size : (group + 1) * self.group_size]):
                own = [key for slot, (key, _) in zip(slots, near, strict=True) if slot // self.group_size == group]
                self.top[group] = torch.stack(own).abs().amax(0)
        if not any(live):
            self.peak = torch.stack([value for _, value in near]).abs().amax(0)
        assert self.peak is not None
        read: list[coding.Pair] = []
        for slot, (key, value) in zip(slots, near, strict=True):
            key = _clip(key, self.top[slot // self.group_size])
            value = _clip(value, self.peak)
            if self.query_absmax:
                assert given.query_absmax is not None
                key = _clip(key, given.query_absmax)
            if given.own is not None:
                key, value = (_clip(x, _largest(atoms)[0]) for x, atoms in zip((key, value), given.own, strict=True))
            read.append((key, value))
        return read

    def _round(self, x: Tensor) -> Tensor:
        return (x / self.step).round() * self.step


class Roll:
    """A rotary embedding that is undone to the bit: channels move on by one for each position."""

    scaling = 1.0

    def rotate(self, keys: Tensor, positions: Tensor) -> Tensor:
        return self._move(keys, positions)

    def unrotate(self, keys: Tensor, positions: Tensor) -> Tensor:
        return self._move(keys, -positions)

    def unrotate_rows(self, vectors: Tensor, positions: Tensor) -> Tensor:
        return self._move(vectors, -positions[:, None])

    def mean_rotation(self, vectors: Tensor, first: Tensor, ahead: int | Tensor) -> Tensor:
        distances = range(ahead) if isinstance(ahead, int) else ahead.tolist()
        places = [first[:, None, None] + distance for distance in distances]
        return sum(self._move(vectors, at.expand(vectors.shape[:3])) for at in places) / len(places)  # pyright: ignore

    def pair_lengths(self, vectors: Tensor) -> Tensor:
        return torch.linalg.vector_norm(vectors.float(), dim=-1, keepdim=True)

    def _move(self, keys: Tensor, by: Tensor) -> Tensor:
        channel = torch.arange(keys.shape[-1], device=keys.device)
        at = (channel - by[..., None]) % keys.shape[-1]
        return keys.float().gather(-1, at.expand_as(keys))


def undo(key: Tensor, position: int) -> Tensor:
    """What `Roll.unrotate` does, of one key."""
    return key.roll(-position)


def apply(key: Tensor, position: int) -> Tensor:
    """What `Roll.rotate` does, of one key."""
    return key.roll(position)


def _largest(atoms: Tensor) -> Tensor:
    """The largest number of each channel of atoms [..., W, D], [..., 1, D]; zeros say that there are none."""
    most = atoms.float().abs().amax(-2, keepdim=True)
    return most.masked_fill(most == 0, torch.inf)


def _clip(x: Tensor, most: Tensor) -> Tensor:
    return torch.minimum(torch.maximum(x, -most), most)
