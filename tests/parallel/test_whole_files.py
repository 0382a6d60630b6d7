"""The file of a whole model, loaded on several ranks: each gets what it would have written itself, and goes on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kvpolicy
from kvpolicy import KVPolicyError, Policy, PolicyCache
from kvpolicy.calibration import calibrate_kvtc
from kvpolicy.hf.cache_file import CacheFile, rank_path, read
from kvpolicy.hf.rank_file import cut_for_rank
from kvpolicy.registry import names
from tests.conformance.policies import ALLOCATORS, CODECS, MERGERS, SELECTORS, words
from tests.parallel.ranks import run_ranks
from tests.parallel.sliced import Heads, divided, pair_of
from tests.parallel.test_exact import POOLED

STEPS = 3
FEW = [
    "kvcrush/h2o@0.5",
    "squeeze+tova+tokenwise:bits=4:group_size=4:residual_length=2:block_size=3@0.5",
    "uniform/adakv+h2o+compensate@0.5",
    "uniform/adakv+h2o+tokenwise:residual_length=2:block_size=3@0.5",
    "h2o+shadowkv:read=6:page=2:rank=3:sinks=1:recent=2:rebuild=3@0.8",
    words("snapkv", "csr"),
    words("snapkv", "kvquant"),
    words("streaming", "minicache"),
]
EVERY = [
    *(policy for policy in POOLED if "FOLDER" not in policy),
    *(words(name, "snapkv") for name in ALLOCATORS),
    *map(words, SELECTORS),
    *(words("snapkv", name) for name in (*CODECS, *MERGERS)),
    *(words("h2o", name, budget="0.8") for name in names("reader")),
]
ROUNDED = ("turboquant", "kvarn")
"""Products with a matrix of a head's size round by how many heads they are of: the first layer alone is equal."""
JOINT = "window+shadowkv:joint=true:read=6:page=2:rank=3:recent=2@0.5"


@torch.no_grad()
def _play(model: Any, policy: str, path: Path, form: str | None = None) -> None:
    """Save the cache of a padded batch behind some steps."""
    draw = torch.Generator().manual_seed(3)
    tokens = torch.randint(3, 64, (2, 26), generator=draw)
    seen = torch.ones_like(tokens)
    seen[1, :9] = 0
    with kvpolicy.attach(model, policy):
        cache = PolicyCache(model)
        for _ in range(1 + STEPS):
            _forward(model, cache, tokens, seen)
            tokens = torch.randint(3, 64, (2, 1), generator=draw)
            seen = torch.cat([seen, torch.ones(2, 1, dtype=torch.int64)], 1)
        cache.save(path, compress=form)


def _forward(model: Any, cache: PolicyCache, tokens: Tensor, seen: Tensor) -> Tensor:
    places = (seen.cumsum(-1) - 1).clamp_min(0)[:, -tokens.shape[1] :]
    return model(tokens, attention_mask=seen, position_ids=places, cache=cache).logits


@torch.no_grad()
def _go_on(model: Any, policy: str, path: Path) -> Tensor:
    """Logits of more of a prompt and of steps behind a cache from a file."""
    draw = torch.Generator().manual_seed(5)
    with kvpolicy.attach(model, policy):
        cache = PolicyCache.load(model, path)
        seen = torch.ones(2, cache.get_seq_length(), dtype=torch.int64)
        seen[1, :9] = 0
        found: list[Tensor] = []
        for count in (7, *[1] * STEPS):
            seen = torch.cat([seen, torch.ones(2, count, dtype=torch.int64)], 1)
            found.append(_forward(model, cache, torch.randint(3, 64, (2, count), generator=draw), seen))
    return torch.cat(found, 1)


def differences(part: CacheFile, own: CacheFile, layers: Sequence[str]) -> list[str]:
    """What of a rank's own file is not in its part of the whole one, in some layers."""
    wrong = [name for name in ("ranks", "cache") if own.header[name] != part.header[name]]
    for index in layers:
        theirs = part.header["layers"][index]
        ours = own.header["layers"][index]
        # Until the fullest head of all ranks has work to do.
        wrong += [name for name in ours if ours[name] != theirs[name] and name != "free_steps"]
        if (theirs["free_steps"] or 0) > (ours["free_steps"] or 0):
            wrong.append("free_steps")
        prefix = f"layers.{index}."
        live = own.tensors[f"{prefix}positions"] >= 0
        for name, tensor in own.tensors.items():
            if not name.startswith(prefix) or not tensor.numel():
                continue
            cut = part.tensors[name]
            if cut.shape != tensor.shape:
                wrong.append(f"{name} {[*cut.shape]} {[*tensor.shape]}")
            elif "pages" in ours and tensor.dim() > 2 and live[:, : tensor.shape[1]].shape == tensor.shape[:3]:
                mask = live[:, : tensor.shape[1]]  # what empty slots of pages hold is arbitrary
                wrong += [] if torch.equal(cut[mask], tensor[mask]) else [name]
            elif not torch.equal(cut, tensor):
                wrong.append(name)
    return wrong


