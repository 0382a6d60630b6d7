"""Documents in vLLM, at equal memory for the cache.

SqueezeAttention's Table 3 in a real engine: what a cache does not hold leaves room for more requests. The embedded
model `tiny-4k` answers questions about records among source text, in fp32, on one thread. All requests arrive at once.
One side is vLLM with its prefix cache, which computes the documents; the others load documents that were saved at 100,
50, 20 and 10 % of their tokens. All of them have the same number of blocks:

- one document: 64 questions about it, and blocks for the document and for what 16 requests have for themselves;
- many documents: 16 documents with 4 questions each, in turns, and blocks for 5 documents with a request each.

Expected before the measurement: blocks of documents fall with the budget, and tokens per second rise where blocks were
short, because more requests share a step. Of many documents, those that vLLM evicts are computed again, so that it
gains most there; what loads whole documents again gains less. Little changes where blocks were not short: the rows with
blocks for everything show it, and what is left there is that a step attends to fewer tokens. Answers fall with the
budget.

Every side is a process of its own, which warms up with a request about each document. The prefix cache is cleared
before every repetition, so that reading the files and writing them to blocks is measured; making them is not.
"""

# vLLM is no dependency of development: where it is missing, its names are unknown to a type checker.
# pyright: reportMissingImports=false

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch

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
from kvpolicy_eval.common.conversation import run
from kvpolicy_eval.common.table import Grid, Option, Section, Table, collect
from kvpolicy_lm_eval.data import prompts
from kvpolicy_vllm import prompt, read_document

RECORD = re.compile(r"^(\w+)=(\d{4})$", re.MULTILINE)
TOKENS_OF_RECORD = 7
CHARS_OF_TOKEN = 2
"""Characters of source text that take a token."""
COLUMNS = (
    "side",
    "documents, MiB",
    "blocks, MiB",
    "in flight, mean (most)",
    "steps",
    "tokens/s",
    "first token, s",
    "right",
)


@dataclass(frozen=True)
class Side:
    """A measurement in a process.

    Attributes:
        name: Its name.
        policy: The policy of its documents; None for vLLM without a connector.
        ample: Whether there are blocks for everything.
    """

    name: str
    policy: str | None
    ample: bool = False

    @property
    def label(self) -> str:
        """The first cell of its row."""
        what = "prefix cache" if self.policy is None else f"`{self.policy}`"
        return f"{what}, blocks for all" if self.ample else what


SIDES = {
    side.name: side
    for side in (
        Side("stock", None),
        Side("100", "full"),
        Side("50", "kvzip:decode=grow@0.5"),
        Side("20", "kvzip:decode=grow@0.2"),
        Side("10", "kvzip:decode=grow@0.1"),
        Side("stock-ample", None, ample=True),
        Side("100-ample", "full", ample=True),
        Side("20-ample", "kvzip:decode=grow@0.2", ample=True),
    )
}


