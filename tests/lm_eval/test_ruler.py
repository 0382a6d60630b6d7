"""kvpress' leaderboard: RULER with a question that is not compressed, from the Hub or from our own generators."""

from __future__ import annotations

import copy
from random import Random
from typing import Any

import pytest
from datasets import Dataset

from kvpolicy import KVPolicyError
from kvpolicy_lm_eval import ruler
from kvpolicy_lm_eval.data import ruler as prompts
from kvpolicy_lm_eval.held_back import HeldBack, find_held_back
from tests.lm_eval.helpers import load, manager, simple_evaluate

GROUP = "kvpolicy_ruler_4096"
SINGLE = ("niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multikey_2", "niah_multikey_3")
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{% if not (loop.last and message.role == 'assistant') %}<end>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def words(text: str) -> int:
    return len(text.split())


@pytest.fixture(autouse=True)
def forget():
    """The answer of the Hub is remembered; each test asks again."""
    ruler._try_dataset.cache_clear()
    yield
    ruler._try_dataset.cache_clear()


def tasks(*names: str, **metadata: Any) -> dict[str, Any]:
    return load(manager(**metadata), *(f"{GROUP}_{name}" for name in names))


@pytest.mark.parametrize("task", prompts.TASKS)
def test_prompts_fill_their_length(task: str) -> None:
    first, *others = prompts.prompts(task, 1200, 4, 0, words)
    lengths = [words(each.context + each.question + each.prefix) for each in (first, *others)]
    room = 1200 - prompts.new_tokens(task)
    assert max(lengths) <= room and min(lengths) >= 0.85 * room
    assert [first] == prompts.prompts(task, 1200, 1, 0, words) != prompts.prompts(task, 1200, 1, 1, words)


@pytest.mark.parametrize("task", prompts.TASKS)
def test_the_context_alone_has_the_answers(task: str) -> None:
    for each in prompts.prompts(task, 1200, 3, 0, words):
        assert each.answers and len(set(each.answers)) == len(each.answers)
        for answer in each.answers:
            assert answer in each.context
            assert answer not in each.question + each.prefix


@pytest.mark.parametrize("task", SINGLE)
def test_a_needle_is_hidden_once(task: str) -> None:
    for each in prompts.prompts(task, 1200, 3, 0, words):
        key = each.question.partition(" for ")[2].partition(" mentioned")[0]
        (told,) = [line for line in each.context.split("One of the special magic ") if f" for {key} is" in line]
        assert told.partition(" is: ")[2].startswith(f"{each.answers[0]}.")


def test_many_needles() -> None:
    values = prompts.TASKS["niah_multivalue"](Random(0), 20)
    assert len(values.answers) == 4 and values.context.count("One of the special magic numbers for ") == 4
    assert values.question.startswith("What are all the special magic numbers for ")
    queries = prompts.TASKS["niah_multiquery"](Random(0), 20)
    keys = queries.question.partition(" for ")[2].partition(" mentioned")[0].replace(" and ", " ").split(", ")
    assert [line for key in keys for line in [queries.context.partition(f"for {key.strip()} is: ")[2][:7]]] == (
        queries.answers
    )


@pytest.mark.parametrize(("haystack", "lines", "needles"), [("noise", 9, 2), ("needles", 9, 8), ("prose", 2, 2)])
def test_a_haystack_has_its_size(haystack: Any, lines: int, needles: int) -> None:
    """Prose is one paragraph; the first line is the task."""
    drawn = prompts.needles(Random(0), 6, haystack, values=2)
    assert drawn.context.count("\n") == lines
    assert drawn.context.count("One of the special magic numbers for ") == needles


def test_a_chain_is_followed_from_its_value() -> None:
    drawn = prompts.TASKS["vt"](Random(3), 12)
    assigned: dict[str, str] = {}
    for line in drawn.context.rpartition("Memorize")[2].splitlines():
        if line.startswith("VAR "):
            name, value = line.removeprefix("VAR ").split(" = ")
            assigned[name] = assigned[value.removeprefix("VAR ")] if value.startswith("VAR ") else value
    asked = drawn.question.partition("value ")[2].partition(" in")[0]
    assert [name for name, value in assigned.items() if value == asked] == drawn.answers


def test_a_list_of_400_entries_has_the_counts_of_the_paper() -> None:
    for size, common, others in ((399, 19, 1), (400, 30, 3)):
        drawn = prompts._counted(Random(1), size)  # pyright: ignore[reportPrivateUsage]
        entries = drawn.context.rpartition("often.\n")[2].split()[1::2]
        counts = {word: entries.count(word) for word in set(entries)}
        assert {counts.pop(word) for word in drawn.answers} == {common} and {*counts.values()} == {others}


