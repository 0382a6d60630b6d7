"""What benchmarks of vLLM share: the engine's sizes, and sides that are measured in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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
"""What the process of a side has: its engine is in it, where it can be watched, and has one thread."""


def blocks_of(tokens: int) -> int:
    """Blocks that tokens take.

    >>> blocks_of(32), blocks_of(33)
    (1, 2)
    """
    return -(-tokens // BLOCK)


def measured_by(module: str, words: Sequence[str], folder: Path, repeats: int) -> dict[str, Any]:
    """What a benchmark of this folder measures in a process of its own, as JSON.

    Args:
        module: The benchmark.
        words: What it is to measure.
        folder: Where its files are.
        repeats: How often.
    """
    out = folder / "result.json"
    command = [sys.executable, "-m", f"kvpolicy_eval.bench.{module}", "--measure", *words, str(out)]
    command += ["--folder", str(folder), "--repeats", str(repeats)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | ENVIRONMENT)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout}\n{done.stderr}")
    return json.loads(out.read_text(encoding="utf-8"))
