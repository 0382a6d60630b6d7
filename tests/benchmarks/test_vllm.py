"""Documents and compressed prompts in vLLM: how memory is divided, what is asked, and small runs of the engine."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import kvpolicy
from kvpolicy_eval.bench import vllm_documents, vllm_prompts, vllm_sides
from kvpolicy_eval.bench.__main__ import main
from kvpolicy_eval.bench.vllm_documents import SIDES, WORKLOADS, Workload, blocks_of, own_blocks
from kvpolicy_eval.bench.vllm_prompts import PREEMPTED, Size
from kvpolicy_eval.bench.vllm_sides import BLOCK, MODEL, measured_by
from kvpolicy_vllm import read_document
from kvpolicy_vllm.recipe import Recipe

SMALL = Workload("small", documents=2, tokens=300, records=8, questions=2, held=1, room=1, new=6)
SHORT = Size(clients=6, tokens=400, records=6, new=6, held=3)


def test_sides_are_named_and_written_in_the_shortest_words() -> None:
    assert [side.name for side in SIDES.values()] == [*SIDES]
    assert len({side.label for side in SIDES.values()}) == len(SIDES)
    assert {SIDES[name].policy is None for name in ("stock", "stock-ample")} == {True}
    compressed = {*vllm_prompts.SIDES.values()} - {None}
    policies = {side.policy for side in SIDES.values()} - {None} | compressed
    assert policies == {str(kvpolicy.Policy.parse(str(policy))) for policy in policies}
    assert all(Recipe.parse(str(policy)) for policy in compressed)


@pytest.mark.parametrize("document", [1, 31, 32, 33, 3500])
def test_blocks_are_those_that_hold_the_tokens(document: int) -> None:
    assert blocks_of(document) == len(range(0, document, BLOCK))
    for new in (1, 29, 30, 64):
        held = document + 3 + new - 1  # the last token is not held
        whole = [place for place in range(0, held, BLOCK) if place + BLOCK <= document]
        assert own_blocks(document, 3, new) == len(range(0, held, BLOCK)) - len(whole)


@pytest.mark.parametrize("work", WORKLOADS.values(), ids=lambda work: work.name)
def test_blocks_are_short_for_whole_documents_only(work: Workload) -> None:
    short = work.pool(work.tokens, 3, ample=False)
    own = own_blocks(work.tokens, 3, work.new)
    assert short - 1 == work.held * (work.tokens // BLOCK) + work.room * own
    assert short - 1 < work.documents * (work.tokens // BLOCK) + work.clients * own
    for kept in range(1, work.tokens + 1):  # a budget may leave over more tokens than the whole document
        needed = work.documents * blocks_of(kept) + work.clients * own_blocks(kept, 3, work.new)
        assert needed < work.pool(work.tokens, 3, ample=True)


@pytest.mark.parametrize("work", [*WORKLOADS.values(), SMALL], ids=lambda work: work.name)
def test_questions_are_about_records_of_their_documents(work: Workload) -> None:
    found = work.draw()
    assert found == work.draw()
    assert len(found) == len({text for text, _ in found}) == work.documents
    _, tokenizer = kvpolicy.tiny(name=MODEL)
    for text, questions in found:
        assert len(tokenizer(text).input_ids) == pytest.approx(work.tokens, rel=0.15)
        assert len(questions) == len({question for question, _ in questions}) == work.questions
        assert all(text.count(f"{question[1:]}{answer}\n") == 1 for question, answer in questions)


def test_documents_are_asked_in_turns(tmp_path: Path) -> None:
    vllm_documents.prepare(SMALL, [SIDES["stock"], SIDES["100"], SIDES["50"]], tmp_path)
    plan = json.loads((tmp_path / "small.json").read_text(encoding="utf-8"))
    assert Workload(**plan["work"]) == SMALL
    assert [each["document"] for each in plan["requests"]] == [0, 1, 0, 1]
    _, tokenizer = kvpolicy.tiny(name=MODEL)
    for each in plan["requests"]:
        text = tokenizer.decode(plan["texts"][each["document"]])
        question = tokenizer.decode(each["question"])
        assert f"{question.strip()[1:]}{each['answer']}" in text
    for number, text in enumerate(plan["texts"]):
        whole, half = (
            read_document(vllm_documents.document_path(tmp_path, SMALL, str(SIDES[name].policy), number))
            for name in ("100", "50")
        )
        assert [*whole.tokens] == [*half.tokens] == text
        assert whole.kept == len(text)
        assert half.kept == pytest.approx(len(text) / 2, abs=1)


TIMES = {"preempted": 1, "generated": 24, "right": 3}
DOCUMENTS = vllm_documents.Run(seconds=2.0, first=0.25, mean=3.5, most=4, steps=9, computed=70, **TIMES)
PROMPTS = vllm_prompts.Run(*(2.0, 0.5, 100, 3.5, 4, 0.25), beside=2**20, **TIMES)


@pytest.mark.parametrize(
    ("bench", "run", "side", "held", "shown"),
    [
        (
            vllm_documents,
            DOCUMENTS,
            SIDES["20-ample"],
            {"blocks": 1100},
            ["`kvzip:decode=grow@0.2`, blocks for all", "275.0", "5.0", "3.5 (5)", "9", "12 (3-24)", "0.25", "3/4"],
        ),
        (
            vllm_prompts,
            PROMPTS,
            "20",
            {"kept": 80},
            ["`snapkv@0.2`", "80", "5.0", "1.0", "3.5 (5)", "200 (200-200)", "12 (3-24)", "1.5", "0.2", "3/4"],
        ),
    ],
    ids=["documents", "prompts"],
)
def test_rows_have_medians(bench: Any, run: Any, side: Any, held: dict[str, int], shown: list[str]) -> None:
    runs = tuple(dataclasses.replace(run, seconds=seconds, most=4 + n) for n, seconds in enumerate((2, 1, 8)))
    result = bench.Result(**held, pool=20, nbytes=2**18, clients=4, runs=runs)
    assert bench.Result.of(json.loads(json.dumps(dataclasses.asdict(result)))) == result
    assert bench.cells(side, result) == shown and len(shown) == len(bench.COLUMNS)


@pytest.mark.parametrize("name", ["vllm_documents", "vllm_prompts"])
def test_without_vllm_it_says_how_to_get_it(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(vllm_sides, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        main([name])
    assert "python -m kvpolicy_vllm.env FOLDER" in capsys.readouterr().err


@pytest.mark.vllm
def test_a_small_run_of_documents_has_every_number(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    sides = [SIDES["stock"], SIDES["50"]]
    vllm_documents.prepare(SMALL, sides, tmp_path)
    stock, half = (vllm_documents.apart(side, SMALL.name, tmp_path, repeats=2) for side in sides)
    assert stock.pool == half.pool
    assert half.nbytes == stock.nbytes == 2 * 4 * 32 * 4 * BLOCK * 8  # heads of 32, fp32, 8 layers
    assert half.blocks < stock.blocks
    for result in (stock, half):
        assert result.clients == SMALL.clients
        assert len(result.runs) == 2
        for run in result.runs:
            assert 0 < run.first <= run.seconds and run.preempted >= 0
            assert run.rate * run.seconds == pytest.approx(run.generated)
            assert run.generated == SMALL.clients * SMALL.new and run.steps >= SMALL.new
            assert 1 <= run.mean <= run.most <= SMALL.clients and 0 <= run.right <= SMALL.clients
    for run, other in zip(half.runs, stock.runs, strict=True):
        assert run.computed < other.computed - 300  # documents are computed, or loaded
        assert run.steps <= other.steps


@pytest.mark.parametrize("side", vllm_prompts.SIDES)
@pytest.mark.parametrize("size", [Size(), SHORT])
def test_all_sides_have_the_same_memory(size: Size, side: str) -> None:
    token = 4096
    output = 1024
    policy = vllm_prompts.SIDES[side]
    recipe = None if policy is None else Recipe.parse(policy, threshold=300, least=0)
    blocks = vllm_prompts.pool_of(size, size.tokens, recipe, token, output)
    whole = 1 + size.held * -(-(size.tokens + size.new) // BLOCK)
    if recipe is None:
        assert blocks == whole
        return
    beside = (recipe.prefills + PREEMPTED) * recipe.kept(size.tokens) * token + size.clients * output
    assert 0 <= (whole - blocks) * BLOCK * token - beside < BLOCK * token


def test_prompts_have_the_answers(tmp_path: Path) -> None:
    vllm_prompts.prepare(SHORT, tmp_path)
    plan = json.loads((tmp_path / "prompts.json").read_text(encoding="utf-8"))
    assert Size(**plan["size"]) == SHORT and len(plan["prompts"]) == SHORT.clients
    _, tokenizer = kvpolicy.tiny(name=MODEL)
    texts = [tokenizer.decode(each["ids"]) for each in plan["prompts"]]
    assert len({*texts}) == SHORT.clients
    for text, each in zip(texts, plan["prompts"], strict=True):
        assert len(each["ids"]) == pytest.approx(SHORT.tokens, rel=0.2)
        question = text.rpartition("?")[2]
        assert text.count(f"{question}{each['answer']}\n") == 1


@pytest.mark.vllm
def test_a_small_run_of_prompts_has_every_number(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    vllm_prompts.prepare(SHORT, tmp_path)
    results = (measured_by("vllm_prompts", [side], tmp_path, 2) for side in ("stock", "20"))
    stock, fifth = map(vllm_prompts.Result.of, results)
    assert stock.nbytes == fifth.nbytes == 2 * 4 * 32 * 4 * BLOCK * 8  # heads of 32, fp32, 8 layers
    assert fifth.kept < stock.kept / 4 and fifth.pool < stock.pool
    for result in (stock, fifth):
        assert result.clients == SHORT.clients and len(result.runs) == 2
        for run in result.runs:
            assert 0 < run.decoding < run.seconds
            assert run.generated == SHORT.clients * SHORT.new
            assert 0 < run.decoded < run.generated
            assert 1 <= run.mean <= run.most <= SHORT.clients
            assert 0 <= run.right <= SHORT.clients
    for run in stock.runs:
        assert run.compressing == run.beside == 0
    for run in fifth.runs:
        assert 0 < run.compressing < run.seconds
        assert 0 < run.beside <= (stock.pool - fifth.pool) * stock.nbytes
