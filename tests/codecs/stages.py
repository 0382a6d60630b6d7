"""Checks that every stage of a codec must pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from kvpolicy.calibration.kvquant import fit_kvquant
from kvpolicy.codecs._files import save
from kvpolicy.codecs.mikv import MiKV, MiKVStage
from kvpolicy.engine.state import tensors
from kvpolicy.protocols import Codec, Stage, StageStore
from kvpolicy.testing import stage_checks as stage_rules
from kvpolicy.testing.stage_checks import ROWS, Trial, changed
from kvpolicy.testing.stage_checks import copy as copy

B = ROWS
H = 3
G = 2


def trial(stage: Stage, slots: int, dim: int) -> Trial:
    """The stage, with room for some slots of every head."""
    own = stage.statistics if isinstance(stage, Codec) else ()
    calibration = stage.load_calibration(0, "cpu")
    kept = MiKV().statistics if isinstance(stage, MiKVStage) else own
    return Trial(stage, slots, H, dim, calibration=calibration, statistics=kept)


def kvquant_files(folder: Path, dim: int, layers: int = 1, **meta: Any) -> str:
    """A folder with a calibration of KVQuant on tokens like those of `draw`."""
    keys, values = draw(64, dim, seed=0)
    fitted = fit_kvquant(keys.transpose(0, 1).flatten(1, 2), values.transpose(0, 1).flatten(1, 2))
    tensors = {f"{name}.{layer}": t.clone() for layer in range(layers) for name, t in fitted.items()}
    save(folder, "kvquant", {"model": None, "head_dim": dim, **meta}, tensors)
    return str(folder)


def oscar_files(folder: Path, dim: int) -> str:
    """A folder with a calibration of OSCAR, which all heads share."""
    generator = torch.Generator().manual_seed(dim)
    rotations = torch.linalg.qr(torch.randn(2, 1, dim, dim, generator=generator)).Q
    tensors = {f"{side}.rotation.0": t.clone() for side, t in zip(("keys", "values"), rotations, strict=True)}
    save(str(folder), "oscar", {"model": None, "head_dim": dim}, tensors)
    return str(folder)


def lowrank_files(folder: Path, dim: int, heads: int = H, layers: int = 1, **meta: Any) -> str:
    """A folder with bases of random keys, values and queries, whose energies fall from direction to direction."""
    generator = torch.Generator().manual_seed(heads)
    tensors: dict[str, Tensor] = {}
    for layer in range(layers):
        for part in ("keys.pre", "keys.post", "values", "queries"):
            basis = torch.linalg.qr(torch.randn(heads, dim, dim, generator=generator)).Q
            tensors[f"{part}.basis.{layer}"] = basis.half()
            tensors[f"{part}.energy.{layer}"] = torch.logspace(1, -2, dim).expand(heads, -1)
            tensors[f"{part}.mean.{layer}"] = torch.randn(heads, dim, generator=generator)
    save(folder, "lowrank", {"model": None, "head_dim": dim, **meta}, tensors)
    return str(folder)


def draw(count: int, dim: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Keys whose channels differ in size and offset, and plain values, [B, H, count, dim]."""
    return stage_rules.draw(B, H, count, dim, seed)


def empty(stage: Stage, slots: int, dim: int, batch: int = B) -> StageStore:
    """A stage's tensors before anything is written."""
    return trial(stage, slots, dim).empty(batch)


def at(slots: Sequence[int], batch: int = B) -> Tensor:
    """The same slots in every head."""
    return torch.tensor(list(slots), dtype=torch.int64).expand(batch, H, -1)


def flags(values: Sequence[bool], batch: int = B) -> Tensor:
    """The same flags in every head."""
    return torch.tensor(list(values), dtype=torch.bool).expand(batch, H, -1)


def fill(stage: Stage, slots: int, dim: int, seed: int = 0) -> tuple[StageStore, Tensor, Tensor]:
    """A store whose slots were all written at once, and what was written."""
    return trial(stage, slots, dim).fill(seed)


def read(stage: Stage, store: StageStore, slots: int) -> tuple[Tensor, Tensor]:
    """All keys and values."""
    return stage.keys(store, slice(0, slots)), stage.values(store, slice(0, slots))


def same(one: StageStore, other: StageStore) -> bool:
    """Whether two stores are equal bit for bit."""
    return not changed(one.codes, other.codes)


def error(got: Tensor, want: Tensor) -> float:
    """Squared error over each channel's variance."""
    return float((got - want).square().mean() / want.var(2).mean())


def check_rows(stage: Stage, slots: int, dim: int) -> None:
    """A row has the same codes on its own, in a batch, and among tokens that are not written."""
    stage_rules.check_rows(trial(stage, slots, dim), str(stage))


def check_inactive(stage: Stage, slots: int, dim: int) -> None:
    """A write changes only the heads that it has tokens for."""
    stage_rules.check_inactive(trial(stage, slots, dim), str(stage))


