"""Policies on real weights, with the embedded model in their place: prompts, what is kept, and the table."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace

import jinja2
import pytest
import torch
from torch.nn import functional as F

import kvpolicy
from kvpolicy_eval.common.conversation import run
from kvpolicy_eval.real import generated, measure, prompts
from kvpolicy_eval.real.__main__ import main
from kvpolicy_eval.real.chat import in_template
from kvpolicy_eval.real.measure import PLACES, RealModel
from kvpolicy_eval.real.shared_prefill import TOKENS, SharedPrefill
from kvpolicy_lm_eval.data.words import CATEGORIES, WORDS
from tests.eval.pages import page_with

TINY = str(files("kvpolicy") / "assets" / "tiny")
"""The embedded model, in the place of one with real weights."""


@pytest.mark.parametrize("task", prompts.TASKS)
def test_prompts_are_drawn_again_and_differ(task: str) -> None:
    assert prompts.TASKS[task](3) == prompts.TASKS[task](3) != prompts.TASKS[task](4)
    inside, after = (prompts.TASKS[task](3).placed(place) for place in ("inside", "after"))
    assert inside.compressed == after.compressed + after.fed and not inside.fed
    assert inside.answer == after.answer


@pytest.mark.parametrize("asked", [prompts.facts, prompts.needles, prompts.few])
def test_exactly_one_sentence_has_the_answer(asked: Callable[[int], prompts.Asked]) -> None:
    for number in range(30):
        prompt = asked(number)
        assert prompt.question.endswith(" lives in") and prompt.document.count(prompt.answer) == 1
        name = prompt.question.split()[-3]
        assert f"{name} lives in {prompt.answer}." in prompt.document


def test_what_is_given_of_a_list_stands_in_it_once_before_the_answer() -> None:
    for number in range(30):
        prompt = prompts.listed(number)
        lines = prompt.document.splitlines()[1:]
        given = prompt.question.strip().splitlines()[1:-1]
        assert len(set(lines)) == len(lines) and len(given) == prompts.GIVEN
        start = lines.index(given[0])
        assert lines[start : start + prompts.GIVEN + prompts.COPIED] == [*given, f"- {prompt.answer}"]


def test_a_number_stands_in_quotes_behind_its_thing_once() -> None:
    for number in range(30):
        prompt = prompts.code(number)
        told = prompt.question.split("Answer: ")[1]
        assert prompt.document.count(f'{told}{prompt.answer}".') == 1 == prompt.document.count(prompt.answer)


def test_a_sentence_goes_on_as_it_does_in_the_document() -> None:
    for number in range(30):
        prompt = prompts.line(number)
        given = prompt.question.removeprefix("\n\nThe same sentence again:\n\n")
        assert prompt.document.count(given) == 1 and f"{given} {prompt.answer}" in prompt.document
        assert any(sentence.startswith(f"{given} {prompt.answer}") for sentence in prompts.sentences())


def test_a_row_is_the_only_one_with_its_first_word() -> None:
    for number in range(30):
        prompt = prompts.rows(number)
        given = prompt.question.splitlines()[-1]
        lines = prompt.document.splitlines()[1:]
        assert [row for row in lines if row.split()[0] == given.split()[0]] == [f"{given} {prompt.answer}"]


def test_a_letter_is_that_of_the_other_words_of_its_category_and_the_word_is_new() -> None:
    for number in range(30):
        prompt = prompts.labels(number)
        word = prompt.question.strip().rstrip(":")
        shown = dict(row.split(": ") for row in prompt.document.splitlines())
        category = next(members for members in CATEGORIES.values() if word in members)
        assert word not in shown
        assert {letter for other, letter in shown.items() if other in category} == {prompt.answer}
        assert len(set(shown.values())) > 1


@pytest.mark.parametrize("task", prompts.SIZED)
def test_documents_have_about_as_many_tokens_as_asked_for(task: str) -> None:
    drawn = {tokens: [prompts.draw(task, number, tokens).document for number in range(8)] for tokens in (256, 1024)}
    assert 3 < len("".join(drawn[1024])) / len("".join(drawn[256])) < 5


TEMPLATE = "{% for message in messages %}<u>{{ message['content'] }}</u>{% endfor %}<a>"
"""A chat template."""


class Chats:
    """A tokenizer with a chat template, whose texts are words."""

    chat_template = TEMPLATE
    bos_token = "<u>"

    def __init__(self, adds: bool) -> None:
        self.adds = adds

    def __call__(self, text: str) -> object:
        return SimpleNamespace(input_ids=[0] * self.adds + [len(word) for word in text.split()])

    def apply_chat_template(self, messages: object, **_: object) -> str:
        return jinja2.Template(TEMPLATE).render(messages=messages)


@pytest.mark.parametrize("adds", [False, True], ids=["plain", "adds the first token"])
def test_a_chat_ends_its_message_before_the_answer_begins(adds: bool) -> None:
    plain = prompts.few(5)
    found = in_template(prompts.chat(5), Chats(adds))
    question, begun = plain.question.split("\nAnswer: ")
    assert found.document == plain.document if adds else found.document == f"<u>{plain.document}"
    assert found.question == f"{question}</u><a>{begun}" and found.answer == plain.answer


def test_a_chat_needs_a_template(tmp_path: Path) -> None:
    model = real(tmp_path, docs=1)
    model.measure(["full"], ["chat"])
    assert "must have a chat template" in model.answers("full", "chat", "after")["refused"]


def test_prose_is_long_enough_and_has_no_code() -> None:
    assert ">>>" not in prompts.prose() and "    " not in prompts.prose()
    assert len(prompts.prose()) > 8 * 512 * 5


def real(tmp_path: Path, docs: int = 2) -> RealModel:
    """The embedded model, and no result yet."""
    tmp_path.mkdir(exist_ok=True)
    return RealModel(TINY, None, tmp_path / "real.jsonl", docs)


def test_what_was_measured_is_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = real(tmp_path)
    first.measure(["streaming@0.5", "tokenwise:bits=4"], ["list", "prose"])
    found = first.answers("streaming@0.5", "list", "after")
    assert found["of"] == 2 and 0.4 < found["held"] < 0.6
    prose_found = first.text("tokenwise:bits=4", "prose")
    assert 0 < prose_found["keys"] < 0.1 and prose_found["bits"] > 0 and prose_found["divergence"] > 0
    second = real(tmp_path)
    monkeypatch.setattr(second, "_model", lambda: pytest.fail("a model was loaded"))
    second.measure(["streaming@0.5", "tokenwise:bits=4"], ["list", "prose"])
    assert second.answers("streaming@0.5", "list", "after") == found
    assert second.text("tokenwise:bits=4", "prose") == prose_found
    assert second.answers("streaming@0.5", "facts", "inside") == {} == second.text("full", "prose")
    assert real(tmp_path, 9).answers("streaming@0.5", "list", "after") == found  # of fewer prompts
    assert real(tmp_path, 1).answers("streaming@0.5", "list", "after") == {}


def test_more_prompts_continue_what_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each prompt is answered once, whether the command was interrupted or not."""
    policies = ["full", "streaming@0.5"]
    monkeypatch.setattr(measure, "BLOCK", 2)
    whole = real(tmp_path / "whole", docs=5)
    whole.measure(policies, ["list"])
    drawn: list[int] = []
    monkeypatch.setattr(
        measure, "draw", lambda task, number, tokens: drawn.append(number) or prompts.draw(task, number, tokens)
    )
    real(tmp_path / "parts", docs=2).measure(policies[:1], ["list"])
    parts = real(tmp_path / "parts", docs=5)
    parts.measure(policies, ["list"])
    assert sorted(drawn) == sorted([*range(5)] * 4)  # two policies, two places
    for policy in policies:
        assert parts.answers(policy, "list", "after") == whole.answers(policy, "list", "after")
        assert real(tmp_path / "parts", docs=4).answers(policy, "list", "inside")["of"] == 4
    assert 0.4 < parts.answers("streaming@0.5", "list", "after")["held"] < 0.6