@dataclass(frozen=True)
class Workload:
    """Documents and the requests about them.

    Attributes:
        name: Its name.
        documents: How many documents.
        tokens: About how many tokens each of them has.
        records: Records of a document, between which there is source text.
        questions: Requests about a document, each about another record.
        held: Documents that the blocks hold as they are.
        room: Requests whose own tokens the blocks hold beside.
        new: Tokens of an answer.
    """

    name: str
    documents: int
    tokens: int
    records: int
    questions: int
    held: int
    room: int
    new: int = 64

    @property
    def clients(self) -> int:
        """How many requests there are."""
        return self.documents * self.questions

    def draw(self) -> list[tuple[str, list[tuple[str, str]]]]:
        """The documents, and for each the questions with their answers."""
        chars = (self.tokens - TOKENS_OF_RECORD * self.records) * CHARS_OF_TOKEN
        found: list[tuple[str, list[tuple[str, str]]]] = []
        for number in range(self.documents):
            rng = Random(f"{self.name} {number}")
            text, _ = prompts.split(prompts.recall(rng, self.records, chars=chars)[0])
            asked = rng.sample(RECORD.findall(text), self.questions)
            found.append((text, [(f"?{key}=", value) for key, value in asked]))
        return found

    def pool(self, document: int, question: int, *, ample: bool) -> int:
        """Blocks of the engine, one of which vLLM keeps for itself.

        Args:
            document: Tokens of the longest document.
            question: Tokens of the longest question.
            ample: Whether they hold everything, however many tokens of a document are left over by its whole blocks.
        """
        if ample:
            return 1 + self.documents * blocks_of(document) + self.clients * blocks_of(BLOCK + question + self.new)
        return 1 + self.held * (document // BLOCK) + self.room * own_blocks(document, question, self.new)


WORKLOADS = {
    work.name: work
    for work in (
        Workload("one", documents=1, tokens=3500, records=64, questions=64, held=1, room=16),
        Workload("many", documents=16, tokens=2000, records=32, questions=4, held=5, room=5),
    )
}
PLACES = {"one": "vllm-documents", "many": "vllm-many-documents"}


@dataclass(frozen=True)
class Run:
    """One repetition.

    Attributes:
        seconds: Until the last request has its answer.
        first: Seconds until a request has its first token, the median.
        mean: Requests in flight, the mean over the steps.
        most: Most requests in flight.
        preempted: How often a request was preempted.
        steps: Steps of the engine.
        computed: Tokens that went through the model.
        generated: Tokens of the answers.
        right: Answers that begin with the value of their record.
    """

    seconds: float
    first: float
    mean: float
    most: int
    preempted: int
    steps: int
    computed: int
    generated: int
    right: int

    @property
    def rate(self) -> float:
        """Generated tokens per second."""
        return self.generated / self.seconds


@dataclass(frozen=True)
class Result:
    """Measurements of a side.

    Attributes:
        blocks: Blocks of all documents as they are asked.
        pool: Blocks of the engine.
        nbytes: Bytes of a block.
        clients: Number of requests.
        runs: The repetitions.
    """

    blocks: int
    pool: int
    nbytes: int
    clients: int
    runs: tuple[Run, ...]

    @classmethod
    def of(cls, found: dict[str, Any]) -> Result:
        """A result from JSON."""
        fields: dict[str, Any] = found | {"runs": tuple(Run(**run) for run in found["runs"])}
        return cls(**fields)


def own_blocks(document: int, question: int, new: int) -> int:
    """Blocks that a request cannot share: behind the whole blocks of its document. The last token is not held.

    >>> own_blocks(3500, 3, 64)
    3
    """
    return blocks_of(document + question + new - 1) - document // BLOCK


def cells(side: Side, result: Result) -> list[str]:
    """The row of a side: medians of its repetitions, and the lowest and highest tokens per second."""

    def median(name: str) -> float:
        return statistics.median(getattr(run, name) for run in result.runs)

    rates = [run.rate for run in result.runs]
    return [
        side.label,
        *(f"{blocks * result.nbytes / 2**20:,.1f}" for blocks in (result.blocks, result.pool)),
        f"{median('mean'):.1f} ({median('most'):.0f})",
        f"{median('steps'):,.0f}",
        f"{median('rate'):,.0f} ({min(rates):,.0f}-{max(rates):,.0f})",
        f"{median('first'):.2f}",
        f"{median('right'):.0f}/{result.clients}",
    ]


def prepare(work: Workload, sides: Sequence[Side], folder: Path) -> None:
    """Save the model, the documents of all sides, and the requests.

    Args:
        work: The documents and requests.
        sides: What will be measured.
        folder: Where the files go.
    """
    model, tokenizer = save_model(folder)
    texts: list[list[int]] = []
    asked: list[dict[str, Any]] = []
    for number, (text, questions) in enumerate(work.draw()):
        ids = tokenizer(text, return_tensors="pt").input_ids
        texts.append(ids[0].tolist())
        for question, answer in questions:
            tokens = tokenizer(question, add_special_tokens=False).input_ids
            asked.append({"document": number, "question": tokens, "answer": answer})
        for policy in dict.fromkeys(side.policy for side in sides):
            if policy is not None:
                run(model, policy, [ids]).cache.save(document_path(folder, work, policy, number), tokens=ids)
    # In turns, as requests of many users are: no two about the same document follow each other.
    turns = [asked[at + each * work.questions] for at in range(work.questions) for each in range(work.documents)]
    content = {"work": asdict(work), "texts": texts, "requests": turns}
    (folder / f"{work.name}.json").write_text(json.dumps(content), encoding="utf-8")


def document_path(folder: Path, work: Workload, policy: str, number: int) -> Path:
    """Where a document is."""
    return folder / f"{work.name}-{re.sub('[^a-z0-9]+', '-', policy)}-{number}.safetensors"


def measure_side(side: Side, name: str, folder: Path, repeats: int) -> Result:
    """Measure a side in this process, which must have the variables of `vllm_sides.ENVIRONMENT`.

    Args:
        side: What to measure.
        name: Of the workload.
        folder: Where `prepare` has written.
        repeats: How often.
    """
    from vllm.config import KVTransferConfig

    plan = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    work = Workload(**plan["work"])
    longest = max(map(len, plan["texts"]))
    question = max(len(asked["question"]) for asked in plan["requests"])
    pool = work.pool(longest, question, ample=side.ample)
    transfer = None
    if side.policy is not None:
        transfer = KVTransferConfig(
            kv_connector="KVPolicyConnector", kv_connector_module_path="kvpolicy_vllm.connector", kv_role="kv_both"
        )
    llm = engine(folder, pool, longest + question + work.new, work.clients, transfer)
    if side.policy is None:
        requests = _plain(plan)
        held = [len(text) for text in plan["texts"]]
    else:
        paths = [str(document_path(folder, work, side.policy, number)) for number in range(work.documents)]
        requests, held = _loaded(plan, paths, llm)
    watched = _Watched(llm, work.new)
    watched.run(requests[: work.documents], plan["requests"][: work.documents])
    runs = tuple(watched.run(requests, plan["requests"]) for _ in range(repeats))
    spec = watched.spec
    if spec.block_size != BLOCK:
        raise RuntimeError(f"blocks have {spec.block_size} tokens instead of {BLOCK}")
    layers = llm.llm_engine.vllm_config.model_config.hf_config.num_hidden_layers
    return Result(sum(map(blocks_of, held)), pool, layers * spec.page_size_bytes, work.clients, runs)


def _plain(plan: dict[str, Any]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Prompts that are computed, and nothing about documents."""
    texts = plan["texts"]
    return [({"prompt_token_ids": [*texts[each["document"]], *each["question"]]}, {}) for each in plan["requests"]]


def _loaded(
    plan: dict[str, Any], paths: Sequence[str], llm: Any
) -> tuple[list[tuple[dict[str, Any], dict[str, Any]]], list[int]]:
    """Prompts that begin with a document, their parameters, and the tokens that each document holds."""
    found: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for each in plan["requests"]:
        text, params = prompt(paths[int(each["document"])], each["question"], llm)
        found.append((text, {"kv_transfer_params": params}))
    return found, [read_document(path).kept for path in paths]


class _Watched:
    """An engine whose steps are watched.

    Args:
        llm: The `vllm.LLM`, whose engine is in this process.
        new: Tokens of an answer.
    """

    def __init__(self, llm: Any, new: int) -> None:
        """Look at what the scheduler schedules."""
        self._engine = llm.llm_engine
        self._new = new
        self._scheduler = self._engine.engine_core.engine_core.scheduler
        self._schedule = self._scheduler.schedule
        self._scheduler.schedule = self._counted
        self._flights: list[int] = []
        self._computed = 0

    @property
    def spec(self) -> Any:
        """Bytes of a layer in a block."""
        (group,) = self._scheduler.kv_cache_config.kv_cache_groups
        return group.kv_cache_spec

    def _counted(self, *args: Any, **kwargs: Any) -> Any:
        found = self._schedule(*args, **kwargs)
        self._flights.append(len(self._scheduler.running))
        self._computed += found.total_num_scheduled_tokens
        return found

    def run(self, requests: Sequence[tuple[dict[str, Any], dict[str, Any]]], asked: Sequence[dict[str, Any]]) -> Run:
        """Answer requests that arrive at once, without what the prefix cache had."""
        from vllm import SamplingParams

        if not self._engine.reset_prefix_cache():
            raise RuntimeError("the prefix cache is in use")
        self._flights = []
        self._computed = 0
        outputs: dict[str, Any] = {}
        first: dict[str, float] = {}
        begin = time.perf_counter()
        for number, (text, extra) in enumerate(requests):
            params = SamplingParams(temperature=0, max_tokens=self._new, ignore_eos=True, extra_args=extra or None)
            self._engine.add_request(str(number), text, params)
        known = [*self._scheduler.requests.values()]
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                if output.outputs[0].token_ids:
                    first.setdefault(output.request_id, time.perf_counter() - begin)
                outputs[output.request_id] = output.outputs[0]
        seconds = time.perf_counter() - begin
        generated = sum(len(output.token_ids) for output in outputs.values())
        if generated != len(requests) * self._new:
            raise RuntimeError(f"not every request was answered: {generated} tokens of {len(requests)} requests")
        right = sum(outputs[str(number)].text.startswith(each["answer"]) for number, each in enumerate(asked))
        return Run(
            seconds=seconds,
            first=statistics.median(first.values()),
            mean=statistics.mean(self._flights),
            most=max(self._flights),
            preempted=sum(request.num_preemptions for request in known),
            steps=len(self._flights),
            computed=self._computed,
            generated=generated,
            right=right,
        )


def apart(side: Side, name: str, folder: Path, repeats: int) -> Result:
    """Measure a side in a process of its own; see `measure`."""
    return Result.of(measured_by("vllm_documents", [side.name, name], folder, repeats))


def lines(work: Workload, sides: Sequence[Side], folder: Path, repeats: int) -> Iterator[list[str]]:
    """The rows of a table, each measured when it is asked for."""
    prepare(work, sides, folder)
    for side in sides:
        yield cells(side, apart(side, work.name, folder, repeats))


def note(work: Workload, repeats: int) -> str:
    """Sizes of the measurement, and the versions."""
    number = "A document" if work.documents == 1 else f"{work.documents} documents"
    return (
        f"{number} of about {work.tokens:,} tokens with {work.records} records, {work.clients} requests at once, "
        f"{versions(work.new, repeats)}"
    )


def measure(args: argparse.Namespace) -> Iterator[Section]:
    """The tables that are asked for; with `--measure`, one side in this process."""
    check_vllm()
    torch.set_num_threads(1)
    if args.measure:
        side, name, out = args.measure
        write_result(measure_side(SIDES[side], name, args.folder, args.repeats), out)
        return
    print((__doc__ or "").partition("\n\n")[2], file=sys.stderr, flush=True)
    for name in args.only:
        with work_folder(args.folder) as folder:
            rows = collect(lines(WORKLOADS[name], [SIDES[side] for side in args.sides], folder, args.repeats))
        yield Section(PLACES[name], [Grid(COLUMNS, rows)], note(WORKLOADS[name], args.repeats))


TABLE = Table(
    measure=measure,
    places={place: ["docs/benchmarks.md"] for place in PLACES.values()},
    options=[
        Option("--only", nargs="+", choices=[*WORKLOADS], default=[*WORKLOADS], help="tables to make"),
        *side_options([*SIDES]),
        Option("--measure", nargs=3, metavar=("SIDE", "WORKLOAD", "OUT"), help=argparse.SUPPRESS),
    ],
    needs="vLLM",
)
