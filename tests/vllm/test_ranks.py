"""Engines of several processes: each rank loads its own heads, and their answers are those of one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.vllm.engines import about, ask, engine, plain, reasons, sampling
from tests.vllm.models import POLICY, Served, answer, make_model, make_question, make_text, save, short

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("ranks", [1, 2])
def test_answers_of_several_ranks(served: Served, tmp_path: Path, ranks: int) -> None:
    path = save(served.model, POLICY, make_text(served.model, 150, 40), tmp_path / "d.safetensors")
    with engine(served.folder / "model", processes=True, tensor_parallel_size=ranks) as llm:
        good = [about(*each, llm) for each in served.asked]
        refused = good[0][0], sampling()
        missing = about(path, [5, 6], llm)
        path.unlink()
        for _ in range(2):
            found = ask(llm, [refused, *good, plain([5, 6]), missing])
            assert reasons(found) == ["error", *["length"] * 7, "error"]
            assert [[*each.outputs[0].token_ids] for each in found[1:7]] == short(served.wanted)


def test_ranks_that_share_a_head(tmp_path: Path) -> None:
    model = make_model("one head")
    model.save_pretrained(tmp_path / "model")
    path = save(model, POLICY, make_text(model, 90), tmp_path / "d.safetensors")
    question = make_question(model)
    with engine(tmp_path / "model", processes=True, tensor_parallel_size=2) as llm:
        for _ in range(2):
            (found,) = ask(llm, [about(path, question, llm)])
            assert [*found.outputs[0].token_ids] == answer(model, POLICY, path, question).tokens
