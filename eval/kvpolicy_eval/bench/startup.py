"""Times to begin: importing, showing help, attaching to and planning for a model of 80 layers."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Iterator

import torch

import kvpolicy
from kvpolicy_eval.bench.common import Quantity

LARGE, POLICIES = "llama-3-70b", ("window@0.2", "squeeze+kvcrush/snapkv+kivi:bits=4@0.2")
ATTACH, IMPORT, HELP = 0.050, 0.2, 1.0
"""Bars, in seconds."""

_IMPORT = "import time, {before}; start = time.perf_counter(); {then}; print(time.perf_counter() - start)"


def measure(rounds: int = 5) -> Iterator[Quantity]:
    """Time everything, each import in a process of its own."""
    added = [_printed(_IMPORT.format(before="torch", then="import kvpolicy")) for _ in range(rounds)]
    yield Quantity("import kvpolicy, beyond `import torch`", "", added, "s", IMPORT)
    then = "import kvpolicy; kvpolicy.attach; kvpolicy.plan"
    before = "torch; from transformers import LlamaForCausalLM"
    added = [_printed(_IMPORT.format(before=before, then=then)) for _ in range(rounds)]
    yield Quantity("first use of `attach` and `plan`, beyond transformers' own import", "", added, "s", None)
    yield Quantity("`kvpolicy --help`, whole process", "", [_help() for _ in range(rounds)], "s", HELP)
    for policy in POLICIES:
        yield attach_and_plan(policy)


def _printed(code: str) -> float:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return float(done.stdout)


def _help() -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-m", "kvpolicy.cli.app", "--help"], capture_output=True, check=True)
    return time.perf_counter() - start


def attach_and_plan(policy: str, rounds: int = 9) -> Quantity:
    """Time `attach` and `plan` together, for a model of 80 layers without storage."""
    from transformers import AutoModelForCausalLM

    from kvpolicy.hf.embedded import config_of

    config = config_of(LARGE)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    times: list[float] = []
    for number in range(rounds + 1):
        start = time.perf_counter()
        handle = kvpolicy.attach(model, policy)
        kvpolicy.plan(config, policy, prompt=4096 + number, new=256)  # other lengths, or a plan would be remembered
        times.append(time.perf_counter() - start)
        handle.detach()
    quantity = Quantity(f"attach and plan, {config.num_hidden_layers} layers", policy, times[1:], "s", ATTACH)
    return quantity._replace(note=f"{statistics.median(times[:1]) * 1000:.0f} ms the first time, with what it imports")
