"""SqueezeAttention's Table 3 in small, tokens per second over batch sizes.

A model of Mistral's shape, scaled to hidden 1,024 and 8 layers with random weights, in fp32. Each measurement is a
process of its own, whose memory is limited: weights, cache and activations must fit. The stock cache, dynamic and
static, is compared with policies that keep a fifth of the tokens. Steps are timed when the prompt has been read, in the
middle of the generation, and at its end. All rows of a batch are copies of one prompt: only times and bytes count.

What has been measured is kept in `--results`, with which an interrupted run continues.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import MistralConfig, MistralForCausalLM
from transformers.cache_utils import DynamicCache, StaticCache

import kvpolicy
from kvpolicy.hf.cache_names import cache_argument
from kvpolicy.text.json_lines import append_line, read_lines
from kvpolicy_eval.bench.floor import Machine, decode_work, measure_machine
from kvpolicy_eval.common.table import Grid, Option, Section, Table, UsageError, collect, threads, torch_note

PROMPT = 512
NEW = 1024
KEPT = (PROMPT + NEW) // 5
"""A fifth of the tokens that the full cache holds at the end."""
STOCK = ("dynamic", "static")
POLICIES = (
    f"streaming@{KEPT}",
    f"squeeze+streaming@{KEPT}",
    f"streaming+tokenwise:bits=4@{KEPT}",
    f"squeeze+snapkv+tokenwise:bits=4@{KEPT}",
)
BATCHES = (1, 16, 64)
GRAIN = 8
"""Largest batches are multiples of it."""
STEPS = 32
GOAL_BATCH = 5
"""Goal: the largest batch over that of the stock cache."""
GOAL_FLOOR = 0.8
"""Goal: tokens per second over what the lower bound of a step allows."""
COLUMNS = ["cache", "batch", "cache, MiB", "tokens/s: start", "middle", "end", "end, of the lower bound's"]

Result = dict[str, Any]


def mistral(hidden: int = 1024, layers: int = 8) -> Any:
    """A model of Mistral 7B's proportions: heads of 128, four query heads per KV head, and its vocabulary."""
    torch.manual_seed(0)
    config = MistralConfig(
        hidden_size=hidden,
        intermediate_size=hidden * 7 // 2,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 128,
        num_key_value_heads=hidden // 512,
        head_dim=128,
        vocab_size=32_000,
        max_position_embeddings=8192,
        sliding_window=None,
        eos_token_id=None,
    )
    return MistralForCausalLM(config).eval()


def filled(model: Any, side: str, batch: int, tokens: int) -> Any:
    """The cache of a batch after some tokens of each row.

    Args:
        model: The model, with the policy attached if the side is one.
        side: `dynamic`, `static` or the spec of a policy.
        batch: Number of rows.
        tokens: Tokens of a row.
    """
    ids = torch.randint(1, 32_000, (1, tokens), generator=torch.Generator().manual_seed(0))
    if side == "static":
        config = model.config
        cache: Any = StaticCache(config=config, max_cache_len=PROMPT + NEW)
        for layer in range(config.num_hidden_layers):
            states = torch.randn(batch, config.num_key_value_heads, tokens, config.head_dim)
            cache.update(states, states, layer)
        return cache
    if side == "dynamic":
        cache = DynamicCache(config=model.config)
    else:
        cache = kvpolicy.PolicyCache(model, prompt=tokens, new=PROMPT + NEW - tokens)
    model(ids, **cache_argument(model, cache), logits_to_keep=1)
    cache.batch_repeat_interleave(batch)
    return cache


