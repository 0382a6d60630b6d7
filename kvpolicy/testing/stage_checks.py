"""The rules of `kvpolicy.testing.check` that every stage of a codec is held to, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kvpolicy.engine.state import map_state, tensors
from kvpolicy.protocols import Calibration, Codec, Stage, StageStore

ROWS = 2


@dataclass(frozen=True)
class Trial:
    """A stage, and what is written into it.

    Attributes:
        stage: The stage.
        slots: How many it gets.
        heads: KV heads.
        dim: Numbers of a key.
        group_size: Tokens come in multiples of it.
        calibration: What `Stage.load_calibration` loaded.
        query_absmax: Whether its store tells the largest queries.
    """

    stage: Stage
    slots: int
    heads: int
    dim: int
    group_size: int = 1
    calibration: Calibration = ()
    query_absmax: bool = False

    def draw(self, seed: int = 0) -> tuple[Tensor, Tensor]:
        """Keys and values for every slot of every row."""
        return draw(ROWS, self.heads, self.slots, self.dim, seed)

    def empty(self, rows: int = ROWS) -> StageStore:
        """The stage's tensors before anything is written."""
        query_absmax = torch.linspace(0, 5, self.dim).expand(rows, self.heads, self.dim) if self.query_absmax else None
        codes = self.stage.alloc(rows, self.heads, self.slots, self.dim, "cpu")
        return StageStore(codes, self.calibration, query_absmax=query_absmax)

    def write(self, store: StageStore, keys: Tensor, values: Tensor, slots: Sequence[int], write_mask: Tensor) -> None:
        """Write tokens into the same empty slots of every head; `write_mask` is [n] or [B, H, n]."""
        shape = keys.shape[:3]
        where = torch.tensor(list(slots), dtype=torch.int64).expand(shape)
        occupied = torch.zeros(*shape[:2], self.slots, dtype=torch.bool)
        self.stage.write(store, keys, values, where, write_mask.expand(shape), occupied)

    def fill(self, seed: int = 0) -> tuple[StageStore, Tensor, Tensor]:
        """A store whose slots were all written at once, and what was written."""
        store, (keys, values) = self.empty(), self.draw(seed)
        self.write(store, keys, values, range(self.slots), torch.ones(self.slots, dtype=torch.bool))
        return store, keys, values


def check_stages(part: Codec, heads: int, dim: int) -> None:
    """Hold each stage of a codec to its rules.

    Args:
        part: The codec, which can code a model of these sizes.
        heads: KV heads.
        dim: Numbers of a key.
    """
    group_size = part.traits.group_size
    slots = 2 * group_size * -(-8 // group_size)
    for stage in part.stages:
        trial = Trial(stage, slots, heads, dim, group_size, stage.load_calibration(0, "cpu"), part.traits.query_absmax)
        check_rows(trial, str(part))
        check_inactive(trial, str(part))


def check_rows(trial: Trial, part: str) -> None:
    """A row is coded the same alone as in a batch, and with tokens around it that are not write_mask.

    Args:
        trial: The stage.
        part: What to call it.
    """
    batch, *both = trial.fill()
    yes = torch.ones(trial.slots, dtype=torch.bool)
    rows = [tuple(x[row : row + 1] for x in both) for row in range(ROWS)]
    alone = [trial.empty(1) for _ in rows]
    for row, (keys, values) in enumerate(rows):
        trial.write(alone[row], keys, values, range(trial.slots), yes)
        other = changed(map_state(lambda t, at=row: t[at : at + 1], batch.codes), alone[row].codes)
        assert not other, f"{part}: write codes a row otherwise beside another one: {other} differs"
    before, behind = trial.group_size * -(-5 // trial.group_size), trial.group_size
    junk = torch.full((1, trial.heads, before, trial.dim), torch.nan)
    junk[:, :, ::2] = torch.inf
    for row, own in enumerate(rows):
        among, (keys, values) = trial.empty(1), (torch.cat([junk, x, junk[:, :, :behind]], 2) for x in own)
        slots = [*range(before), *range(trial.slots), *range(behind)]
        trial.write(among, keys, values, slots, F.pad(yes, (before, behind)))
        other = changed(among.codes, alone[row].codes)
        assert not other, f"{part}: write heeds tokens that are not write_mask: {other} differs where these are NaN"


def check_inactive(trial: Trial, part: str) -> None:
    """A head that is given nothing stays as it was, whether it holds tokens or none.

    Args:
        trial: The stage.
        part: What to call it.
    """
    store, _, _ = trial.fill()
    before, (keys, values) = copy(store), trial.draw(seed=1)
    keys[:, 1:], values[:, 1:] = torch.nan, torch.inf
    write_mask = torch.zeros(ROWS, trial.heads, trial.slots, dtype=torch.bool)
    write_mask[0, 0] = True
    trial.write(store, keys, values, range(trial.slots), write_mask)
    for at in ((0, slice(1, None)), (1,)):
        other = changed(*(map_state(lambda t, at=at: t[at], held.codes) for held in (store, before)))
        assert not other, f"{part}: write changes a head that is given no write_mask token: {other} differs"
    assert changed(store.codes, before.codes), f"{part}: write leaves a head as it was that is given other tokens"


def draw(rows: int, heads: int, count: int, dim: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Keys whose channels differ in size and offset, and plain values, [rows, heads, count, dim]."""
    generator = torch.Generator().manual_seed(seed)
    size = 10 ** torch.rand(heads, 1, dim, generator=generator)
    keys = torch.randn(rows, heads, count, dim, generator=generator) * size + torch.linspace(-9, 9, dim)
    return keys, torch.randn(rows, heads, count, dim, generator=generator)


def copy(store: StageStore) -> StageStore:
    """The same in other memory."""
    return store._replace(codes=map_state(torch.clone, store.codes))


def changed(one: Any, other: Any) -> str:
    """The first of two stages' codes that are not equal bit for bit; empty where all are."""
    names = getattr(one, "_fields", None) or [f"tensor {at}" for at, _ in enumerate(tensors(one))]
    pairs = zip(names, tensors(one), tensors(other), strict=True)
    return next((name for name, now, then in pairs if not torch.equal(now, then)), "")
