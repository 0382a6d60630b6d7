"""Cases on two ranks: processes with gloo, each with its heads of a model."""

from __future__ import annotations

import datetime
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.golden import access
from tests.golden.digests import FAILED, Fields

WORLD = 2

LIMIT = 120
"""Seconds after which a rank no longer waits for the other."""


def run_on_ranks(cases: list[str], folder: Path) -> dict[str, Fields]:
    """The fields of cases on each of the ranks, by case."""
    found: dict[str, Fields] = {}
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"  # which the ranks inherit while they import torch
    try:
        while len(found) < len(cases):
            rest = [case for case in cases if case not in found]
            found |= _start_ranks(rest, folder)
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before
    return {case: found[case] for case in cases}


def _start_ranks(cases: list[str], folder: Path) -> dict[str, Fields]:
    """The fields of cases up to the last, or up to the first in which a rank failed: then no rank can go on."""
    meeting = Path(tempfile.mkdtemp())
    error: Exception | None = None
    try:
        torch.multiprocessing.spawn(_enter, (str(meeting), cases, str(folder)), nprocs=WORLD)  # pyright: ignore[reportPrivateImportUsage]
    except Exception as caught:
        error = caught
    parts = [_finished(meeting / f"{rank}.json") for rank in range(WORLD)]
    shutil.rmtree(meeting, ignore_errors=True)
    found: dict[str, Fields] = {}
    for case in cases:
        if not all(case in part for part in parts):
            print(f"failed: {case}: {error}", file=sys.stderr)
            return found | {case: {FAILED: type(error).__name__}}
        found[case] = {
            f"rank{rank}.{name}": value for rank in range(WORLD) for name, value in parts[rank][case].items()
        }
    return found


def _finished(file: Path) -> dict[str, Fields]:
    """The cases that a rank has finished: each a line of its file."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return {name: fields for name, fields in map(json.loads, lines)}


def _enter(rank: int, meeting: str, cases: list[str], folder: str) -> None:
    """One rank's process, from beginning to end."""
    from tests.golden.cases import all_cases, prepare, run_case

    prepare()
    limit = datetime.timedelta(seconds=LIMIT)
    dist.init_process_group("gloo", f"file://{meeting}/store", rank=rank, world_size=WORLD, timeout=limit)
    known = all_cases()
    with (Path(meeting) / f"{rank}.json").open("w", encoding="utf-8") as file:
        for name in cases:
            fields = run_case(known[name], Path(folder), rank=rank, quiet=rank > 0)
            if FAILED in fields:
                os._exit(1)
            print(json.dumps([name, fields]), file=file, flush=True)
        dist.barrier()
    os._exit(0)  # gloo's destructors abort now and then


def shared(model: Any, rank: int) -> Any:
    """A model of Llama's kind with the heads of one rank; the outputs of attention are summed over the ranks.

    A single KV head is held by every rank.
    """
    replicas = WORLD if model.config.num_key_value_heads == 1 else 1
    for layer in model.model.layers:
        attention = layer.self_attn
        _keep_part(attention.q_proj, 0, rank)
        for projection in (attention.k_proj, attention.v_proj) if replicas == 1 else ():
            _keep_part(projection, 0, rank)
        _keep_part(attention.o_proj, 1, rank)
        attention.o_proj.register_forward_hook(_sum_over_ranks)
    access.share_over_ranks(model, replicas)
    return model


def _keep_part(projection: nn.Linear, dim: int, rank: int) -> None:
    projection.weight = nn.Parameter(projection.weight.detach().chunk(WORLD, dim)[rank].clone())


def _sum_over_ranks(_: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(output)
    return output
