"""Documents in vLLM: how blocks are counted, what is asked, and a small run of the engine."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

pytest.importorskip("transformers")

import kvpolicy
from kvpolicy_eval.bench import vllm_documents as bench
from kvpolicy_eval.bench import vllm_sides
from kvpolicy_eval.bench.__main__ import main
from kvpolicy_eval.bench.vllm_documents import BLOCK, SIDES, WORKLOADS, Result, Run, Workload
from kvpolicy_eval.bench.vllm_sides import MODEL
from kvpolicy_vllm import read_document

SMALL = Workload("small", documents=2, tokens=300, records=8, questions=2, held=1, room=1, new=6)
RUN = Run(seconds=2.0, first=0.25, mean=3.5, most=4, preempted=1, steps=9, computed=70, generated=24, right=3)


def test_sides_are_named_and_written_in_the_shortest_words() -> None:
    assert [side.name for side in SIDES.values()] == [*SIDES]
    assert len({side.label for side in SIDES.values()}) == len(SIDES)
    policies = {side.policy for side in SIDES.values()} - {None}
    assert policies == {str(kvpolicy.Policy.parse(str(policy))) for policy in policies}
    assert {SIDES[name].policy is None for name in ("stock", "stock-ample")} == {True}


@pytest.mark.parametrize("document", [1, 31, 32, 33, 3500])
def test_blocks_are_those_that_hold_the_tokens(document: int) -> None:
    assert bench.blocks_of(document) == len(range(0, document, BLOCK))
    for new in (1, 29, 30, 64):
        held = document + 3 + new - 1  # the last token is not held
        whole = [place for place in range(0, held, BLOCK) if place + BLOCK <= document]
        assert bench.own_blocks(document, 3, new) == len(range(0, held, BLOCK)) - len(whole)


@pytest.mark.parametrize("work", WORKLOADS.values(), ids=lambda work: work.name)
def test_blocks_are_short_for_whole_documents_only(work: Workload) -> None:
    short = work.pool(work.tokens, 3, ample=False)
    own = bench.own_blocks(work.tokens, 3, work.new)
    assert short - 1 == work.held * (work.tokens // BLOCK) + work.room * own
    assert short - 1 < work.documents * (work.tokens // BLOCK) + work.clients * own
    for kept in range(1, work.tokens + 1):  # a budget may leave over more tokens than the whole document
        needed = work.documents * bench.blocks_of(kept) + work.clients * bench.own_blocks(kept, 3, work.new)
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
    bench.prepare(SMALL, [SIDES["stock"], SIDES["100"], SIDES["50"]], tmp_path)
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
            read_document(bench.document_path(tmp_path, SMALL, str(SIDES[name].policy), number))
            for name in ("100", "50")
        )
        assert [*whole.tokens] == [*half.tokens] == text
        assert whole.kept == len(text)
        assert half.kept == pytest.approx(len(text) / 2, abs=1)


def test_rows_have_medians() -> None:
    runs = tuple(dataclasses.replace(RUN, seconds=seconds, most=4 + number) for number, seconds in enumerate((2, 1, 8)))
    result = Result(blocks=1100, pool=20, nbytes=2**18, clients=4, runs=runs)
    assert Result.of(json.loads(json.dumps(dataclasses.asdict(result)))) == result
    row = bench.cells(SIDES["20-ample"], result)
    assert row == [
        *("`kvzip:decode=grow@0.2`, blocks for all", "275.0", "5.0", "3.5 (5)", "9"),
        *("12 (3-24)", "0.25", "3/4"),
    ]
    assert len(row) == len(bench.COLUMNS)


def test_without_vllm_it_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(vllm_sides, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        main(["vllm_documents"])
    assert "python -m kvpolicy_vllm.env FOLDER" in capsys.readouterr().err


@pytest.mark.vllm
def test_a_small_run_has_every_number(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    sides = [SIDES["stock"], SIDES["50"]]
    bench.prepare(SMALL, sides, tmp_path)
    stock, half = (bench.apart(side, SMALL.name, tmp_path, repeats=2) for side in sides)
    assert stock.pool == half.pool
    assert half.nbytes == stock.nbytes == 2 * 4 * 32 * 4 * BLOCK * 8  # heads of 32, fp32, 8 layers
    assert half.blocks < stock.blocks
    for result in (stock, half):
        assert result.clients == SMALL.clients
        assert len(result.runs) == 2
        for run in result.runs:
            assert 0 < run.first <= run.seconds
            assert run.rate * run.seconds == pytest.approx(run.generated)
            assert run.generated == SMALL.clients * SMALL.new
            assert run.steps >= SMALL.new
            assert 1 <= run.mean <= run.most <= SMALL.clients
            assert run.preempted >= 0
            assert 0 <= run.right <= SMALL.clients
    for run, other in zip(half.runs, stock.runs, strict=True):
        assert run.computed < other.computed - 300  # documents are computed, or loaded
        assert run.steps <= other.steps
