"""Prompts: the same seed gives the same prompt, and the answer is where the docstring says."""

from __future__ import annotations

import re
from collections.abc import Callable
from random import Random

import pytest

import kvpolicy
from kvpolicy_eval.data.tasks import LENGTHS, tasks
from kvpolicy_lm_eval.data import prompts
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
def test_same_seed_gives_same_prompt(name: str) -> None:
    make = GENERATORS[name]
    assert make(Random(3)) == make(Random(3))
    assert len({make(Random(seed)) for seed in range(5)}) == 5


@pytest.mark.parametrize("name", GENERATORS)
def test_prompt_ends_with_an_open_question(name: str) -> None:
    prompt, answer = GENERATORS[name](Random(1))
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
        (lambda: prompts.recall(Random(0), 0), "number of records must be from 1 to 256, got 0"),
        (lambda: prompts.multi_query(Random(0), 5, 6), "number of queries must be from 1 to 5, got 6"),
        (lambda: prompts.few_shot(Random(0), 1, 3, 10), "number of classes must be from 2 to 6, got 1"),
        (lambda: prompts.few_shot(Random(0), 2, 9, 10), "number of shots must be from 1 to 8, got 9"),
        (lambda: prompts.hot_keys(Random(0), 3, 4, 9, 2), "number of hot keys must be from 1 to 3, got 4"),
        (lambda: prompts.hot_keys(Random(0), 9, 4, 3, 2), "number of asks must be from 4"),
    ],
)
def test_impossible_sizes_are_refused(call: Callable[[], object], message: str) -> None:
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
