"""`python -m kvpolicy_eval.bench.longrun`: many decoded tokens at a fixed budget.

Bytes must be the same to the last step, the last 1,000 steps as fast as the first, and a compiled step compiled once.
A machine's speed drifts over minutes, so a copy of the cache as it was after the prompt takes 10 steps beside every
100, and the times are ratios to those.
"""

from __future__ import annotations

import argparse
import copy
import gc
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import kvpolicy
from kvpolicy_eval.bench.common import resident_memory
from kvpolicy_eval.markdown import fill, table

BLOCK, PIECE, BESIDE, SLOWER = 1000, 100, 10, 1.05
POLICIES = ["streaming@512", "h2o@512", "snapkv+kivi:bits=4@512"]
HEAD = [
    "policy", "step", "tokens", "bytes, first and last", "step time, first 1,000", "step time, last 1,000",
    "last over first", "compiled", "process grew by", "",
]  # fmt: skip

Step = Callable[[Tensor, Any], Tensor]


class Block(NamedTuple):
    """A thousand steps.

    Attributes:
        nbytes: The cache's bytes at their end.
        seconds: The median step's.
        over_young: The same over the young copy's, the median over pieces that are neighbours in time.
        memory: Bytes of the process.
    """

    nbytes: int
    seconds: float
    over_young: float
    memory: int


class Run(NamedTuple):
    """All blocks of a policy, and how often the step was compiled (0 where it was not)."""

    policy: str
    backend: str
    blocks: list[Block]
    compiled: int

    @property
    def slower(self) -> float:
        """The last thousand steps over the first, each over the young copy beside it."""
        return self.blocks[-1].over_young / self.blocks[0].over_young

    @property
    def passes(self) -> bool:
        """Whether bytes are constant, the end is as fast as the beginning, and nothing was compiled again."""
        constant = len({block.nbytes for block in self.blocks}) == 1
        return constant and self.slower <= SLOWER and self.compiled <= 1

    def line(self, size: int) -> list[str]:
        """A line of the table."""
        first, last = self.blocks[0], self.blocks[-1]
        grew = (last.memory - first.memory) / 2**20
        return [
            f"`{self.policy}`", self.backend or "eager", f"{len(self.blocks) * size:,}",
            f"{first.nbytes:,} and {last.nbytes:,}", f"{1000 * first.seconds:.2f} ms", f"{1000 * last.seconds:.2f} ms",
            f"{self.slower:.3f}x", f"{self.compiled}x" if self.backend else "", f"{grew:.1f} MiB",
            "pass" if self.passes else "miss",
        ]  # fmt: skip


def run(policy: str, tokens: int, backend: str = "", block: int = BLOCK, prompt: int = 1024) -> Run:
    """Decode greedily with the embedded model.

    Args:
        policy: Words of a policy with a fixed budget.
        tokens: How many to decode.
        backend: Of `torch.compile`; empty for none.
        block: Steps that are timed together, a multiple of 100.
        prompt: Tokens of the prompt, random ones.
    """
    model, _ = kvpolicy.tiny()
    ids = torch.randint(3, 700, (1, prompt), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), kvpolicy.attach(model, policy):
        counter = CompileCounterWithBackend(backend or "eager")
        called = torch.compile(model, backend=counter, fullgraph=True) if backend else model
        cache = kvpolicy.PolicyCache(model, new=tokens)
        token = model(ids, past_key_values=cache, logits_to_keep=1).logits.argmax(-1)
        step = _compiled_step(called) if backend else _eager_step(called)
        young, start = copy.deepcopy(cache), token
        _times(step, copy.deepcopy(young), start, PIECE)  # compiles, and warms up
        blocks: list[Block] = []
        for _ in range(tokens // block):
            own, ratios, other, at = list[float](), list[float](), copy.deepcopy(young), start
            for _ in range(block // PIECE):
                beside, at = _times(step, other, at, BESIDE)
                times, token = _times(step, cache, token, PIECE)
                own += times
                ratios.append(statistics.median(times) / statistics.median(beside))
            gc.collect()  # copies of the young cache, or they would count as the process' growth
            seconds, over = statistics.median(own), statistics.median(ratios)
            blocks.append(Block(cache.nbytes, seconds, over, resident_memory()))
    return Run(policy, backend, blocks, counter.frame_count if backend else 0)


def _eager_step(model: Any) -> Step:
    return lambda token, cache: model(token, past_key_values=cache).logits.argmax(-1)


def _compiled_step(model: Any) -> Step:
    def step(token: Tensor, cache: Any) -> Tensor:
        out = model(token, past_key_values=cache).logits.argmax(-1)
        cache.tick()
        return out

    return step


def _times(step: Step, cache: Any, token: Tensor, count: int) -> tuple[list[float], Tensor]:
    times: list[float] = []
    for _ in range(count):
        start = time.perf_counter()
        token = step(token, cache)
        times.append(time.perf_counter() - start)
    return times, token


def main() -> None:
    """Run every policy, print the table, and fill a page with it where asked."""
    parser = argparse.ArgumentParser(prog="python -m kvpolicy_eval.bench.longrun", description=__doc__)
    parser.add_argument("--policies", nargs="+", default=POLICIES)
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--backend", nargs="+", default=[""], help="of torch.compile, such as inductor; '' for eager")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--fill", type=Path, help="a page with a place for the table 'longrun'")
    args = parser.parse_args()
    if args.tokens < 2 * BLOCK:
        parser.error(
            f"--tokens is {args.tokens}: give at least {2 * BLOCK}, to compare the last {BLOCK} with the first"
        )
    torch.set_num_threads(args.threads)
    lines: list[list[str]] = []
    for backend in args.backend:
        for policy in args.policies:
            lines.append(run(policy, args.tokens, backend).line(BLOCK))
            print(" | ".join(lines[-1]), flush=True)
    text = table(HEAD, lines)
    text += (
        f"\n\nThe embedded model, prompt of 1,024 tokens, torch {torch.__version__}, CPU, {args.threads} thread(s). "
        f"Times are medians; the ratio is of times over those of a young cache beside them. Passes at {SLOWER}x or "
        "less, with constant bytes, compiled at most once."
    )
    print("\n" + text)
    if args.fill:
        fill(args.fill, "longrun", text)


if __name__ == "__main__":
    main()
