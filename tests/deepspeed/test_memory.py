"""While loading, a rank holds at most its own weights and one file of the checkpoint."""

from __future__ import annotations

import gc
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.parallel.ranks import run_ranks
from tests.sampling import product

pytest.importorskip("deepspeed")
MIB = 2**20
SIZES: dict[str, Any] = {
    "hidden_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "num_key_value_heads": 6,
    "vocab_size": 4000,
}


def _resident(kind: str) -> float:
    """Resident memory in MiB: `VmRSS` is everything, `RssAnon` excludes pages of files, which the system can drop."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{kind}:"):
            return int(line.split()[1]) / 1024
    pytest.skip(f"this system does not report {kind}")


class _Peak(threading.Thread):
    """The peak of the memory while it runs, sampled every millisecond."""

    def __init__(self, kind: str) -> None:
        super().__init__(daemon=True)
        self.kind = kind
        self.before = _resident(kind)
        self.most = 0.0
        self.over = threading.Event()

    def run(self) -> None:
        while not self.over.wait(0.001):
            self.most = max(self.most, _resident(self.kind) - self.before)


def _load(rank: int, world: int, small: str, folder: str, backend: Any, dtype: str, kind: str) -> tuple[float, float]:
    import kvpolicy_deepspeed

    kvpolicy_deepspeed.load(small, backend=backend)  # imports, and allocations of the first call
    gc.collect()
    peak = _Peak(kind)
    peak.start()
    model = kvpolicy_deepspeed.load(folder, backend=backend, dtype=dtype)
    peak.over.set()
    peak.join()
    local: list[Any] = [p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()]
    return peak.most, sum(tensor.nbytes for tensor in local) / MIB


def _save(family: str, folder: Path, **sizes: Any) -> str:
    more = {"num_local_experts": 4, "sliding_window": None} if family == "Mixtral" else {}
    inner = sizes["hidden_size"] * (1 if more else 4)
    config = getattr(transformers, f"{family}Config")(**sizes, **more, intermediate_size=inner)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="16MB")
    return str(folder)


SAMPLE = [("Mixtral", "deepspeed", "bfloat16")]


@product("family,backend,dtype", ["Mixtral", "Llama"], ["deepspeed", "hf"], ["float32", "bfloat16"], sample=SAMPLE)
def test_a_rank_holds_its_shard_and_one_file(family: str, backend: str, dtype: str, tmp_path: Path) -> None:
    small = _save(family, tmp_path / "small", **(SIZES | {"hidden_size": 48, "vocab_size": 64}))
    folder = _save(family, tmp_path / "large", **SIZES)
    files = [file.stat().st_size / MIB for file in Path(folder).glob("*.safetensors")]
    assert len(files) > 4
    # transformers maps all files at once, whose pages the system can drop; kvpolicy opens one file at a time.
    kind = "VmRSS" if backend == "deepspeed" else "RssAnon"
    for peak, own in run_ranks(_load, 2, small, folder, backend, dtype, kind, fresh=True):
        assert own < 0.6 * sum(files) * (2 if dtype == "float32" else 1)
        assert peak <= own + max(files) + 8, f"{peak:.0f} MiB for {own:.0f} MiB of weights"  # 8 for the interpreter
