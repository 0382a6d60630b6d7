"""Cases on two ranks: processes with gloo, each with its heads of a model."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.golden import access
from tests.golden.digests import Fields

WORLD = 2


def run_on_ranks(cases: list[str], folder: Path) -> dict[str, Fields]:
    """The fields of cases on each of the ranks, by case."""
    meeting = Path(tempfile.mkdtemp())
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"  # which the ranks inherit while they import torch
    try:
        torch.multiprocessing.spawn(_enter, (str(meeting), cases, str(folder)), nprocs=WORLD)  # pyright: ignore[reportPrivateImportUsage]
        parts = [json.loads((meeting / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(WORLD)]
    finally:
        shutil.rmtree(meeting, ignore_errors=True)
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before
    return {
        case: {f"rank{rank}.{name}": value for rank in range(WORLD) for name, value in parts[rank][case].items()}
        for case in cases
    }


def shard(model: Any, rank: int) -> Any:
    """Leave a model of Llama's kind with the heads of one rank; the outputs of attention are summed over the ranks."""
    for layer in model.model.layers:
        attention = layer.self_attn
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
            projection.weight = nn.Parameter(projection.weight.detach().chunk(WORLD, 0)[rank].clone())
        output = attention.o_proj
        output.weight = nn.Parameter(output.weight.detach().chunk(WORLD, 1)[rank].clone())
        output.register_forward_hook(_sum_over_ranks)
    return model


def _sum_over_ranks(_: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(output)
    return output


def _enter(rank: int, meeting: str, cases: list[str], folder: str) -> None:
    """One rank's process, from beginning to end."""
    from tests.golden.cases import all_cases, prepare, run_case

    prepare()
    dist.init_process_group("gloo", f"file://{meeting}/store", rank=rank, world_size=WORLD)
    known = all_cases()
    found: dict[str, Fields] = {}
    for name in cases:
        found[name] = run_case(known[name], Path(folder), rank=rank, quiet=rank > 0)
    (Path(meeting) / f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    os._exit(0)  # gloo's destructors abort now and then


def shared(model: Any, rank: int) -> Any:
    """One rank's part of a model, which kvpolicy knows to be one."""
    model = shard(model, rank)
    access.share_over_ranks(model)
    return model
