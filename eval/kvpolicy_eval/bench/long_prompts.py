"""Long prompts in one piece, in tiles, and in chunks.

Three tables: recall by the embedded model `tiny-4k` with the question at the end of the prompt; the time of a prefill
in tiles over one piece; and the peak of memory of a prefill, planned and measured in a process of its own.
"""

from __future__ import annotations

import argparse
import functools
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from random import Random
from typing import Any, NamedTuple

import torch

import kvpolicy
from kvpolicy.text.errors import KVPolicyWarning
from kvpolicy.text.tables import format_bytes
from kvpolicy_eval.bench.models import llama, tokens
from kvpolicy_eval.bench.timing import compare
from kvpolicy_eval.common.table import Grid, Option, Section, Table, collect, rounds
from kvpolicy_eval.data.tasks import tasks
from kvpolicy_lm_eval.data import prompts

POLICIES = (
    "snapkv@0.2",
    "snapkv+tokenwise@0.2",
    "uniform/adakv+snapkv+tokenwise@0.2",
    "squeeze+kvcrush/snapkv@0.2",
    "h2o@0.2",
    "keydiff@0.2",
    "uniform/adakv+kvzip+tokenwise:bits=4@0.2",
    "tokenwise",
)
RECORDS = 250
"""Records of the shorter prompts, which have 1,754 tokens."""

PEAK_TOKENS = 16384
TIME_TOKENS = 8192
TILE = 1024


class Way(NamedTuple):
    """How a prompt is read.

    Attributes:
        name: The head of its column.
        attach: Arguments of `kvpolicy.attach`.
        chunk: Tokens of a forward, or None for all.
    """

    name: str
    attach: dict[str, Any]
    chunk: int | None = None


WAYS = (
    Way("one piece", {}),
    Way("tiles of 256", {"tile": 256}),
    Way("chunks of 512, held", {"chunks": "hold"}, 512),
    Way("chunks of 512, selecting", {}, 512),
    Way("chunks of 128, selecting", {}, 128),
)

ANSWER_COLUMNS = ["tokens", "policy", *(way.name for way in WAYS)]
TIME_COLUMNS = ["policy", "one piece", f"tiles of {TILE:,} over it"]
PEAK_COLUMNS = ["policy", "prompt", "planned", "measured", "measured over planned"]
PARTS = ["answers", "times", "peaks"]


def recall_prompts(length: int, docs: int) -> list[prompts.Prompt]:
    """Prompts with their question at the end: of 1,754 tokens, or of the tasks of another length."""
    if length == RECORDS * 7 + 4:
        return [prompts.recall(Random(doc), RECORDS) for doc in range(docs)]
    draw = tasks(length)["recall"]
    return [draw(Random(1_000 * length + doc)) for doc in range(docs)]


def right(model: Any, tokenizer: Any, policy: str, way: Way, asked: list[prompts.Prompt]) -> int:
    """How many prompts are answered."""
    found = 0
    more = {} if way.chunk is None else {"prefill_chunk_size": way.chunk}
    with kvpolicy.attach(model, policy, **way.attach), torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore", KVPolicyWarning)
        for text, answer in asked:
            ids = tokenizer(text, return_tensors="pt").input_ids
            out = model.generate(ids, max_new_tokens=len(answer) + 1, do_sample=False, **more)
            found += tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True).strip().startswith(answer)
    return found


def answers(docs: dict[int, int]) -> Iterator[list[str]]:
    """Rows of the table of answers.

    Args:
        docs: How many prompts, by their length in tokens.
    """
    model, tokenizer = kvpolicy.tiny(name="tiny-4k")
    for length, number in docs.items():
        asked = recall_prompts(length, number)
        for policy in POLICIES:
            found = [right(model, tokenizer, policy, way, asked) for way in WAYS]
            yield [f"{length:,}", f"`{policy}`", *(f"{hits} of {number}" for hits in found)]


