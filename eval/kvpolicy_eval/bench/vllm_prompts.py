"""Long prompts that vLLM compresses, at equal memory.

64 clients ask at once, each with about 2,048 tokens of its own (records among source text, and a question about one of
them) and an answer of 128 tokens. The embedded model `tiny-4k` runs in fp32, on one thread. One side is stock vLLM; the
others compress each prompt to 50, 20 and 10 % of its tokens in the engine. Stock has blocks for 8 requests. What the
others hold beside their blocks is taken off their blocks: prompts that wait for blocks, the outputs of last tokens, and
answers that were preempted.

Expected before the measurement: requests in flight rise with what is dropped, to at least 3 times those of stock at
20 %, and tokens per second of the decode phase to at least 2 times, because more requests share a step and a step
attends to fewer tokens. Prefilling costs the same, and compressing comes on top; the columns beside say how much.

The decode phase is all steps that prefill nothing. Every side is a process of its own, which warms up with two
requests.
"""

# vLLM is no dependency of development: where it is missing, its names are unknown to a type checker.
# pyright: reportMissingImports=false

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from kvpolicy_eval.bench.vllm_documents import Workload
from kvpolicy_eval.bench.vllm_sides import (
    BLOCK,
    blocks_of,
    check_vllm,
    engine,
    measured_by,
    save_model,
    side_options,
    versions,
    work_folder,
    write_result,
)
from kvpolicy_eval.common.table import Grid, Option, Section, Table, collect
from kvpolicy_vllm.prompts import first_request, second_request
from kvpolicy_vllm.recipe import Recipe

PLACE = "vllm-prompts"
SIDES: dict[str, str | None] = {"stock": None, "50": "snapkv@0.5", "20": "snapkv@0.2", "10": "snapkv@0.1"}
"""The policies of the sides; None for vLLM without a connector."""

PREEMPTED = 2
"""Preempted answers for which memory is taken off the blocks."""

COLUMNS = (
    *("side", "kept", "blocks, MiB", "beside, MiB", "decode: in flight, mean (most)", "decode: tokens/s"),
    *("in all: tokens/s", "prefill, s", "of it compressing, s", "right"),
)


@dataclass(frozen=True)
class Size:
    """How large a measurement is.

    Attributes:
        clients: How many requests arrive at once.
        tokens: About how many tokens the prompt of each has.
        records: Records of a prompt.
        new: Tokens of an answer.
        held: Requests for which stock has blocks.
    """

    clients: int = 64
    tokens: int = 2048
    records: int = 32
    new: int = 128
    held: int = 8

    @property
    def work(self) -> Workload:
        """The texts, each with a question."""
        room = {"held": self.held, "room": self.held}
        return Workload(
            "prompts", documents=self.clients, tokens=self.tokens, records=self.records, questions=1, **room
        )


@dataclass(frozen=True)
class Run:
    """One repetition.

    Attributes:
        seconds: Until the last request has its answer.
        decoding: Seconds of the steps that prefill nothing.
        decoded: Tokens that these steps generate.
        mean: Requests in flight, the mean over these steps.
        most: Most requests in flight.
        compressing: Seconds in which prompts are gathered, compressed, saved and loaded.
        beside: Most bytes that are held beside the blocks.
        preempted: How often a request was preempted.
        generated: Tokens of the answers.
        right: Answers that begin with the value of their record.
    """

    seconds: float
    decoding: float
    decoded: int
    mean: float
    most: int
    compressing: float
    beside: int
    preempted: int
    generated: int
    right: int


@dataclass(frozen=True)
class Result:
    """Measurements of a side.

    Attributes:
        kept: Tokens of the longest prompt that a head keeps.
        pool: Blocks of the engine.
        nbytes: Bytes of a block.
        clients: How many requests there were.
        runs: The repetitions.
    """

    kept: int
    pool: int
    nbytes: int
    clients: int
    runs: tuple[Run, ...]

    @classmethod
    def of(cls, found: dict[str, Any]) -> Result:
        """A result from JSON."""
        fields: dict[str, Any] = found | {"runs": tuple(Run(**run) for run in found["runs"])}
        return cls(**fields)