def compare(rank: int, world: int, heads: Heads, policies: list[str], folder: str) -> list[str]:
    """How a rank's part of the file of a whole model differs from the file that it writes itself."""
    model, alone = pair_of(heads)
    found: list[str] = []
    for policy in policies:
        whole = Path(folder) / f"whole{rank}.safetensors"
        ours = Path(folder) / "own.safetensors"
        _play(alone, policy, whole)
        with divided(heads, rank, world):
            _play(model, policy, ours)
        own = read(rank_path(ours, rank, world))
        with kvpolicy.attach(model, policy):
            empty = PolicyCache(model, Policy.from_dict(own.header["policy"]))
            part = cut_for_rank(read(whole), empty, "the file")
        rounds = heads.replicas > 1 or any(name in policy for name in ROUNDED)
        layers = ["0"] if rounds else [*own.header["layers"]]
        found += [f"{policy}: {what}" for what in differences(part, own, layers)[:3]]
    return found


@pytest.mark.parametrize(
    ("heads", "policies"),
    [
        (Heads(4, 2), FEW),
        (Heads(4, 1, replicas=2), FEW),
        pytest.param(Heads(4, 2), EVERY, marks=pytest.mark.full),
    ],
    ids=["few", "copied", "every"],
)
def test_a_part_is_the_file_of_its_rank(heads: Heads, policies: list[str], tmp_path: Path) -> None:
    wrong = run_ranks(compare, 2, heads, list(dict.fromkeys(policies)), str(tmp_path), limit=900)
    assert not any(wrong), "\n".join(line for lines in wrong for line in lines)


def _loaded(rank: int, world: int, heads: Heads, policies: list[str], folder: str) -> list[float]:
    """The largest difference of logits behind the same file, on a rank and in the whole model."""
    model, alone = pair_of(heads)
    found: list[float] = []
    for policy in policies:
        path = Path(folder) / f"whole{rank}.safetensors"
        _play(alone, policy, path)
        want = _go_on(alone, policy, path)
        with divided(heads, rank, world):
            found.append(float((_go_on(model, policy, path) - want).abs().max()))
    return found


@pytest.mark.parametrize("heads", [Heads(4, 2), Heads(4, 1, replicas=2)], ids=str)
def test_a_loaded_part_goes_on_as_the_whole(heads: Heads, tmp_path: Path) -> None:
    for found in run_ranks(_loaded, 2, heads, FEW, str(tmp_path)):
        assert max(found) < 1e-4


def _with_loss(rank: int, world: int, heads: Heads, folder: str) -> tuple[float, str]:
    """As `_loaded`, for a file with loss; and what a rank says that shall write one."""
    model, alone = pair_of(heads)
    path = Path(folder) / f"whole{rank}.safetensors"
    calibration = Path(folder) / f"calibration{rank}"
    draw = torch.Generator().manual_seed(1)
    calibrate_kvtc(alone, [torch.randint(3, 64, (140,), generator=draw)], calibration, ratios=[2])
    form = f"kvtc:calibration={calibration}:ratio=2:sinks=2:window=4"
    _play(alone, "full", path, form)
    want = _go_on(alone, "full", path)
    with divided(heads, rank, world):
        found = float((_go_on(model, "full", path) - want).abs().max())
        with pytest.raises(KVPolicyError) as caught:
            _play(model, "full", path, form)
    return found, str(caught.value)


def test_a_file_with_loss_is_written_by_one_process_and_loaded_on_several(tmp_path: Path) -> None:
    for found, said in run_ranks(_with_loss, 2, Heads(4, 2), str(tmp_path)):
        assert found < 1e-4
        assert said.startswith("A cache must be whole to be saved with kvtc")


def _refused(rank: int, world: int, heads: Heads, policy: str, folder: str) -> str:
    model, alone = pair_of(heads)
    path = Path(folder) / f"whole{rank}.safetensors"
    _play(alone, policy, path)
    with pytest.raises(KVPolicyError) as caught, divided(heads, rank, world):
        _go_on(model, policy, path)
    return str(caught.value)


@pytest.mark.parametrize(
    ("heads", "policy", "message"),
    [
        (Heads(6, 3), "h2o@0.5", "The 3 KV heads of a saved cache must be divided evenly among ranks, got 2 ranks"),
        (Heads(2, 1), "h2o@0.5", "The 1 KV head of a saved cache must be divided evenly among ranks, got 2 ranks"),
        (Heads(4, 2), JOINT, "A saved cache must hold every KV head by itself to be divided among ranks, got reads."),
    ],
)
def test_what_cannot_be_divided_is_refused(heads: Heads, policy: str, message: str, tmp_path: Path) -> None:
    assert all(said.startswith(message) for said in run_ranks(_refused, 2, heads, policy, str(tmp_path)))
