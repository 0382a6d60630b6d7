"""The place of the question: what is compressed, what is fed afterwards, and a second question that can be answered."""

from __future__ import annotations

from random import Random

import pytest

from kvpolicy_eval.data.tasks import tasks
from kvpolicy_lm_eval.data.modes import place, second_question
from kvpolicy_lm_eval.data.prompts import split
from kvpolicy_lm_eval.data.words import CATEGORIES

TASKS = tasks(512)


@pytest.mark.parametrize("task", TASKS)
def test_what_is_fed_follows_what_is_compressed(task: str) -> None:
    prompt = TASKS[task](Random(3))
    document, question = split(prompt[0])
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
        document = split(prompt[0])[0]
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


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="mode must be one of inside, after, second, beyond, got 'before'; try after"):
        place(("a=1\n?a=", "1"), "before")
