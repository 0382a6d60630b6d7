"""Prompts that vLLM compresses: how memory is divided, what is asked, and a small run of the engine."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

pytest.importorskip("transformers")

import kvpolicy
from kvpolicy_eval.bench import vllm_prompts as bench
from kvpolicy_eval.bench import vllm_sides
from kvpolicy_eval.bench.__main__ import main
from kvpolicy_eval.bench.vllm_prompts import PREEMPTED, SIDES, Result, Run, Size
from kvpolicy_eval.bench.vllm_sides import BLOCK, MODEL, measured_by
from kvpolicy_vllm.recipe import Recipe

SMALL = Size(clients=6, tokens=400, records=6, new=6, held=3)
RUN = Run(
    *(2.0, 0.5, 100, 3.5, 4, 0.25),
    **{"beside": 2**20, "preempted": 1, "generated": 24, "right": 3},
)


def test_sides_are_written_in_the_shortest_words() -> None:
    policies = {policy for policy in SIDES.values() if policy is not None}
    assert policies == {str(kvpolicy.Policy.parse(policy)) for policy in policies} and SIDES["stock"] is None
    for policy in policies:
        Recipe.parse(policy)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("size", [Size(), SMALL])
def test_all_sides_have_the_same_memory(size: Size, side: str) -> None:
    token = 4096
    output = 1024
    policy = SIDES[side]
    recipe = None if policy is None else Recipe.parse(policy, threshold=300, least=0)
    blocks = bench.pool_of(size, size.tokens, recipe, token, output)
    whole = 1 + size.held * -(-(size.tokens + size.new) // BLOCK)
    if recipe is None:
        assert blocks == whole
        return
    beside = (recipe.prefills + PREEMPTED) * recipe.kept(size.tokens) * token + size.clients * output
    assert 0 <= (whole - blocks) * BLOCK * token - beside < BLOCK * token


def test_prompts_have_the_answers(tmp_path: Path) -> None:
    bench.prepare(SMALL, tmp_path)
    plan = json.loads((tmp_path / "prompts.json").read_text(encoding="utf-8"))
    assert Size(**plan["size"]) == SMALL and len(plan["prompts"]) == SMALL.clients
    _, tokenizer = kvpolicy.tiny(name=MODEL)
    texts = [tokenizer.decode(each["ids"]) for each in plan["prompts"]]
    assert len({*texts}) == SMALL.clients
    for text, each in zip(texts, plan["prompts"], strict=True):
        assert len(each["ids"]) == pytest.approx(SMALL.tokens, rel=0.2)
        question = text.rpartition("?")[2]
        assert text.count(f"{question}{each['answer']}\n") == 1


def test_rows_have_medians() -> None:
    runs = tuple(dataclasses.replace(RUN, seconds=seconds, most=4 + n) for n, seconds in enumerate((2, 1, 8)))
    result = Result(kept=80, pool=20, nbytes=2**18, clients=4, runs=runs)
    assert Result.of(json.loads(json.dumps(dataclasses.asdict(result)))) == result
    row = bench.cells("20", result)
    assert row == [
        *("`snapkv@0.2`", "80", "5.0", "1.0", "3.5 (5)", "200 (200-200)", "12 (3-24)"),
        *("1.5", "0.2", "3/4"),
    ]
    assert len(row) == len(bench.COLUMNS)
    assert bench.cells("stock", result)[0] == "stock"


def test_without_vllm_it_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(vllm_sides, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        main(["vllm_prompts"])
    assert "python -m kvpolicy_vllm.env FOLDER" in capsys.readouterr().err


@pytest.mark.vllm
def test_a_small_run_has_every_number(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    bench.prepare(SMALL, tmp_path)
    stock, fifth = (Result.of(measured_by("vllm_prompts", [side], tmp_path, 2)) for side in ("stock", "20"))
    assert stock.nbytes == fifth.nbytes == 2 * 4 * 32 * 4 * BLOCK * 8  # heads of 32, fp32, 8 layers
    assert fifth.kept < stock.kept / 4 and fifth.pool < stock.pool
    for result in (stock, fifth):
        assert result.clients == SMALL.clients and len(result.runs) == 2
        for run in result.runs:
            assert 0 < run.decoding < run.seconds
            assert run.generated == SMALL.clients * SMALL.new
            assert 0 < run.decoded < run.generated
            assert 1 <= run.mean <= run.most <= SMALL.clients
            assert 0 <= run.right <= SMALL.clients
    for run in stock.runs:
        assert run.compressing == run.beside == 0
    for run in fifth.runs:
        assert 0 < run.compressing < run.seconds
        assert 0 < run.beside <= (stock.pool - fifth.pool) * stock.nbytes