@pytest.mark.parametrize(("task", "size"), [("cwe", 40), ("cwe", 900), ("cwe", 3000), ("fwe", 60), ("fwe", 900)])
def test_asked_words_are_the_most_frequent(task: str, size: int) -> None:
    drawn = prompts.TASKS[task](Random(size), size)
    text = drawn.context.rpartition("\n" if task == "fwe" else "often.\n")[0 if task == "fwe" else 2]
    if task == "cwe":
        assert text.split()[::2] == [f"{number}." for number in range(1, len(text.split()) // 2 + 1)]
    entries = text.split("words. ")[1].split() if task == "fwe" else text.split()[1::2]
    assert len(entries) == pytest.approx(size, rel=0.2)
    counts = {word: entries.count(word) for word in set(entries)}
    ranked = sorted(counts, key=lambda word: -counts[word])
    first = ranked.index("...") + 1 if task == "fwe" else 0
    top = ranked[first : first + len(drawn.answers)]
    assert set(top) == set(drawn.answers) and counts[top[-1]] > counts[ranked[first + len(top)]]


@pytest.mark.parametrize(("size", "towns", "others"), [(1, 2, 0), (4, 2, 0), (41, 20, 1), (300, 120, 60)])
def test_up_to_240_documents_are_about_towns(size: int, towns: int, others: int) -> None:
    lines = prompts.documents(Random(0), size, 1).context.split("\nDocument ")[1:]
    about = [line for line in lines if "lies on the river" in line or "is the mayor of" in line]
    assert (len(about), len(lines)) == (2 * towns, 2 * towns + others)


def test_a_question_about_two_documents_takes_both() -> None:
    drawn = prompts.TASKS["qa_2"](Random(1), 30)
    mayor = drawn.question.partition("mayor is ")[2].removesuffix(" lie? ")
    town = drawn.context.partition(f"\n{mayor} is the mayor of the town of ")[2].partition(".")[0]
    assert f"The town of {town} lies on the river {drawn.answers[0]}." in drawn.context
    assert town not in drawn.question


def test_a_length_that_is_too_small_is_said() -> None:
    with pytest.raises(KVPolicyError, match=r"length must be more than a prompt of vt takes, got 60; try 120\."):
        ruler.documents("vt", 60, 1, 0)


@pytest.mark.parametrize(
    ("answer", "of_all", "of_any"),
    [
        ("They are ABC and def.", 1.0, 1.0),
        ("abc", 0.5, 1.0),
        ("A\x00B\nC", 0.5, 1.0),  # kvpress removes control characters
        ("none", 0.0, 0.0),
    ],
)
def test_scores_are_those_of_kvpress(answer: str, of_all: float, of_any: float) -> None:
    document = {"answers": ["ABC", "DEF"]}
    assert ruler.score(document, [answer]) == {"string_match": of_all}
    assert ruler.score_any(document, [answer]) == {"string_match": of_any}


ROWS: dict[str, list[Any]] = {
    "context": ["Text one.\n", "Text two.\n"],
    "question": ["What? ", "Who? "],
    "answer_prefix": ["It is", "Answer:"],
    "answer": [["1", "2"], ["Ann"]],
    "task": ["niah_multivalue", "qa_1"],
    "max_new_tokens": [128, 32],
}


def test_documents_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []

    def load(name: str, data_dir: str, split: str) -> Dataset:
        asked.append((name, data_dir, split))
        return Dataset.from_dict(ROWS)

    monkeypatch.setattr("datasets.load_dataset", load)
    found = tasks("niah_multivalue", "qa_1")
    assert asked == [("simonjegou/ruler", "4096", "test")]
    (values,) = found[f"{GROUP}_niah_multivalue"].test_docs()
    assert values["prompt"] == "Text one.\nWhat? " and values["answers"] == ["1", "2"] and values["source"] == "hub"
    (person,) = found[f"{GROUP}_qa_1"].test_docs()
    assert found[f"{GROUP}_qa_1"].process_results(person, ["Ann, I think"]) == {"string_match": 1.0}
    assert tasks("qa_1", source="own", docs=1)[f"{GROUP}_qa_1"].test_docs()[0]["source"] == "own"
    assert len(asked) == 1


def test_a_renamed_column_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    renamed = {("answers" if name == "answer" else name): values for name, values in ROWS.items()}
    monkeypatch.setattr("datasets.load_dataset", lambda *_, **__: Dataset.from_dict(renamed))
    with pytest.raises(
        KVPolicyError, match=r"must have the columns context, .*, got none named answer; try source=own"
    ):
        ruler.documents("vt", 4096, 1, 0)


def test_without_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def fail(name: str, **_: Any) -> None:
        calls.append(name)
        raise ConnectionError("no route\nto the host")

    monkeypatch.setattr("datasets.load_dataset", fail)
    assert {each["source"] for task in ("vt", "qa_1") for each in ruler.documents(task, 4096, 1, 0)} == {"own"}
    with pytest.raises(KVPolicyError, match=r"ruler must be readable, got 'no route'; try source=own in --metadata"):
        ruler.documents("vt", 4096, 1, 0, source="hub")
    assert len(calls) == 1, "each attempt takes half a minute"
    with pytest.raises(KVPolicyError, match=r"source must be auto, hub or own, got 'web'; try auto\."):
        ruler.documents("vt", 4096, 1, 0, source="web")  # pyright: ignore[reportArgumentType]


def test_a_dataset_that_is_not_there_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only if the Hub cannot be reached, own documents take its place."""

    def fail(*_: Any, **__: Any) -> None:
        raise FileNotFoundError("Dataset 'ruler' doesn't exist on the Hub")

    monkeypatch.setattr("datasets.load_dataset", fail)
    with pytest.raises(KVPolicyError, match=r"must be readable, got \"Dataset 'ruler' doesn't exist on the Hub\"; try"):
        ruler.documents("vt", 4096, 1, 0)


def test_prompts_are_sized_by_the_tokenizer_of_the_model(tiny) -> None:
    documents = ruler.documents("niah_single_2", 700, 2, 0, pretrained="tiny-4k")
    assert documents == ruler.documents("niah_single_2", 700, 2, 0, pretrained=tiny[0])
    for each in documents:
        assert 500 < len(tiny[1](each["prompt"] + each["prefix"]).input_ids) <= 700 - 128


def test_all_but_the_context_is_fed_later(make, tiny) -> None:
    """As kvpress' pipeline divides a chat: it puts the question and the rest of the template behind the context."""
    tokenizer = copy.deepcopy(tiny[1])
    tokenizer.chat_template = TEMPLATE
    (name, task), *_ = tasks("niah_single_1", length=700, docs=1, source="own").items()
    for template, suffix in ((None, ""), (tokenizer.apply_chat_template, "<end>\n<assistant>")):

        def render(messages: Any, add_generation_prompt: bool = True, of: Any = template) -> str:
            return of(messages, tokenize=False, add_generation_prompt=add_generation_prompt)

        task.build_all_requests(
            limit=1,
            apply_chat_template=template is not None,
            chat_template=render if template else None,
            tokenizer_name=name,
        )
        (request,) = task.instances
        document = request.doc
        later = f"{document['held_back']}{suffix}{document['prefix']}"
        assert request.args[0].endswith(later)
        assert document["prompt"].endswith(document["held_back"])
        held = find_held_back("generate_until", request, make("h2o").tok_encode)
        assert held.beyond
        alone = len(tokenizer(later, add_special_tokens=False).input_ids)
        assert alone <= held.tokens <= alone + 1  # a token at the border is held back as a whole


def test_nothing_is_held_back_of_other_documents() -> None:
    request = type("Request", (), {"doc": {"held_back": "b"}, "args": ("a b",)})
    assert find_held_back("generate_until", request, list) == HeldBack(1, beyond=False)  # pyright: ignore[reportArgumentType]


def run(lm: Any, names: list[str], docs: int, **metadata: Any) -> dict[str, Any]:
    return simple_evaluate(
        model=lm,
        tasks=names,
        task_manager=manager(docs=docs, source="own", **metadata),
        limit=docs,
        gen_kwargs={"max_gen_toks": 2},
        bootstrap_iters=0,
    )


def test_four_documents(make) -> None:
    found = run(make("random@0.5"), [f"{GROUP}_niah_single_1", f"{GROUP}_fwe", f"{GROUP}_qa_1"], 4, length=700)
    costs = found["config"]["kvpolicy"]["tasks"]
    assert [cost["requests"] for cost in costs.values()] == [4, 4, 4]
    for cost in costs.values():
        assert 0.52 < cost["kv_share"] < 0.75  # half of the context, and all of the question


@pytest.mark.heavy
def test_the_group_has_the_mean_of_thirteen_tasks(make) -> None:
    found = run(make("random@0.5"), [GROUP], 4, length=1200)
    names = [f"{GROUP}_{name}" for name in prompts.TASKS]
    assert sorted(found["results"]) == sorted([GROUP, *names])
    scores = [found["results"][name]["string_match,none"] for name in names]
    assert found["results"][GROUP]["string_match,none"] == pytest.approx(sum(scores) / 13)


def test_the_group_is_complete() -> None:
    found = load(manager(length=1200, docs=1, source="own"), GROUP)
    assert sorted(found) == sorted(f"{GROUP}_{name}" for name in prompts.TASKS)
    for name in prompts.TASKS:
        assert found[f"{GROUP}_{name}"].config.generation_kwargs["max_gen_toks"] == prompts.new_tokens(name)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["full", "snapkv:decode=grow@0.25"])
def test_four_documents_of_the_whole_length(policy: str) -> None:
    from kvpolicy_lm_eval.model import KVPolicyLM

    lm = KVPolicyLM(pretrained="tiny-4k", policy=policy)
    costs = run(lm, [GROUP], 4, pretrained="tiny-4k")["config"]["kvpolicy"]["tasks"]
    assert len(costs) == 13
    for cost in costs.values():
        assert cost["requests"] == 4 and cost["prompt_tokens"] > 4 * 3600
        # A quarter of the context, and all of the question and of the answer.
        assert 0.99 < cost["kv_share"] < 1.01 if policy == "full" else 0.25 < cost["kv_share"] < 0.3
