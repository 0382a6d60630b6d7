"""Policies on real weights, with the embedded model in their place: prompts, what is kept, and the table."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

import kvpolicy
from kvpolicy_eval.real.__main__ import main
from kvpolicy_eval.real.measure import PLACES, RealModel
from kvpolicy_eval.real.prompts import COPIED, GIVEN, TASKS, Asked, facts, listed, needles, prose
from kvpolicy_lm_eval.data.words import WORDS

TINY = str(files("kvpolicy") / "assets" / "tiny")
"""The embedded model, in the place of one with real weights."""


@pytest.mark.parametrize("task", TASKS)
def test_prompts_are_drawn_again_and_differ(task: str) -> None:
    assert TASKS[task](3) == TASKS[task](3) != TASKS[task](4)
    inside, after = (TASKS[task](3).placed(place) for place in ("inside", "after"))
    assert inside.compressed == after.compressed + after.fed and not inside.fed
    assert inside.answer == after.answer


@pytest.mark.parametrize("asked", [facts, needles])
def test_exactly_one_sentence_has_the_answer(asked: Callable[[int], Asked]) -> None:
    for number in range(30):
        prompt = asked(number)
        assert prompt.question.endswith(" lives in") and prompt.document.count(prompt.answer) == 1
        name = prompt.question.split()[-3]
        assert f"{name} lives in {prompt.answer}." in prompt.document


def test_what_is_given_of_a_list_stands_in_it_once_before_the_answer() -> None:
    for number in range(30):
        prompt = listed(number)
        lines = prompt.document.splitlines()[1:]
        given = prompt.question.strip().splitlines()[1:-1]
        assert len(set(lines)) == len(lines) and len(given) == GIVEN
        start = lines.index(given[0])
        assert lines[start : start + GIVEN + COPIED] == [*given, f"- {prompt.answer}"]


def test_prose_is_long_enough_and_has_no_code() -> None:
    assert ">>>" not in prose() and "    " not in prose()
    assert len(prose()) > 8 * 512 * 5


def real(tmp_path: Path, docs: int = 2) -> RealModel:
    """The embedded model, and no result yet."""
    return RealModel(TINY, None, tmp_path / "real.jsonl", docs)


def test_what_was_measured_is_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = real(tmp_path)
    found = first.answers("streaming@0.5", "list", "after", measure=True)
    assert found["of"] == 2 and 0.4 < found["held"] < 0.6
    prose_found = first.prose("tokenwise:bits=4", measure=True)
    assert 0 < prose_found["keys"] < 0.1 and prose_found["bits"] > 0
    second = real(tmp_path)
    monkeypatch.setattr(second, "_model", lambda: pytest.fail("a model was loaded"))
    assert second.answers("streaming@0.5", "list", "after", measure=True) == found
    assert second.prose("tokenwise:bits=4", measure=True) == prose_found
    assert second.answers("streaming@0.5", "list", "inside", measure=False) == {}
    assert real(tmp_path, 9).answers("streaming@0.5", "list", "after", measure=False) == found  # of fewer prompts
    assert real(tmp_path, 1).answers("streaming@0.5", "list", "after", measure=False) == {}


def test_bits_are_those_of_a_plain_forward(tmp_path: Path) -> None:
    model, tokenizer = kvpolicy.tiny()
    ids = tokenizer(prose(), return_tensors="pt").input_ids[0][: 8 * 512].view(8, 512)
    with torch.inference_mode():
        logits = model(ids).logits[:, 447:-1].double()
    nats = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 448:].flatten(), reduction="sum")
    size = len("".join(tokenizer.batch_decode(ids[:, 448:])).encode())
    expected = nats.item() / torch.tensor(2.0).log().item() / size
    assert real(tmp_path).prose("full", measure=True)["bits"] == pytest.approx(expected, abs=1e-4)


def test_what_a_policy_refuses_is_kept_and_has_no_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- table:real -->\n<!-- /table -->\n", encoding="utf-8")
    arguments = ["--model", TINY, "--results", str(tmp_path / "out.jsonl"), "--n", "1"]
    main([*arguments, "--only", "full", "full+lowrank:rank=99", "--fill", str(page)])
    kept = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()]
    results = 2 * len(TASKS) + 1  # two places of the question, and prose
    assert len(kept) == 2 * results and sum("refused" in line for line in kept) == results
    text = page.read_text(encoding="utf-8")
    assert "| `full` | 1.0" in text and "`full+lowrank" not in text and "`lowrank" not in text
    main([*arguments, "--only", "full", "--page-only"])
    assert "| `full` | 1.0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--results", "none.jsonl", "--page-only"], "--results must be an existing file with --page-only"),
        (["--results", "none.jsonl", "--fill", "page.md"], "page.md has no place for real"),
    ],
)
def test_files_are_checked_before_anything_is_measured(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "page.md").write_text("# A page\n", encoding="utf-8")
    with pytest.raises(SystemExit):
        main(["--model", TINY, *arguments])
    assert message in capsys.readouterr().err
    assert not (tmp_path / "none.jsonl").exists()


def test_only_some_tasks_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = tmp_path / "out.jsonl"
    main(["--model", TINY, "--results", str(results), "--n", "1", "--only", "full", "--tasks", "list"])
    assert results.read_text(encoding="utf-8").count("full list ") == len(results.read_text("utf-8").splitlines()) == 2
    assert "| `full` | 1.0" in capsys.readouterr().out


def test_a_tokenizer_that_joins_document_and_question_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    joined = facts(0)._replace(document="a b", question="c")
    monkeypatch.setitem(TASKS, "facts", lambda number: joined)
    model = real(tmp_path)

    class Joins:
        def __call__(self, text: str, **_: object) -> object:
            return type("Ids", (), {"input_ids": text.split()})()

    monkeypatch.setattr(model, "_model", lambda: (kvpolicy.tiny()[0], Joins()))
    with pytest.raises(ValueError, match="must keep a document and a question apart"):
        model.answers("full", "facts", "after", measure=True)


@pytest.mark.parametrize("policy", ["full", "streaming@0.1"])
def test_a_token_comes_after_the_compression(policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record with a single digit, which only the full cache still has."""
    lines = "".join(f"{word}={number % 10}\n" for number, word in enumerate(WORDS[:60]))
    monkeypatch.setitem(TASKS, "facts", lambda number: Asked(lines, f"?{WORDS[20 + number]}=", f"{number}"))
    for place in PLACES:
        right = real(tmp_path, docs=6).answers(policy, "facts", place, measure=True)["right"]
        assert right == 6 if policy == "full" else right < 4, place
