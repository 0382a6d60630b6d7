"""The checks of `kvpolicy.testing.check` for each stage of a codec. They are bit-exact."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kvpolicy.engine.page_codes import by_field
from kvpolicy.engine.pages import for_pages
from kvpolicy.engine.state import fields, map_state, tensors
from kvpolicy.protocols import Calibration, Codec, Stage, StageStore, fits_pages
from kvpolicy.statistics import KeptStatistic

ROWS = 2


@dataclass(frozen=True)
class Trial:
    """A stage and the sizes that it is checked with.

    Attributes:
        stage: The stage.
        slots: The number of slots.
        heads: KV heads.
        dim: Head dimension.
        group_size: Tokens are written in multiples of it.
        calibration: The result of `Stage.load_calibration`.
        statistics: The statistics that the codec keeps, which increase from channel to channel here.
    """

    stage: Stage
    slots: int
    heads: int
    dim: int
    group_size: int = 1
    calibration: Calibration = ()
    statistics: tuple[KeptStatistic, ...] = ()

    def draw(self, seed: int = 0) -> tuple[Tensor, Tensor]:
        """Random keys and values for every slot of every row."""
        return draw(ROWS, self.heads, self.slots, self.dim, seed)

    def empty(self, rows: int = ROWS) -> StageStore:
        """The tensors of the stage before the first write."""
        codes = self.stage.alloc(rows, self.heads, self.slots, self.dim, "cpu")
        kept = {type(each): self._ramp(each.empty(rows, self.heads, self.dim, "cpu")) for each in self.statistics}
        return StageStore(codes, self.calibration, statistics=kept)

    @staticmethod
    def _ramp(kept: Tensor) -> Tensor:
        return torch.linspace(0, 5, kept.shape[-1], dtype=kept.dtype).expand(kept.shape)

    def write(self, store: StageStore, keys: Tensor, values: Tensor, slots: Sequence[int], write_mask: Tensor) -> None:
        """Write tokens to the same slots of every head, all of them empty; `write_mask` is [n] or [B, H, n]."""
        shape = keys.shape[:3]
        index = torch.tensor(list(slots), dtype=torch.int64).expand(shape)
        occupied = torch.zeros(*shape[:2], self.slots, dtype=torch.bool)
        self.stage.write(store, keys, values, index, write_mask.expand(shape), occupied)

    def fill(self, seed: int = 0) -> tuple[StageStore, Tensor, Tensor]:
        """A store after one write to all slots, and the keys and values of that write."""
        store = self.empty()
        keys, values = self.draw(seed)
        self.write(store, keys, values, range(self.slots), torch.ones(self.slots, dtype=torch.bool))
        return store, keys, values


def check_stages(part: Codec, heads: int, dim: int) -> None:
    """Check each stage of a codec.

    Args:
        part: The codec, which must support a model of these sizes.
        heads: KV heads.
        dim: Head dimension.
    """
    group_size = part.traits.group_size
    slots = 2 * group_size * -(-8 // group_size)
    for stage in part.stages:
        trial = Trial(stage, slots, heads, dim, group_size, stage.load_calibration(0, "cpu"), part.statistics)
        check_rows(trial, str(part))
        check_inactive(trial, str(part))
        if fits_pages(part):
            check_pages(trial, part)


def check_rows(trial: Trial, part: str) -> None:
    """Check that a row has the same codes on its own, in a batch, and among tokens that are not written.

    Args:
        trial: The stage.
        part: The name of the codec in messages.
    """
    batch, *both = trial.fill()
    yes = torch.ones(trial.slots, dtype=torch.bool)
    rows = [tuple(x[row : row + 1] for x in both) for row in range(ROWS)]
    alone = [trial.empty(1) for _ in rows]
    for row, (keys, values) in enumerate(rows):
        trial.write(alone[row], keys, values, range(trial.slots), yes)
        name = changed(map_state(lambda t, at=row: t[at : at + 1], batch.codes), alone[row].codes)
        assert not name, f"{part}: write must encode a row as on its own, got other codes in a batch: {name} differs"
    # The tokens of the row stand between masked tokens, which point to slots in use and consist of NaN and inf.
    before = trial.group_size * -(-5 // trial.group_size)
    after = trial.group_size
    junk = torch.full((1, trial.heads, before, trial.dim), torch.nan)
    junk[:, :, ::2] = torch.inf
    for row, tokens in enumerate(rows):
        store = trial.empty(1)
        keys, values = (torch.cat([junk, x, junk[:, :, :after]], 2) for x in tokens)
        slots = [*range(before), *range(trial.slots), *range(after)]
        trial.write(store, keys, values, slots, F.pad(yes, (before, after)))
        name = changed(store.codes, alone[row].codes)
        assert not name, f"{part}: write must ignore tokens outside write_mask, got other codes with NaN there: {name}"


def check_inactive(trial: Trial, part: str) -> None:
    """Check that a write changes the heads that it has tokens for, and no others.

    Args:
        trial: The stage.
        part: The name of the codec in messages.
    """
    store, _, _ = trial.fill()
    before = copy(store)
    keys, values = trial.draw(seed=1)
    keys[:, 1:] = torch.nan
    values[:, 1:] = torch.inf
    write_mask = torch.zeros(ROWS, trial.heads, trial.slots, dtype=torch.bool)
    write_mask[0, 0] = True
    trial.write(store, keys, values, range(trial.slots), write_mask)
    for at in ((0, slice(1, None)), (1,)):
        name = changed(*(map_state(lambda t, at=at: t[at], each.codes) for each in (store, before)))
        assert not name, f"{part}: write must not change heads without a token in write_mask, got a change of {name}"
    assert changed(store.codes, before.codes), f"{part}: write must replace codes, got the same for other tokens"


def check_pages(trial: Trial, part: Codec) -> None:
    """Check that slots decode alike in pages, with the entries of their head.

    Args:
        trial: The only stage of the codec.
        part: The codec; its `Traits.per_head` names the fields that belong to a head.
    """
    store, _, _ = trial.fill()
    empty = trial.stage.alloc(ROWS, trial.heads, 0, trial.dim, "cpu")
    per_head = part.traits.per_head or ()
    for name in per_head:
        assert name in empty._fields, f"{part}: Traits.per_head must name fields of the codes, got {name}"
    for name, tensor, none in zip(empty._fields, store.codes, empty, strict=True):
        expected = none.shape[2] if name in per_head else trial.slots
        assert tensor.shape[2] == expected and (name in per_head or not none.shape[2]), (
            f"{part}: Traits.per_head must name all fields whose size does not depend on the slots, and no others; "
            f"{name} has {tensor.shape[2]} entries for {trial.slots} slots"
        )
    # Two pages of each head: the first halves of all heads, then the second ones.
    half = trial.slots // 2
    owner = torch.arange(trial.heads).repeat(ROWS, 2)
    paged = by_field(
        part,
        store.codes,
        lambda name, t: torch.cat([t[:, :, :half], t[:, :, half:]], 1),
        lambda name, t: for_pages(t, owner),
    )
    for side, read in (("keys", trial.stage.keys), ("values", trial.stage.values)):
        pages = read(StageStore(paged, store.calibration), slice(0, half))
        whole = read(store, slice(0, trial.slots))
        assert torch.equal(torch.cat(pages.chunk(2, 1), 2), whole), (
            f"{part}: {side} must be decoded from the entries of their own slot and head, got others in pages"
        )


def draw(rows: int, heads: int, count: int, dim: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random keys with channels that differ in scale and offset, and random values, each [rows, heads, count, dim]."""
    generator = torch.Generator().manual_seed(seed)
    scale = 10 ** torch.rand(heads, 1, dim, generator=generator)
    keys = torch.randn(rows, heads, count, dim, generator=generator) * scale + torch.linspace(-9, 9, dim)
    return keys, torch.randn(rows, heads, count, dim, generator=generator)


def copy(store: StageStore) -> StageStore:
    """A copy of a store with cloned codes."""
    return store._replace(codes=map_state(torch.clone, store.codes))


def changed(one: Any, other: Any) -> str:
    """The name of the first tensor that differs between two codes; empty if they are bit-identical."""
    pairs = enumerate(zip(fields(one), tensors(other), strict=True))
    return next((name or f"tensor {at}" for at, ((name, first), second) in pairs if not torch.equal(first, second)), "")