def test_documents_of_another_length_are_another_result(tmp_path: Path) -> None:
    short = RealModel(TINY, None, tmp_path / "real.jsonl", 1, tokens=64)
    short.measure(["full"], ["few", "list"])
    longer = RealModel(TINY, None, tmp_path / "real.jsonl", 1, tokens=128)
    assert short.answers("full", "few", "after") and not longer.answers("full", "few", "after")
    assert longer.answers("full", "list", "after") == short.answers("full", "list", "after") != {}


def test_generated_text_is_predicted_as_by_a_plain_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generated, "ROWS", 2)
    monkeypatch.setattr(generated, "NEW", 5)
    model, tokenizer = kvpolicy.tiny()
    text = generated.generate(model, tokenizer)
    assert text.ids.shape == (2, generated.PROMPT + 5)
    assert torch.equal(text.ids, generated.generate(model, tokenizer).ids)
    with torch.inference_mode():
        plain = model(text.ids).logits[:, generated.PROMPT - 1 : -1]
        steps = torch.stack(text._of_full, 1)
    torch.testing.assert_close(steps, plain, atol=1e-4, rtol=1e-4)
    assert text.divergence("full") == 0 < text.divergence("streaming@0.1")


def test_bits_are_those_of_a_plain_forward(tmp_path: Path) -> None:
    model, tokenizer = kvpolicy.tiny()
    ids = tokenizer(prompts.prose(), return_tensors="pt").input_ids[0][: 8 * 512].view(8, 512)
    with torch.inference_mode():
        logits = model(ids).logits[:, 447:-1].double()
    nats = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 448:].flatten(), reduction="sum")
    size = len("".join(tokenizer.batch_decode(ids[:, 448:])).encode())
    expected = nats.item() / torch.tensor(2.0).log().item() / size
    found = real(tmp_path)
    found.measure(["full"], ["prose"])
    measured = found.text("full", "prose")
    assert measured["divergence"] == 0
    assert measured["bits"] == pytest.approx(expected, abs=1e-4)