def check_overwrite(stage: Stage, slots: int, dim: int, fixed: Sequence[str]) -> None:
    """A write to a free slot keeps other slots and what is `fixed`; its value is encoded as on its own."""
    store, _, _ = fill(stage, slots, dim)
    before = read(stage, store, slots)
    more_keys, more_values = draw(1, dim, seed=2)
    held = {name: getattr(store.codes, name).clone() for name in fixed}
    stage.write(store, more_keys, more_values, at([3]), flags([True]), flags([slot != 3 for slot in range(slots)]))
    assert all(torch.equal(getattr(store.codes, name), then) for name, then in held.items())
    others = [slot for slot in range(slots) if slot != 3]
    after = read(stage, store, slots)
    assert all(torch.equal(now[:, :, others], then[:, :, others]) for now, then in zip(after, before, strict=True))
    alone = empty(stage, slots, dim)
    stage.write(alone, more_keys, more_values, at([0]), flags([True]), flags([False] * slots))
    assert torch.equal(after[1][:, :, 3], stage.values(alone, slice(0, slots))[:, :, 0])
    assert not torch.equal(after[0][:, :, 3], before[0][:, :, 3])


def check_ways_to_read(stage: Stage, slots: int, dim: int, group_size: int = 1) -> None:
    """A range, an index and products give the same keys and values."""
    store, _, _ = fill(stage, slots, dim)
    keys, values = read(stage, store, slots)
    assert keys.shape == values.shape == (B, H, slots, dim) and keys.dtype == values.dtype == torch.float32
    some = torch.stack([torch.randperm(slots)[: slots // 2] for _ in range(B * H)]).reshape(B, H, -1)
    index = some[..., None].expand(-1, -1, -1, dim)
    assert torch.equal(stage.keys(store, some), keys.gather(2, index))
    assert torch.equal(stage.values(store, some), values.gather(2, index))
    part = slice(group_size, 2 * group_size)
    assert torch.equal(stage.keys(store, part), keys[:, :, part])
    assert torch.equal(stage.values(store, part), values[:, :, part])
    queries = torch.randn(B, H, G, dim)
    weights = torch.rand(B, H, G, slots)
    weights /= weights.sum(-1, keepdim=True)  # as attention has them: the error of a sum grows with what is added
    torch.testing.assert_close(stage.score(store, queries, None), queries @ keys.mT, atol=1e-3, rtol=1e-5)
    torch.testing.assert_close(stage.mix(store, weights), weights @ values, atol=1e-5, rtol=1e-5)
    low = stage.score(store, queries.bfloat16(), None), stage.mix(store, weights.bfloat16())
    assert all(x.dtype == torch.float32 for x in low)


def check_finite(stage: Stage, slots: int, dim: int) -> None:
    """Numbers of any size decode to finite numbers."""
    ramp = torch.linspace(-1, 1, B * H * slots * dim).reshape(B, H, slots, dim)
    tiny = ramp * 1e-40
    for x in (torch.zeros_like(ramp), torch.full_like(ramp, 1e6), ramp * 1e9, ramp.sign() * 65504, tiny):
        store = empty(stage, slots, dim)
        stage.write(store, x, x, at(range(slots)), flags([True] * slots), flags([False] * slots))
        stage.write(store, -x[:, :, :1], 1e6 + x[:, :, :1], at([1]), flags([True]), flags([True] * slots))
        assert all(part.isfinite().all() for part in (*read(stage, store, slots), *tensors(store.codes)))


def check_order(stage: Stage, slots: int, dim: int, fixed: Sequence[str]) -> None:
    """What is fixed per sequence does not depend on the order of the tokens, even if they nearly cancel out."""
    keys, values = draw(slots, dim)
    keys[:, :, 1::2] = keys[:, :, 1::2] / 1000 - keys[:, :, ::2]
    found: list[list[Tensor]] = []
    for order in (torch.arange(slots), torch.randperm(slots, generator=torch.Generator().manual_seed(0))):
        store = empty(stage, slots, dim)
        stage.write(store, keys[:, :, order], values, at(range(slots)), flags([True] * slots), flags([False] * slots))
        found.append([getattr(store.codes, name) for name in fixed])
    assert all(map(torch.equal, *found))


def check_compiled(stage: Stage, slots: int, dim: int, backend: Any, compare: Callable[[Tensor, Tensor], None]) -> None:
    """All methods trace once, without graph breaks, with equal results."""

    def once(
        store: StageStore, keys: Tensor, values: Tensor, slot: Tensor, write_mask: Tensor, occupied: Tensor
    ) -> list[Tensor]:
        stage.write(store, keys, values, slot, write_mask, occupied)
        queries = keys[:, :, :G]
        weights = values[:, :, :G, :1].expand(-1, -1, -1, slots)
        found = [stage.keys(store, slice(0, slots)), stage.values(store, slice(0, slots))]
        found += [stage.keys(store, slot), stage.values(store, slot)]
        return [*found, stage.score(store, queries, None), stage.mix(store, weights)]

    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(once, fullgraph=True, backend=counter)
    eager = empty(stage, slots, dim)
    other = copy(eager)
    occupied = torch.zeros(B, H, slots, dtype=torch.bool)
    for seed, write_mask in enumerate((flags([True] * slots), flags([slot % 3 == 0 for slot in range(slots)]))):
        given = (*draw(slots, dim, seed), at(range(slots)[::-1]), write_mask.clone(), occupied.clone())
        for got, want in zip(compiled(other, *given), once(eager, *given), strict=True):
            compare(got, want)
        assert same(eager, other)
        occupied[:, 0] = True
    assert counter.frame_count == 1
