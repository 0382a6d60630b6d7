"""Start-up times: importing, showing help, and attaching to and planning for a model of 80 layers."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

import torch

import kvpolicy
from kvpolicy_eval.bench.timing import Quantity

LARGE = "llama-3-70b"
POLICIES = ("window@0.2", "squeeze+kvcrush/snapkv+kivi:bits=4@0.2")
ATTACH_LIMIT = 0.050
IMPORT_LIMIT = 0.2
HELP_LIMIT = 1.0
"""Limits in seconds."""

_TIMED_CODE = "import time, {setup}; start = time.perf_counter(); {statement}; print(time.perf_counter() - start)"


def measure(rounds: int = 5) -> Iterator[Quantity]:
    """Measure all start-up times, imports and help in fresh processes."""
    imports = [_run_timed("torch", "import kvpolicy") for _ in range(rounds)]
    yield Quantity("import kvpolicy, beyond `import torch`", "", imports, "s", IMPORT_LIMIT)
    setup = "torch; from transformers import LlamaForCausalLM"
    statement = "import kvpolicy; kvpolicy.attach; kvpolicy.plan"
    first_uses = [_run_timed(setup, statement) for _ in range(rounds)]
    what = "first use of `attach` and `plan`, beyond transformers' own import"
    yield Quantity(what, "", first_uses, "s", None)
    yield Quantity("`kvpolicy --help`, whole process", "", [_help() for _ in range(rounds)], "s", HELP_LIMIT)
    for policy in POLICIES:
        yield attach_and_plan(policy)


def _run_timed(setup: str, statement: str) -> float:
    """Seconds of a statement in a fresh process, after the imports in `setup`."""
    code = _TIMED_CODE.format(setup=setup, statement=statement)
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return float(process.stdout)


def _help() -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-m", "kvpolicy.cli.app", "--help"], capture_output=True, check=True)
    return time.perf_counter() - start


def attach_and_plan(policy: str, rounds: int = 9) -> Quantity:
    """Time `attach` and `plan` together, for a model of 80 layers on the meta device."""
    from transformers import AutoModelForCausalLM

    from kvpolicy.hf.embedded import config_of

    config = config_of(LARGE)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    times: list[float] = []
    for number in range(rounds + 1):
        start = time.perf_counter()
        handle = kvpolicy.attach(model, policy)
        kvpolicy.plan(config, policy, prompt=4096 + number, new=256)  # a plan of the same length would be cached
        times.append(time.perf_counter() - start)
        handle.detach()
    first, *others = times
    return Quantity(
        f"attach and plan, {config.num_hidden_layers} layers",
        policy,
        others,
        "s",
        ATTACH_LIMIT,
        f"first: {first * 1000:.0f} ms",
    )