def pool_of(size: Size, longest: int, recipe: Recipe | None, token_nbytes: int, output_nbytes: int) -> int:
    """Blocks of a side, one of which vLLM keeps for itself, so that all sides have the same memory.

    Args:
        size: How large the measurement is.
        longest: Tokens of the longest prompt.
        recipe: How a side compresses; None for stock.
        token_nbytes: Bytes of a token in all layers.
        output_nbytes: Bytes of the outputs of a last token in all layers.
    """
    pool = 1 + size.held * blocks_of(longest + size.new)
    if recipe is None:
        return pool
    waiting = (recipe.prefills + PREEMPTED) * recipe.kept(longest) * token_nbytes
    # While a prompt is prefilled, the queries of the selector's window are held: fewer than it keeps in the end.
    return pool - -(-(waiting + size.clients * output_nbytes) // (BLOCK * token_nbytes))


def cells(side: str, result: Result) -> list[str]:
    """The row of a side: medians of its repetitions."""

    def median(name: str) -> float:
        return statistics.median(getattr(run, name) for run in result.runs)

    def rate(tokens: str, seconds: str) -> str:
        found = [getattr(run, tokens) / getattr(run, seconds) for run in result.runs]
        return f"{statistics.median(found):,.0f} ({min(found):,.0f}-{max(found):,.0f})"

    prefill = statistics.median(run.seconds - run.decoding for run in result.runs)
    policy = SIDES[side]
    return [
        "stock" if policy is None else f"`{policy}`",
        f"{result.kept:,}",
        f"{result.pool * result.nbytes / 2**20:,.1f}",
        f"{max(run.beside for run in result.runs) / 2**20:,.1f}",
        f"{median('mean'):.1f} ({median('most'):.0f})",
        rate("decoded", "decoding"),
        rate("generated", "seconds"),
        f"{prefill:.1f}",
        f"{median('compressing'):.1f}",
        f"{median('right'):.0f}/{result.clients}",
    ]


def prepare(size: Size, folder: Path) -> None:
    """Save the model and the prompts."""
    _, tokenizer = save_model(folder)
    found: list[dict[str, Any]] = []
    for text, ((question, answer),) in size.work.draw():
        found.append({"ids": tokenizer(text + question).input_ids, "answer": answer})
    content = {"size": asdict(size), "prompts": found}
    (folder / "prompts.json").write_text(json.dumps(content), encoding="utf-8")


def measure_side(side: str, folder: Path, repeats: int) -> Result:
    """Measure a side in this process, which must have the variables of `vllm_sides.ENVIRONMENT`.

    Args:
        side: What to measure.
        folder: Where `prepare` has written.
        repeats: How often.
    """
    from transformers import AutoConfig
    from vllm.config import KVTransferConfig

    plan = json.loads((folder / "prompts.json").read_text(encoding="utf-8"))
    size = Size(**plan["size"])
    prompts = plan["prompts"]
    policy = SIDES[side]
    longest = max(len(each["ids"]) for each in prompts)
    config = AutoConfig.from_pretrained(folder / "model")
    heads = config.num_hidden_layers * config.head_dim * 4  # fp32
    token_nbytes = 2 * heads * config.num_key_value_heads
    output_nbytes = heads * config.num_attention_heads
    transfer = recipe = None
    if policy is not None:
        least = min(len(each["ids"]) for each in prompts)
        recipe = Recipe.parse(policy, threshold=least, least=0)
        transfer = KVTransferConfig(
            kv_connector="KVPolicyConnector",
            kv_connector_module_path="kvpolicy_vllm.connector",
            kv_role="kv_both",
            kv_connector_extra_config={"policy": policy, "threshold": least, "least": 0},
        )
    pool = pool_of(size, longest, recipe, token_nbytes, output_nbytes)
    llm = engine(folder, pool, longest + size.new, size.clients, transfer)
    watched = _Watched(llm, recipe, size.new)
    watched.run(prompts[:2])
    runs = tuple(watched.run(prompts) for _ in range(repeats))
    if watched.block_nbytes(config.num_hidden_layers) != BLOCK * token_nbytes:
        raise RuntimeError("blocks have other bytes than expected")
    kept = longest if recipe is None else recipe.kept(longest)
    return Result(kept, pool, BLOCK * token_nbytes, len(prompts), runs)


class _Watched:
    """An engine whose steps are watched.

    Args:
        llm: The `vllm.LLM`, whose engine is in this process.
        recipe: How it compresses prompts; None if it does not.
        new: Tokens of an answer.
    """

    def __init__(self, llm: Any, recipe: Recipe | None, new: int) -> None:
        """Look at what the scheduler schedules, and at what compressing takes."""
        self._engine = llm.llm_engine
        self._recipe = recipe
        self._new = new
        self._scheduler = self._engine.engine_core.engine_core.scheduler
        self._schedule = self._scheduler.schedule
        self._scheduler.schedule = self._noted
        self._scheduled: list[int] = []
        self._compressing = 0.0
        self._compressor: Any = None
        if recipe is not None:
            from vllm.distributed.kv_transfer import get_kv_transfer_group

            connector = get_kv_transfer_group()
            self._compressor = connector._compressor
            for owner, names in ((self._compressor, ("_gather", "save")), (connector._loader, ("load",))):
                for name in names:
                    setattr(owner, name, self._timed(getattr(owner, name)))

    def block_nbytes(self, layers: int) -> int:
        """Bytes of a block in all layers."""
        (group,) = self._scheduler.kv_cache_config.kv_cache_groups
        return layers * group.kv_cache_spec.page_size_bytes

    def _noted(self, *args: Any, **kwargs: Any) -> Any:
        found = self._schedule(*args, **kwargs)
        self._scheduled = [*found.num_scheduled_tokens.values()]
        return found

    def _timed(self, original: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                self._compressing += time.perf_counter() - begin

        return run

    def run(self, prompts: Sequence[dict[str, Any]]) -> Run:
        """Answer prompts that arrive at once, without what the prefix cache had."""
        if not self._engine.reset_prefix_cache():
            raise RuntimeError("the prefix cache is in use")
        self._compressing = 0.0
        if self._compressor is not None:
            self._compressor.peak = 0
        outputs: dict[int, Any] = {}
        known: list[Any] = []
        steps: list[tuple[float, int]] = []
        flights: list[int] = []
        begin = time.perf_counter()
        for number, each in enumerate(prompts):
            self._add(number, each["ids"], known, is_first=self._recipe is not None)
        while self._engine.has_unfinished_requests():
            start = time.perf_counter()
            found = self._engine.step()
            seconds = time.perf_counter() - start
            flights.append(len(self._scheduled))
            if self._scheduled and max(self._scheduled) == 1:
                steps.append((seconds, len(self._scheduled)))
            for output in found:
                kind, _, number = output.request_id.partition("-")
                if kind == "answer":
                    outputs[int(number)] = output.outputs[0]
                elif output.finished:
                    self._add(int(number), prompts[int(number)]["ids"], known, is_first=False)
        generated = sum(len(output.token_ids) for output in outputs.values())
        if generated != len(prompts) * self._new:
            raise RuntimeError(f"not every request was answered: {generated} tokens of {len(prompts)} requests")
        return Run(
            seconds=time.perf_counter() - begin,
            decoding=sum(seconds for seconds, _ in steps),
            decoded=sum(tokens for _, tokens in steps),
            mean=statistics.mean(tokens for _, tokens in steps),
            most=max(flights),
            compressing=self._compressing,
            beside=0 if self._compressor is None else self._compressor.peak,
            preempted=sum(request.num_preemptions for request in known),
            generated=generated,
            right=sum(outputs[number].text.startswith(each["answer"]) for number, each in enumerate(prompts)),
        )

    def _add(self, number: int, ids: list[int], known: list[Any], *, is_first: bool) -> None:
        """Add the request of a prompt, or the first or second one of a prompt that is compressed."""
        from vllm import SamplingParams

        text: dict[str, Any] = {"prompt_token_ids": ids}
        extra = None
        if self._recipe is not None:
            kept = self._recipe.kept(len(ids))
            name = f"n{number}"
            text, params = first_request(ids, name) if is_first else second_request(ids, kept, name)
            extra = {"kv_transfer_params": params}
        new = 1 if is_first else self._new
        params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, extra_args=extra)
        kind = "first" if is_first else "answer"
        before = {*self._scheduler.requests}
        self._engine.add_request(f"{kind}-{number}", text, params)
        known += [request for key, request in self._scheduler.requests.items() if key not in before]


def lines(size: Size, sides: Sequence[str], folder: Path, repeats: int) -> Iterator[list[str]]:
    """The rows of the table, each measured when it is asked for."""
    prepare(size, folder)
    for side in sides:
        yield cells(side, Result.of(measured_by("vllm_prompts", [side], folder, repeats)))


def note(size: Size, repeats: int) -> str:
    """Sizes of the measurement, and the versions."""
    return (
        f"{size.clients} requests at once, prompts of about {size.tokens:,} tokens with {size.records} records, "
        f"{versions(size.new, repeats)}"
    )


def measure(args: argparse.Namespace) -> Iterator[Section]:
    """The table; with `--measure`, one side in this process."""
    check_vllm()
    torch.set_num_threads(1)
    if args.measure:
        side, out = args.measure
        write_result(measure_side(side, args.folder, args.repeats), out)
        return
    print((__doc__ or "").partition("\n\n")[2], file=sys.stderr, flush=True)
    size = Size(**{name: getattr(args, name) for name in asdict(Size())})
    with work_folder(args.folder) as folder:
        rows = collect(lines(size, args.sides, folder, args.repeats))
    yield Section(PLACE, [Grid(COLUMNS, rows)], note(size, args.repeats))


TABLE = Table(
    measure=measure,
    places={PLACE: ["docs/benchmarks.md"]},
    options=[
        *side_options([*SIDES]),
        Option("--measure", nargs=2, metavar=("SIDE", "OUT"), help=argparse.SUPPRESS),
        *(
            Option(f"--{name}", type=int, default=default, help=f"{name} of the measurement: {default}")
            for name, default in asdict(Size()).items()
        ),
    ],
    needs="vLLM",
)