def test_what_a_policy_refuses_is_kept_and_has_no_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = page_with(tmp_path / "page.md", "real", "other")
    arguments = ["--model", TINY, "--results", str(tmp_path / "out.jsonl"), "--n", "1"]
    tasks = ["--tasks", "list", "prose"]
    main([*arguments, *tasks, "--only", "full", "full+lowrank:rank=99", "--table", "other", "--fill", str(page)])
    kept = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()]
    results = 2 + 1  # two places of the question, and prose
    assert len(kept) == 2 * results and sum("refused" in line for line in kept) == results
    before, _, text = page.read_text(encoding="utf-8").partition("<!-- table:other -->\n")
    assert before == "<!-- table:real -->\n<!-- /table -->\n"
    assert "| policy | held | list, inside | list, after | bits per byte |" in text  # no columns without results
    assert "| `full` | 1.0" in text and "`full+lowrank" not in text and "`lowrank" not in text
    main([*arguments, "--only", "full", "--page-only"])
    assert "| `full` | 1.0" in capsys.readouterr().out
    main([*arguments, "--tasks", "prose", "--only", "full", "--page-only"])
    assert "list" not in capsys.readouterr().out


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


def test_a_tokenizer_that_joins_document_and_question_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    joined = prompts.facts(0)._replace(document="a b", question="c")
    monkeypatch.setitem(prompts.TASKS, "facts", lambda number: joined)
    monkeypatch.setattr(measure, "PLACES", ("after",))
    model = real(tmp_path)

    class Joins:
        def __call__(self, text: str, **_: object) -> object:
            return type("Ids", (), {"input_ids": text.split()})()

    monkeypatch.setattr(model, "_model", lambda: (kvpolicy.tiny()[0], Joins()))
    with pytest.raises(ValueError, match="must keep a document and a question apart"):
        model.measure(["full"], ["facts"])


