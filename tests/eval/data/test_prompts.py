"""Prompts, by the place of their question, and files of windows: the answer is where the docstring says."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

import kvpolicy
from kvpolicy.tuning.windows import read_windows
from kvpolicy_eval.data.tasks import LENGTHS, tasks
from kvpolicy_eval.data.windows import main, windows
from kvpolicy_lm_eval.data import prompts
from kvpolicy_lm_eval.data.modes import MODES, place, second_question
from kvpolicy_lm_eval.data.text import NOTICE, excerpt, held_out, is_held_out, library, prose, sentences, training_texts
from kvpolicy_lm_eval.data.words import CATEGORIES, LABELS, WORDS

GENERATORS: dict[str, Callable[[Random], prompts.Prompt]] = {
    "recall": lambda rng: prompts.recall(rng, 70),
    "multi_query": lambda rng: prompts.multi_query(rng, 50, 16),
    "passkey": lambda rng: prompts.passkey(rng, 900),
    "needles": lambda rng: prompts.needles(rng, 900, 5),
    "few_shot": lambda rng: prompts.few_shot(rng, 4, 3, 800),
    "hot_keys": lambda rng: prompts.hot_keys(rng, 10, 3, 24, 25),
}


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", GENERATORS)
def test_prompts_have_their_length(length: int, name: str) -> None:
    prompt, _ = tasks(length)[name](Random(length))
    tokens = len(kvpolicy.tiny()[1](prompt)["input_ids"])
    assert 0.65 * length < tokens < 1.25 * length
    text = prompt.splitlines()
    records = [line for line in text if re.fullmatch(r"#?[a-z]+ ?= ?\d+", line)]
    assert len(records) == len(set(records)) <= len(WORDS)


@pytest.mark.parametrize("name", GENERATORS)
def test_prompt_ends_with_an_open_question(name: str) -> None:
    prompt, answer = GENERATORS[name](Random(1))
    assert GENERATORS[name](Random(1)) == (prompt, answer) != GENERATORS[name](Random(2))
    document, question = prompts.split(prompt)
    assert document + question == prompt
    assert re.fullmatch(r"\?[a-z]+[=:]", question)
    assert answer and "\n" not in answer
    assert prompt.isascii()


@pytest.mark.parametrize("name", ["recall", "multi_query", "passkey", "needles"])
def test_answer_stands_once(name: str) -> None:
    for seed in range(5):
        prompt, answer = GENERATORS[name](Random(seed))
        key = prompts.split(prompt)[1][1:-1]
        assert len(re.findall(rf"\b{key} ?= ?{answer}\n", prompt)) == 1
        assert len(re.findall(rf"= ?{answer}\b", prompt)) == 1


@pytest.mark.parametrize("seed", range(4))
def test_records_are_hidden_in_a_whole_excerpt(seed: int) -> None:
    prompt, answer = prompts.passkey(Random(seed), 300)
    rest = prompt.replace(f"\n#passkey = {answer}\n", "").removesuffix("\n?passkey=")
    assert len(rest) == 300 and rest in held_out()


def test_each_record_of_a_ring_names_the_next_one() -> None:
    found = prompts.rings(Random(3), 2, 40)
    for document, words in found:
        table = dict(line.split("=") for line in document.splitlines())
        assert table == dict(zip(words, [*words[1:], words[0]], strict=True))
        assert [*table] != words, "records are not in the order in which they are asked for"
    assert len({word for _, words in found for word in words}) == 80
    with pytest.raises(ValueError, match=r"The number of records must be from 1 to 256, got 258\."):
        prompts.rings(Random(0), 2, 129)


def test_values_have_no_order() -> None:
    values = [*prompts._records(Random(0), 12, 4).values()]
    assert values != sorted(values) and len({*values}) == 12


def test_prose_has_whole_paragraphs_without_code() -> None:
    paragraphs = prose().split("\n\n")
    assert all(len(each) >= 80 and each[-1] in ".:" and ">>>" not in each for each in paragraphs)
    assert len(sentences()) > 100 and all(40 <= len(each) < 200 and each.endswith(".") for each in sentences())


def test_an_excerpt_has_up_to_half_of_the_text() -> None:
    most = len(held_out()) // 2 - 1
    assert excerpt(Random(0), most) in held_out() and len(excerpt(Random(0), most)) == most
    with pytest.raises(ValueError, match=f"from 0 to {most} characters, got {most + 1}"):
        excerpt(Random(0), most + 1)


@pytest.mark.parametrize("seed", range(2))
def test_hot_key_was_answered_only_before_the_fresh_records(seed: int) -> None:
    prompt, answer = prompts.hot_keys(Random(seed), 10, 3, 24, 25)
    key = prompts.split(prompt)[1][1:-1]
    lines = prompt.split("\n")
    assert lines.count(f"{key}={answer}") == 1
    assert lines.count(f"?{key}={answer}") == 8
    assert not any(answer in line for line in lines[-26:])


@pytest.mark.parametrize("seed", range(2))
def test_few_shot_examples_are_far_and_new(seed: int) -> None:
    prompt, answer = prompts.few_shot(Random(seed), 4, 3, 800)
    word = prompts.split(prompt)[1][1:-1]
    category = next(members for members in CATEGORIES.values() if word in members)
    shown = [line.split(":") for line in prompt.split("\n")[:12]]
    assert [label for example, label in shown if example in category] == [answer] * 3
    assert word not in [example for example, _ in shown]
    assert {label for _, label in shown} <= set(LABELS)


def test_words_are_distinct() -> None:
    assert len(set(WORDS)) == len(WORDS) == 256
    assert {len(members) for members in CATEGORIES.values()} == {16}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: place(("a=1\n?a=", "1"), "before"), "mode must be one of inside, .*, got 'before'; try after"),
        (lambda: prompts.recall(Random(0), 0), "number of records must be from 1 to 256, got 0"),
        (lambda: prompts.multi_query(Random(0), 5, 6), "number of queries must be from 1 to 5, got 6"),
        (lambda: prompts.few_shot(Random(0), 1, 3, 10), "number of classes must be from 2 to 6, got 1"),
        (lambda: prompts.few_shot(Random(0), 2, 9, 10), "number of shots must be from 1 to 8, got 9"),
        (lambda: prompts.hot_keys(Random(0), 3, 4, 9, 2), "number of hot keys must be from 1 to 3, got 4"),
        (lambda: prompts.hot_keys(Random(0), 9, 4, 3, 2), "number of asks must be from 4"),
    ],
)
def test_impossible_sizes_and_modes_are_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_held_out_text_is_not_trained_on() -> None:
    text = held_out()
    trained = "".join(training_texts())
    assert 100_000 < len(text) <= 200_000
    assert text.isascii() and "PSF License" in NOTICE
    rng = Random(0)
    windows = [text[i : i + 300] for i in (rng.randrange(len(text) - 300) for _ in range(200))]
    assert not [window for window in windows if window in trained]
    assert any(is_held_out(name) for name in library())


TASKS = tasks(512)


@pytest.mark.parametrize("task", TASKS)
def test_what_is_fed_follows_what_is_compressed(task: str) -> None:
    prompt = TASKS[task](Random(3))
    document, question = prompts.split(prompt[0])
    assert place(prompt, "inside") == (prompt[0], "", prompt[1])
    assert place(prompt, "after") == (document, question, prompt[1])
    if task == "passkey":
        assert second_question(prompt) is None
        with pytest.raises(ValueError, match=r"mode=second must have something else .* try mode=after"):
            place(prompt, "second")
        return
    compressed, fed, answer = place(prompt, "second")
    first, asked = fed.split("\n")
    assert compressed == prompt[0] and first == prompt[1]
    assert asked != question and asked[-1] == question[-1] and len(answer) == len(prompt[1])
    assert place(prompt, "second") == (compressed, fed, answer)


@pytest.mark.parametrize("seed", range(3))
def test_the_second_answer_stands_in_the_document(seed: int) -> None:
    for task in ("recall", "multi_query", "needles", "hot_keys"):
        prompt = TASKS[task](Random(seed))
        document = prompts.split(prompt[0])[0]
        _, fed, answer = place(prompt, "second")
        key = fed.split("?")[1][:-1]
        assert f"\n{key}={answer}\n" in f"\n{document}" or f"\n#{key} = {answer}\n" in document
        assert document.count(f"?{key}=") == {"hot_keys": 9}.get(task, 0)


def test_the_second_word_is_new_and_of_another_category() -> None:
    prompt, label = TASKS["few_shot"](Random(0))
    _, fed, answer = place((prompt, label), "second")
    word = fed.split("?")[1][:-1]
    members = next(members for members in CATEGORIES.values() if word in members)
    labels = dict(line.split(":") for line in prompt.split("\n")[:12])
    assert {labels[one] for one in members if one in labels} == {answer}
    assert word not in labels and answer != label


NAMES = [name for name in tasks(512) if name != "passkey"]


@pytest.mark.parametrize("mode", MODES)
def test_a_file_has_the_windows_of_its_tasks(tmp_path: Path, mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "w.jsonl"
    main(["--out", str(file), "--mode", mode, "-n", "2", "--seed", "5", "--length", "512"])
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    names = NAMES if mode == "second" else [*tasks(512)]
    assert [line["task"] for line in lines] == [name for name in names for _ in range(2)]
    assert f"{2 * len(names)} windows of recall, " in capsys.readouterr().out
    model, tokenizer = kvpolicy.tiny()
    for line, window in zip(lines, read_windows(tokenizer, file), strict=True):
        whole = line["prompt"] + line["question"]
        assert whole[whole.rindex("\n") + 1] == "?" and whole[-1] in "=:"
        assert tokenizer.decode(window.follow) == line["question"] + line["answer"]
        assert 300 < len(window.prompt) < 700 < model.config.max_position_embeddings
        if mode == "after":
            assert line["question"][0] == "?" and line["prompt"][-1] == "\n"
        elif mode == "second":
            first, second = line["question"].split("\n")
            assert first and second[0] == "?" and line["prompt"][-1] in "=:"
        else:
            # A label is a single token, so that a token of its question comes after the compression.
            assert line["question"] == (":" if line["task"] == "few_shot" else "")


def test_other_seeds_give_other_documents() -> None:
    some, others = (windows(NAMES, "after", 3, seed, 512) for seed in (1, 2))
    assert not {line["prompt"] for line in some} & {line["prompt"] for line in others}
    assert len({line["prompt"] for line in some}) == len(some) == 15
    assert windows(NAMES, "after", 3, 1, 512) == some
    assert len(windows(["hot_keys"], "second", 8, 0, 1000)) == 8, "some hot keys have no other that is as hot"
    assert windows(["needles"], "after", 2, 1, 512) == [line for line in some if line["task"] == "needles"][:2]


def test_wrong_arguments_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["--out", str(tmp_path / "w.jsonl")]
    for given, message in (
        ([*out, "-n", "0"], "-n must be at least 1, got 0"),
        ([*out, "--tasks", "passkey", "--mode", "second"], "must have something else to ask for"),
        ([*out, "--tasks", "nothing"], "invalid choice: 'nothing'"),
        ([*out, "--length", "9"], "must be from"),
        (["--out", str(tmp_path / "none" / "w.jsonl")], "No such file or directory"),
    ):
        with pytest.raises(SystemExit):
            main(given)
        assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