def measure_side(model: Any, side: str, batch: int, steps: int, seconds: float) -> Result:
    """Time decode steps of a batch in this process.

    Args:
        model: The model.
        side: `dynamic`, `static` or the spec of a policy.
        batch: Number of rows.
        steps: Steps at each of the three places; with 1, only the end is run, to see whether it fits.
        seconds: No further step begins at a place after this time.
    """
    handle = None if side in STOCK else kvpolicy.attach(model, side)
    ends = [PROMPT + NEW - steps] if steps == 1 else [PROMPT, PROMPT + (NEW - steps) // 2, PROMPT + NEW - steps]
    token = torch.ones(batch, 1, dtype=torch.int64)
    result: Result = {"side": side, "batch": batch, "steps": [], "seconds": []}
    with torch.inference_mode():
        for tokens in ends:
            cache = filled(model, side, batch, tokens)
            begin = time.perf_counter()
            done = 0
            while done < steps and (done == 0 or time.perf_counter() - begin < seconds):
                model(token, **cache_argument(model, cache))
                done += 1
            result["seconds"].append((time.perf_counter() - begin) / done)
            result["steps"].append(done)
            result["bytes"] = cache_bytes(cache)
            result["numbers"] = held_numbers(model, cache)
            del cache
    if handle is not None:
        handle.detach()
    return result


def cache_bytes(cache: Any) -> int:
    """Bytes that a cache holds."""
    if isinstance(cache, kvpolicy.PolicyCache):
        return cache.nbytes
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


def held_numbers(model: Any, cache: Any) -> int:
    """Elements of keys and values of a row that a step attends to."""
    config = model.config
    if isinstance(cache, kvpolicy.PolicyCache):
        slots = sum(layer.layout.slots for layer in cache.policy_layers)
    else:
        slots = sum(layer.keys.shape[2] for layer in cache.layers)
    return 2 * config.num_key_value_heads * config.head_dim * slots


def limit_memory(nbytes: int) -> None:
    """Limit what this process allocates from now on; its libraries are loaded already."""
    held = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmData"))
    limit = int(held.split()[1]) * 1024 + nbytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


class Runs:
    """Measurements in processes with limited memory, each of which is made once.

    Args:
        results: File with earlier results, one in a line.
        memory: Bytes of a process.
        options: Arguments that every process gets.
    """

    def __init__(self, results: Path | None, memory: int, options: list[str]) -> None:
        """Read earlier results."""
        self.results = results
        self.memory = memory
        self.options = options
        self.known: dict[str, Result | None] = {}
        if results is not None:
            try:
                self.known = dict(read_lines(results, '["'))
            except (ValueError, TypeError) as error:
                raise UsageError(
                    f"--results must be absent, or a file of results, got {results}; try another file."
                ) from error

    def result(self, side: str, batch: int, steps: int) -> Result | None:
        """The measurement of a batch; None if it does not fit into the memory."""
        key = f"{side} batch={batch} steps={steps} memory={self.memory}"
        if key not in self.known:
            self.known[key] = self._run(side, batch, steps)
            if self.results is not None:
                append_line(self.results, [key, self.known[key]])
        return self.known[key]

    def _run(self, side: str, batch: int, steps: int) -> Result | None:
        command = [sys.executable, "-m", "kvpolicy_eval.bench", "throughput", "--memory", str(self.memory)]
        command += ["--side", side, "--batch", str(batch), "--steps", str(steps), *self.options]
        run = subprocess.run(command, capture_output=True, text=True)
        if run.returncode == 0:
            return json.loads(run.stdout.splitlines()[-1])
        if "allocate memory" in run.stderr or "MemoryError" in run.stderr or "bad_alloc" in run.stderr:
            return None
        raise RuntimeError(f"{' '.join(command)} failed:\n{run.stderr}")

    def largest(self, side: str) -> int:
        """The largest batch that fits, a multiple of `GRAIN`, found by doubling and halving."""
        low = 0
        step = GRAIN
        while self.result(side, low + step, 1) is not None:
            low += step
            step *= 2
        while step > max(GRAIN, low // 32):
            step //= 2
            if self.result(side, low + step, 1) is not None:
                low += step
        return low

    def largest_timed(self, side: str, steps: int) -> int:
        """The largest batch of which steps can be timed at all three places, which takes a little more."""
        batch = self.largest(side)
        while batch > GRAIN and self.result(side, batch, steps) is None:
            batch -= max(GRAIN, batch // 32 // GRAIN * GRAIN)
        return batch


def lines(runs: Runs, sides: tuple[str, ...], machine: Machine, steps: int) -> Iterator[list[str]]:
    """The rows of the table: some batches of each side, and the largest one."""
    weights = mistral()
    for side in sides:
        largest = runs.largest_timed(side, steps)
        for batch in sorted({*(batch for batch in BATCHES if batch < largest), largest}):
            found = runs.result(side, batch, steps)
            if found is None:
                raise RuntimeError(f"{side} fits with {largest} rows, but not with {batch}")
            floor = decode_work(weights, found["bytes"], found["numbers"], batch).floor(machine)
            rates = [batch / seconds for seconds in found["seconds"]]
            yield [
                f"`{side}`" if side not in STOCK else f"stock, {side}",
                f"{batch}" + (" (largest)" if batch == largest else ""),
                f"{found['bytes'] / 2**20:,.0f}",
                *(f"{rate:.1f}" for rate in rates),
                f"{rates[-1] * floor / batch:.2f}",
            ]


def note(runs: Runs, sides: tuple[str, ...], machine: Machine, steps: int) -> str:
    """Largest batches over the stock cache's, and how everything was measured."""
    stock = runs.largest_timed("dynamic", steps)
    times = ", ".join(f"`{side}` {runs.largest_timed(side, steps) / stock:.1f}" for side in sides if side not in STOCK)
    return (
        f"Largest batch over that of the dynamic cache: {times} (goal {GOAL_BATCH}). The lower bound of a step: "
        f"{machine}; goal {GOAL_FLOOR}. {PROMPT} + {NEW} tokens a row, {runs.memory / 2**30:g} GiB, {torch_note()}."
    )


def measure(args: argparse.Namespace) -> Iterator[Section]:
    """The table; with `--side`, one measurement in this process."""
    if args.side:
        limit_memory(args.memory)
        print(json.dumps(measure_side(mistral(), args.side, args.batch, args.steps, args.seconds)))
        return
    machine = measure_machine()
    runs = Runs(args.results, args.memory, ["--seconds", str(args.seconds), "--threads", str(args.threads)])
    sides = tuple(args.sides)
    rows = collect(lines(runs, sides, machine, args.steps))
    yield Section("throughput", [Grid(COLUMNS, rows)], note(runs, sides, machine, steps=args.steps))


TABLE = Table(
    measure=measure,
    places={"throughput": ["docs/benchmarks.md"]},
    options=[
        Option("--memory", type=int, default=4 << 30, help="bytes of a process, without its libraries"),
        Option("--steps", type=int, default=STEPS, help="steps timed at each of three places"),
        Option("--seconds", type=float, default=60, help="no further step begins at a place after this time"),
        Option("--sides", nargs="+", default=[*STOCK, *POLICIES], help="dynamic, static, and policies"),
        Option("--results", type=Path, help="file of results, with which an interrupted run continues"),
        Option("--side", help="measure only this one, in this process, and print its result as JSON"),
        Option("--batch", type=int, default=1, help="rows of --side"),
        threads(),
    ],
)
