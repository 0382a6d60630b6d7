"""Many decoded tokens at a fixed budget.

Bytes must stay constant, the last 1,000 steps must be as fast as the first, and a compiled step must be compiled once.
The speed of a machine drifts over minutes, so a copy of the cache as it was after the prompt decodes 10 steps along
with every 100, and times are divided by those of this reference.
"""

from __future__ import annotations

import argparse
import copy
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import kvpolicy
from kvpolicy.hf.cache_names import cache_argument
from kvpolicy_eval.bench.timing import resident_memory
from kvpolicy_eval.common.table import Grid, Option, Section, Table, UsageError, collect, threads, without_equal

BLOCK = 1000
"""Steps of a block, whose times are summarized."""
PIECE = 100
"""Steps that are timed between two measurements of the reference."""
REFERENCE_STEPS = 10
LIMIT = 1.05
"""Largest ratio of the last block's time to the first block's that passes."""
POLICIES = ["streaming@512", "h2o@512", "snapkv+kivi:bits=4@512"]
COLUMNS = [
    "policy",
    "step",
    "tokens",
    "bytes, first and last",
    "step time, first 1,000",
    "step time, last 1,000",
    "last over first",
    "compiled",
    "process grew by",
    "verdict",
]

Step = Callable[[Tensor, Any], Tensor]


class Block(NamedTuple):
    """A block of steps.

    Attributes:
        nbytes: Bytes of the cache after the block.
        seconds: Median seconds of a step.
        over_reference: Step time over that of the reference, the median over pieces.
        memory: Bytes of the process.
    """

    nbytes: int
    seconds: float
    over_reference: float
    memory: int


class Run(NamedTuple):
    """All blocks of a policy.

    Attributes:
        policy: Spec of the policy.
        backend: Backend of `torch.compile`; empty for eager.
        blocks: The blocks.
        compiled: How often the step was compiled; 0 for eager.
    """

    policy: str
    backend: str
    blocks: list[Block]
    compiled: int

    @property
    def slowdown(self) -> float:
        """Time of the last block over the first, each over the reference."""
        return self.blocks[-1].over_reference / self.blocks[0].over_reference

    @property
    def passes(self) -> bool:
        """Whether bytes are constant, the last block is as fast as the first, and the step is compiled at most once."""
        constant = len({block.nbytes for block in self.blocks}) == 1
        return constant and self.slowdown <= LIMIT and self.compiled <= 1

    def line(self, size: int) -> list[str]:
        """A row of the table.

        Args:
            size: Steps of a block.
        """
        first = self.blocks[0]
        last = self.blocks[-1]
        return [
            f"`{self.policy}`",
            self.backend or "eager",
            f"{len(self.blocks) * size:,}",
            f"{first.nbytes:,} and {last.nbytes:,}",
            f"{1000 * first.seconds:.2f} ms",
            f"{1000 * last.seconds:.2f} ms",
            f"{self.slowdown:.3f}x",
            f"{self.compiled}x" if self.backend else "",
            f"{(last.memory - first.memory) / 2**20:.1f} MiB",
            "pass" if self.passes else "miss",
        ]


def run(policy: str, tokens: int, backend: str = "", block: int = BLOCK, prompt: int = 1024) -> Run:
    """Decode greedily with the embedded model.

    Args:
        policy: Spec of a policy with a fixed budget.
        tokens: Tokens to decode.
        backend: Backend of `torch.compile`; empty for eager.
        block: Steps of a block, a multiple of 100.
        prompt: Random tokens of the prompt.
    """
    model, _ = kvpolicy.tiny()
    ids = torch.randint(3, 700, (1, prompt), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), kvpolicy.attach(model, policy):
        counter = CompileCounterWithBackend(backend or "eager")
        called = torch.compile(model, backend=counter, fullgraph=True) if backend else model
        cache = kvpolicy.PolicyCache(model, new=tokens)
        token = model(ids, **cache_argument(model, cache), logits_to_keep=1).logits.argmax(-1)
        step = _compiled_step(called) if backend else _eager_step(called)
        reference_start = copy.deepcopy(cache)
        first_token = token
        _times(step, copy.deepcopy(reference_start), first_token, PIECE)  # compiles and warms up
        blocks: list[Block] = []
        for _ in range(tokens // block):
            seconds: list[float] = []
            ratios: list[float] = []
            reference = copy.deepcopy(reference_start)
            reference_token = first_token
            for _ in range(block // PIECE):
                reference_times, reference_token = _times(step, reference, reference_token, REFERENCE_STEPS)
                times, token = _times(step, cache, token, PIECE)
                seconds += times
                ratios.append(statistics.median(times) / statistics.median(reference_times))
            gc.collect()  # otherwise copies of the reference would count as growth of the process
            blocks.append(Block(cache.nbytes, statistics.median(seconds), statistics.median(ratios), resident_memory()))
    return Run(policy, backend, blocks, counter.frame_count if backend else 0)


def _eager_step(model: Any) -> Step:
    return lambda token, cache: model(token, **cache_argument(model, cache)).logits.argmax(-1)


def _compiled_step(model: Any) -> Step:
    def step(token: Tensor, cache: Any) -> Tensor:
        out = model(token, **cache_argument(model, cache)).logits.argmax(-1)
        cache.tick()
        return out

    return step


def _times(step: Step, cache: Any, token: Tensor, count: int) -> tuple[list[float], Tensor]:
    """Seconds of each of `count` steps, and the last token."""
    times: list[float] = []
    for _ in range(count):
        start = time.perf_counter()
        token = step(token, cache)
        times.append(time.perf_counter() - start)
    return times, token


def measure(args: argparse.Namespace) -> Iterator[Section]:
    """The table.

    Raises:
        UsageError: If there are too few tokens to compare their times.
    """
    if args.tokens < 2 * BLOCK:
        raise UsageError(
            f"--tokens must be at least {2 * BLOCK}, to compare the last {BLOCK} with the first, got {args.tokens}."
        )
    rows = collect(
        run(policy, args.tokens, backend).line(BLOCK) for backend in args.backend for policy in args.policies
    )
    grid, equal = without_equal(Grid(COLUMNS, rows))
    note = f"{equal}Prompt: 1,024 tokens; medians; torch {torch.__version__}, CPU, {args.threads} thread(s)."
    yield Section("longrun", [grid], note)


TABLE = Table(
    measure=measure,
    places={"longrun": ["docs/benchmarks.md"]},
    options=[
        Option("--policies", nargs="+", default=POLICIES, help="specs of policies"),
        Option("--tokens", type=int, default=100_000, help="tokens to decode"),
        Option("--backend", nargs="+", default=[""], help="backends of torch.compile, such as inductor; '' for eager"),
        threads(1),
    ],
    needs="the embedded model",
)
