"""Common parts of the benchmarks of vLLM: the engine's sizes, and sides that are measured in processes of their own."""

# vLLM is no dependency of development: where it is missing, its names are unknown to a type checker.
# pyright: reportMissingImports=false

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

import kvpolicy
from kvpolicy_eval.common.table import Option, UsageError

MODEL = "tiny-4k"
BLOCK = 32
"""Tokens of a block: the fewest that attention on a CPU takes. With vLLM's 128, a tenth of a document would be rounded
up by a third."""
BATCHED = 2048
"""Tokens that a step computes at most."""
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
"""Environment of the process of a side: its engine is in it, where it can be watched, and has one thread."""


def blocks_of(tokens: int) -> int:
    """Blocks that tokens take.

    >>> blocks_of(32), blocks_of(33)
    (1, 2)
    """
    return -(-tokens // BLOCK)


def measured_by(module: str, words: Sequence[str], folder: Path, repeats: int) -> dict[str, Any]:
    """Result of a benchmark that runs in a process of its own, as JSON.

    Args:
        module: The benchmark.
        words: What it is to measure.
        folder: Where its files are.
        repeats: How often.
    """
    out = folder / "result.json"
    command = [sys.executable, "-m", "kvpolicy_eval.bench", module, "--measure", *words, str(out)]
    command += ["--folder", str(folder), "--repeats", str(repeats)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | ENVIRONMENT)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout}\n{done.stderr}")
    return json.loads(out.read_text(encoding="utf-8"))


def write_result(result: Any, out: str) -> None:
    """Write what was measured, a dataclass, for the process that asked for it."""
    Path(out).write_text(json.dumps(asdict(result)), encoding="utf-8")


def save_model(folder: Path) -> tuple[Any, Any]:
    """Save the model for the processes of the sides; the model and its tokenizer."""
    model, tokenizer = kvpolicy.tiny(name=MODEL)
    for each in (model, tokenizer):
        each.save_pretrained(folder / "model")
    return model, tokenizer


def engine(folder: Path, pool: int, longest: int, clients: int, transfer: Any) -> Any:
    """The engine of a side, in this process: a `vllm.LLM`.

    Args:
        folder: Where `save_model` has written.
        pool: Its blocks.
        longest: The most tokens of a request and its answer.
        clients: The most requests in flight.
        transfer: Its `KVTransferConfig`; None for stock vLLM.
    """
    from vllm import LLM

    return LLM(
        str(folder / "model"),
        dtype="float32",
        enforce_eager=True,
        block_size=BLOCK,
        num_gpu_blocks_override=pool,
        max_model_len=longest,
        max_num_seqs=clients,
        max_num_batched_tokens=BATCHED,
        kv_transfer_config=transfer,
        disable_log_stats=True,
    )


def versions(new: int, repeats: int) -> str:
    """The end of a note: the sizes that all sides have, and versions."""
    package = metadata.packages_distributions()["vllm"][0]
    return (
        f"answers of {new} tokens, blocks of {BLOCK} tokens, {BATCHED:,} tokens a step at most; median of {repeats}. "
        f"{package} {metadata.version(package)}, torch {torch.__version__}, CPU, 1 thread."
    )


def side_options(sides: Sequence[str]) -> list[Option]:
    """The options that all benchmarks of vLLM have."""
    return [
        Option("--repeats", type=int, default=3, help="measurements of each side"),
        Option("--sides", nargs="+", choices=sides, default=[*sides], help="rows to measure"),
        Option("--folder", type=Path, help="where the model and other files go, to keep them"),
    ]


def check_vllm() -> None:
    """Check that vLLM is installed.

    Raises:
        UsageError: If it is not.
    """
    if find_spec("vllm") is None:
        raise UsageError("vLLM is not installed; make an environment with python -m kvpolicy_vllm.env FOLDER")


@contextmanager
def work_folder(folder: Path | None) -> Generator[Path]:
    """The folder of `--folder`, made if it is missing, or a temporary one."""
    with tempfile.TemporaryDirectory() as temporary:
        found = folder or Path(temporary)
        found.mkdir(parents=True, exist_ok=True)
        yield found