@pytest.mark.parametrize("policy", ["full", "streaming@0.1"])
def test_a_token_comes_after_the_compression(policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record with a single digit, which only the full cache still has."""
    lines = "".join(f"{word}={number % 10}\n" for number, word in enumerate(WORDS[:60]))
    monkeypatch.setitem(
        prompts.TASKS, "facts", lambda number: prompts.Asked(lines, f"?{WORDS[20 + number]}=", f"{number}")
    )
    model = real(tmp_path, docs=6)
    model.measure([policy], ["facts"])
    for place in PLACES:
        right = model.answers(policy, "facts", place)["right"]
        assert right == 6 if policy == "full" else right < 4, place


def test_models_of_one_name_are_kept_apart(tmp_path: Path) -> None:
    results = tmp_path / "real.jsonl"
    old = {"key": "full prose x in float32", "bits": 1.0}  # from before models were noted
    results.write_text(json.dumps(old) + "\n")
    assert RealModel("models/a/", None, results, 1).title == "a in float32"
    first = RealModel("models/a/x/", None, results, 1)
    again = RealModel("models/a/x", None, results, 1)
    assert first.title == again.title == "x in float32" and first.text("full", "prose")["bits"] == 1
    first._keep(first._key("h2o@0.5", "prose"), {"bits": 2.0})
    assert RealModel("models/a/x", None, results, 1).text("h2o@0.5", "prose")["bits"] == 2
    other = RealModel("models/b/x", None, results, 1)
    assert other.title == "models/b/x in float32" and not other.text("h2o@0.5", "prose")


POLICIES = ["full", "snapkv@0.3", "kivi:bits=4", "uniform/adakv+kvzip@0.3", "h2o@0.3", "squeeze+kvcrush/snapkv@0.5"]


def predictions(model: object, policy: str, ids: torch.Tensor) -> torch.Tensor:
    pieces = ids.split([ids.shape[1] - 8, 4, 1, 1, 1, 1], 1)
    return torch.stack(run(model, policy, pieces, prompt=ids.shape[1] - 8, new=8).logits)


def test_predictions_are_equal_bit_for_bit() -> None:
    model, tokenizer = kvpolicy.tiny()
    texts = ("".join(f"{word}={number}\n" for number in range(200)) for word in ("tiger", "lime"))
    given = [torch.tensor([tokenizer(text).input_ids[:200]]) for text in texts]
    alone = [[predictions(model, policy, ids) for policy in POLICIES] for ids in given]
    with SharedPrefill(model) as shared:
        for ids, wanted in zip(given, alone, strict=True):
            shared.clear()
            for policy, expected in zip(POLICIES, wanted, strict=True):
                assert torch.equal(predictions(model, policy, ids), expected), policy
        reused = shared.reused
        parts = len(shared.parts) + model.config.num_hidden_layers - 1  # with attention, without the head
        assert reused >= len(given) * (len(POLICIES) - 1) * parts * 0.8
        shared.clear()
        predictions(model, "full", given[0])
        assert shared.reused == reused


def test_short_inputs_are_computed_and_everything_is_restored() -> None:
    model, _ = kvpolicy.tiny()
    stock = F.scaled_dot_product_attention
    ids = torch.arange(TOKENS - 1)[None] % 50
    with SharedPrefill(model) as shared, torch.inference_mode():
        model(ids)
        model(ids)
        assert shared.reused == 0 and F.scaled_dot_product_attention is not stock
        longer = torch.arange(TOKENS)[None] % 50
        model(longer)
        model(longer)
        assert shared.reused > 0
    assert F.scaled_dot_product_attention is stock
    assert not any("forward" in vars(part) for part in shared.parts)


def test_what_was_returned_may_be_written_to() -> None:
    model, _ = kvpolicy.tiny()
    part = next(layer for layer in model.modules() if isinstance(layer, torch.nn.Linear))
    tokens = torch.randn(1, TOKENS, part.in_features)
    with SharedPrefill(model), torch.inference_mode():
        first = part(tokens)
        wanted = first.clone()
        first.zero_()
        assert torch.equal(part(tokens), wanted)
        part(tokens).zero_()
        assert torch.equal(part(tokens), wanted)