def times(rounds: int) -> Iterator[list[str]]:
    """Rows of the table of times: a prefill in tiles over one in one piece."""
    model = llama(4)
    ids = tokens(TIME_TOKENS)
    for policy in ("window@0.2", "snapkv@0.2", "h2o@0.2", "snapkv+tokenwise@0.2"):
        whole, tiled = (functools.partial(_prefill, model, policy, ids, tile) for tile in (None, TILE))
        ratio = compare(whole, tiled, rounds)
        yield [f"`{policy}`", f"{ratio.base:.2f} s", f"{ratio.median:.2f} ({ratio.low:.2f}-{ratio.high:.2f})"]


def _prefill(model: Any, policy: str, ids: torch.Tensor, tile: int | None) -> None:
    with kvpolicy.attach(model, policy, tile=tile), torch.inference_mode():
        model(ids, use_cache=True, logits_to_keep=1)


def peaks() -> Iterator[list[str]]:
    """Rows of the table of peaks, planned and measured."""
    for policy in ("snapkv@0.2", "snapkv+tokenwise@0.2", "h2o@0.2", "squeeze+snapkv@0.2"):
        for tile in (None, TILE):
            command = [sys.executable, "-m", "kvpolicy_eval.bench", "long_prompts", "--peak-of", policy, str(tile or 0)]
            # Freed tensors go back to the system, and do not count as used.
            env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=env)
            measured, planned = map(int, done.stdout.split())
            way = f"tiles of {tile:,}" if tile else "one piece"
            yield [f"`{policy}`", way, *map(format_bytes, (planned, measured)), f"{measured / planned:.2f}"]


def _print_peak(policy: str, tile: int) -> None:
    """Print the bytes that a prefill adds to this process at most, and those that a plan says, without weights."""
    model = llama(8, hidden=1024, heads=16)
    ids = tokens(PEAK_TOKENS)
    _prefill(model, policy, ids[:, :512], 256 if tile else None)  # what the libraries allocate once
    before = _status("VmRSS")
    _prefill(model, policy, ids, tile or None)
    plan = kvpolicy.plan(model, policy, prompt=PEAK_TOKENS, new=1, tile=tile or None)
    print(_status("VmHWM") - before, plan.prefill_nbytes)


def _status(name: str) -> int:
    """A size of this process in bytes, as Linux says it."""
    with open("/proc/self/status", encoding="ascii") as file:
        (line,) = (line for line in file if line.startswith(f"{name}:"))
    return 1024 * int(line.split()[1])


def measure(args: argparse.Namespace) -> Iterator[Section]:
    """The tables that are asked for; with `--peak-of`, the peak of this process."""
    torch.set_num_threads(1)
    if args.peak_of:
        _print_peak(args.peak_of[0], int(args.peak_of[1]))
        return
    if "answers" in args.only:
        rows = collect(answers({RECORDS * 7 + 4: args.n, 4096: args.n}))
        yield Section("long-prompts", [Grid(ANSWER_COLUMNS, rows)])
    if "times" in args.only:
        yield Section("long-prompts-times", [Grid(TIME_COLUMNS, collect(times(args.rounds)))])
    if "peaks" in args.only:
        yield Section("long-prompts-peaks", [Grid(PEAK_COLUMNS, collect(peaks()))])


TABLE = Table(
    measure=measure,
    places={
        "long-prompts": ["docs/guide/small-card.md"],
        "long-prompts-times": ["docs/benchmarks.md"],
        "long-prompts-peaks": ["docs/benchmarks.md"],
    },
    options=[
        Option("--n", type=int, default=6, help="prompts of each length"),
        rounds(5),
        Option("--only", nargs="+", choices=PARTS, default=PARTS, help="tables to make"),
        Option("--peak-of", nargs=2, metavar=("POLICY", "TILE"), help=argparse.SUPPRESS),
    ],
    needs="the embedded model",
)
