"""Requests are grouped by the tokens that their contexts begin with, which are held once; costs are summed."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
import torch
from lm_eval.api.instance import Instance

import kvpolicy
from kvpolicy import KVPolicyError
from kvpolicy_lm_eval.data import prompts
from kvpolicy_lm_eval.prefixes import (
    PREFIX_TOKENS,
    behind_prefix,
    check_processes,
    group_by_prefix,
    read_least,
)
from kvpolicy_lm_eval.scoring import Piece, reported_lengths, split, split_behind, with_prefixes
from kvpolicy_lm_eval.stats import Stats, Tally
from tests.lm_eval.helpers import instances


def partitions(items: list[int]) -> Iterator[list[list[int]]]:
    """All ways to divide a list into groups."""
    if not items:
        yield []
        return
    for rest in partitions(items[1:]):
        yield [[items[0]], *rest]
        for number, group in enumerate(rest):
            yield [*rest[:number], [items[0], *group], *rest[number + 1 :]]


def saved(contexts: list[tuple[int, ...]], groups: list[list[int]], least: int) -> int:
    """Tokens that are not prefilled again; a group with a shorter prefix than `least` is not allowed."""
    total = 0
    for group in groups:
        size = min((len(contexts[member]) for member in group), default=0)
        while len({contexts[member][:size] for member in group}) > 1:
            size -= 1
        if len(group) > 1 and size < least:
            return -1
        total += (len(group) - 1) * size
    return total


def test_groups_save_nearly_as_much_as_the_best_ones() -> None:
    """Of all ways to divide a few contexts; nearly, since a node keeps the groups that its children made."""
    totals = [0, 0]
    for seed in range(60):
        dice = Random(seed)
        least = dice.randint(1, 3)
        stem = [dice.randint(0, 1) for _ in range(6)]
        ends = [[dice.randint(0, 1) for _ in range(dice.randint(0, 4))] for _ in range(6)]
        contexts = [tuple(stem[: dice.randint(0, 6)] + end) for end in ends]
        groups = group_by_prefix(contexts, least)
        assert sorted(member for group in groups for member in group.members) == list(range(6))
        for group in groups:
            assert all(contexts[member][: len(group.prefix)] == group.prefix for member in group.members)
            assert len(group.members) == 1 or len(group.prefix) >= least
        found = saved(contexts, [group.members for group in groups], least)
        best = max(saved(contexts, division, least) for division in partitions(list(range(6))))
        assert found >= 0.8 * best
        totals = [totals[0] + found, totals[1] + best]
    assert totals[0] >= 0.98 * totals[1]


def test_documents_behind_the_same_instruction_are_groups_of_their_own() -> None:
    one = tuple(range(10)) + (20,) * 90
    other = tuple(range(10)) + (30,) * 90
    contexts = [(*one, 1), (*other, 1), (*one, 2), (*other, 2), (*range(10), 7), (*range(10), 8)]
    groups = group_by_prefix(contexts, least=5)
    assert [group.members for group in groups] == [[0, 2], [1, 3], [4, 5]]
    assert [len(group.prefix) for group in groups] == [100, 100, 10]


def test_many_contexts_that_continue_each_other() -> None:
    """A chain of prefixes is as deep as it is long, which no recursion could follow."""
    contexts = [tuple(range(size)) for size in range(1, 1500)]
    groups = group_by_prefix(contexts, least=3)
    assert sorted(member for group in groups for member in group.members) == list(range(1499))


def test_known_prefixes_are_kept() -> None:
    """Also by one context alone, and by those that shared nothing; the others find theirs."""
    contexts = [(1, 2, 3), (1, 2, 4), (1, 2, 5), (1, 2, 6), (1, 2, 3, 4), (7, 8, 9)]
    assert group_by_prefix(contexts, 2) == [((1, 2), [0, 1, 2, 3, 4]), ((), [5])]
    assert group_by_prefix(contexts, 2, [0, 2, None, None, 3, 1]) == [
        ((), [0]),
        ((1, 2), [1]),
        ((1, 2), [2, 3]),
        ((1, 2, 3), [4]),
        ((7,), [5]),
    ]
    assert group_by_prefix(contexts, 2, [0] * 6) == [((), [number]) for number in range(6)]


def test_what_the_argument_may_be() -> None:
    assert [read_least(value) for value in (False, True, 1, 700)] == [0, PREFIX_TOKENS, 1, 700]
    for value in (0, -3, 2.5, "yes", None):
        with pytest.raises(KVPolicyError, match="group_by_prefix must be true, false or the minimum length"):
            read_least(value)


@pytest.mark.parametrize("holdback", [0, 1, 3])
def test_requests_are_split_behind_their_common_prefix(holdback: int) -> None:
    """Nothing that is held back is in a prefix, nor the last token of a context."""
    requests = [
        (None, [1, 2, 3, 4, 5], [6]),
        (None, [1, 2, 3, 4, 5], [7, 8]),
        (None, [1, 2, 9, 9, 9], [9]),
        (None, [4], [5]),
    ]
    shared, alone = split_behind(split(requests, max_length=20, holdback=holdback), 2, holdback, [None] * 4)
    end = 5 - max(holdback, 1)
    pieces = {piece.request: (prefix, piece) for prefix, some in shared for piece in some}
    for number, (prefix, piece) in pieces.items():
        _, context, answer = requests[number]
        assert prefix == tuple(context[: len(prefix)]) and 2 <= len(prefix) <= end
        assert piece == Piece(number, tuple((context + answer)[len(prefix) :]), len(answer))
    assert {0, 1} <= {*pieces}
    assert {piece.request for some in alone.values() for piece in some} == {0, 1, 2, 3} - {*pieces}


def test_padding_moves_behind_the_prefix() -> None:
    context = torch.tensor([[0, 0, 5, 6, 1], [5, 6, 1, 2, 3]])
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    moved = behind_prefix(context, mask, (5, 6), 9)
    assert moved is not None
    assert moved[0].tolist() == [[5, 6, 9, 9, 1], [5, 6, 1, 2, 3]]
    assert moved[1].tolist() == [[1, 1, 0, 0, 1], [1, 1, 1, 1, 1]]
    assert behind_prefix(context, mask, (5, 1), 9) is None
    assert behind_prefix(context, mask, (5, 6, 1), 9) is None, "a row needs a token behind the prefix"
    assert behind_prefix(context, None, (5, 6), 9) is None


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """Three questions about each of two documents, and one about another."""
    found: list[str] = []
    for seed, count in ((0, 3), (1, 3), (2, 1)):
        prompt, _ = prompts.recall(Random(seed), 24)
        document, _, _ = prompt.rpartition("\n")
        found += [f"{document}\n{name}=" for name in ("tiger", "lion", "wolf")[:count]]
    return [found[number] for number in (0, 3, 6, 1, 4, 2, 5)]


@pytest.fixture(scope="module")
def questions(texts: list[str]) -> list[Instance]:
    return instances("generate_until", [(text, {"until": ["\n"], "max_gen_toks": 6}) for text in texts])


@pytest.fixture(scope="module")
def choices(texts: list[str]) -> list[Instance]:
    return instances("loglikelihood", [(text, answer) for text in texts for answer in ("1234", "7")])


@pytest.mark.parametrize("batch_size", [1, 4])
def test_an_exact_policy_answers_as_without_groups(
    make: Any, questions: list[Instance], choices: list[Instance], batch_size: int
) -> None:
    """In the order of the requests, whatever their groups."""
    plain = make("full", batch_size=batch_size)
    grouped = make("full", batch_size=batch_size, group_by_prefix=32)
    assert grouped.generate_until(questions, disable_tqdm=True) == plain.generate_until(questions, disable_tqdm=True)
    found, want = (lm.loglikelihood(choices, disable_tqdm=True) for lm in (grouped, plain))
    torch.testing.assert_close(
        torch.tensor([a for a, _ in found]), torch.tensor([a for a, _ in want]), atol=1e-4, rtol=1e-5
    )
    assert [b for _, b in found] == [b for _, b in want]


@pytest.fixture
def forks(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """How many rows each prefix is given to, and how long it is."""
    made: list[tuple[int, int]] = []
    fork = kvpolicy.PolicyCache.fork

    def noted(self: Any, rows: Any = None, **kwargs: Any) -> Any:
        made.append((len(rows), self.get_seq_length()))
        return fork(self, rows, **kwargs)

    monkeypatch.setattr(kvpolicy.PolicyCache, "fork", noted)
    return made


def test_each_document_is_prefilled_once(
    make: Any, questions: list[Instance], choices: list[Instance], forks: list[tuple[int, int]]
) -> None:
    """And compressed once, without the questions about it."""
    lm = make("snapkv@0.4", batch_size=8, group_by_prefix=32)
    lm.generate_until(questions, disable_tqdm=True)
    assert [rows for rows, _ in forks] == [3, 3]
    forks.clear()
    lm.loglikelihood(choices, disable_tqdm=True)
    assert sorted(rows for rows, _ in forks) == [2, 6, 6]
    costs = lm.get_model_info()["kvpolicy"]
    assert costs["group_by_prefix"] == 32
    plain = make("snapkv@0.4", batch_size=8)
    plain.generate_until(questions, disable_tqdm=True)
    before = plain.get_model_info()["kvpolicy"]["tasks"]["task/generate_until"]
    now = costs["tasks"]["task/generate_until"]
    assert now["kv_bytes"] < before["kv_bytes"] and now["full_kv_bytes"] == before["full_kv_bytes"]


def test_questions_of_different_lengths_share_the_text_that_is_compressed_before_them(
    make: Any, texts: list[str], forks: list[tuple[int, int]]
) -> None:
    """Each document is prefilled once; a prompt without a question that is held back is no part of its group."""
    documents = sorted({text.rpartition("\n")[0] for text in texts})[:2]
    asked = [(document, name) for name in ("a tiger=", "a lion, a wolf=", "a lion =") for document in documents]
    requests = instances("generate_until", [(f"{a}\n{b}", {"until": ["\n"], "max_gen_toks": 6}) for a, b in asked])
    for request, (_, question) in zip(requests, asked, strict=True):
        request.doc = {"held_back": question, "beyond": True}
    requests += instances("generate_until", [(text, {"until": ["\n"], "max_gen_toks": 6}) for text in documents])
    plain = make("full", batch_size=4).generate_until(requests, disable_tqdm=True)
    assert forks == []
    grouped = make("full", batch_size=4, group_by_prefix=32)
    assert grouped.generate_until(requests, disable_tqdm=True) == plain
    # The questions begin alike, and are no part of the prefix even so.
    assert sorted(forks) == sorted((3, len(grouped.tok_encode(f"{document}\n"))) for document in documents)


def test_a_prompt_that_was_cut_is_answered_alone(make: Any, questions: list[Instance]) -> None:
    """lm-eval cuts the beginning of prompts that do not fit, which then have another prefix."""
    lm = make("full", group_by_prefix=32, max_length=80)
    plain = make("full", max_length=80)
    assert all(len(lm.tok_encode(request.args[0])) > 80 - 6 for request in questions)
    assert lm.generate_until(questions, disable_tqdm=True) == plain.generate_until(questions, disable_tqdm=True)


def about(document: str, questions: list[str], held_back: bool) -> list[Instance]:
    """Questions about a document, which are held back or compressed with it."""
    requests = instances(
        "generate_until", [(document + end, {"until": ["\n"], "max_gen_toks": 6}) for end in questions]
    )
    for request, end in zip(requests, questions, strict=True):
        request.doc = {"held_back": end, "beyond": True} if held_back else {}
    return requests


@pytest.mark.parametrize("held_back", [False, True])
def test_a_prompt_that_was_cut_changes_no_answer_of_its_batch(make: Any, texts: list[str], held_back: bool) -> None:
    """The others still share their prefix, and the cut one holds back its own question, not the longest one."""
    document = texts[0].rpartition("\n")[0] + "\n"
    requests = about(document, ["?tiger=", "?wolf=", "?lion=12\n?wolf=4821\n?tiger=33\n?crow="], held_back)
    longest = len(make("full").tok_encode(requests[-1].args[0]))
    found: list[list[str]] = []
    sequences: list[int] = []
    for size in (1, 3):
        lm = make("snapkv@0.3", batch_size=size, group_by_prefix=16, max_length=longest + 4)
        found.append(lm.generate_until(requests, disable_tqdm=True))
        sequences.append(lm.stats.tallies["task/generate_until"].sequences)
    alone = make("snapkv@0.3", max_length=longest + 4).generate_until(requests[-1:], disable_tqdm=True)
    assert found[0] == found[1] and found[0][-1:] == alone and sequences == [3, 3]


def of_three_lengths(text: str) -> list[Instance]:
    document = text.rpartition("\n")[0] + "\n"
    return about(document, ["?tiger=", "?lion=12\n?wolf=", "?wolf=1\n?tiger=2\n?lion="], held_back=True)


@pytest.mark.parametrize("policy", ["full", "snapkv@0.5"])
def test_the_batch_size_is_measured_once_for_all_groups(
    make: Any, policy: str, texts: list[str], monkeypatch: Any
) -> None:
    requests = of_three_lengths(texts[0])
    lm = make(policy, batch_size="auto")
    measured: list[Any] = []
    monkeypatch.setattr(lm, "_detect_batch_size", lambda *some: measured.append(some) or 2)
    found, again = (lm.generate_until(requests, disable_tqdm=True) for _ in range(2))
    lm.loglikelihood_rolling(instances("loglikelihood_rolling", [(texts[0],)]), disable_tqdm=True)
    assert measured == [()] and lm.batch_size == "auto" and lm.batch_sizes == {0: 2}
    assert found == again == make(policy, batch_size=2).generate_until(requests, disable_tqdm=True)


def test_a_task_with_several_groups_has_one_bar(
    make: Any, texts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    requests = of_three_lengths(texts[0])
    lm = make("snapkv@0.5")
    hook = lm.cache_hook
    for some in (requests, instances("loglikelihood", [(one.args[0], "7") for one in requests])):
        for one, request in zip(some, requests, strict=True):
            one.doc = request.doc
        getattr(lm, some[0].request_type)(some)
        shown = capsys.readouterr().err
        assert f"Running {some[0].request_type} requests: 100%" in shown and "3/3" in shown
        assert "1/1" not in shown and lm.cache_hook is hook
        getattr(lm, some[0].request_type)(some, disable_tqdm=True)
        assert "Running" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("policy", "option", "values"),
    [
        ("snapkv@0.4", "group_by_prefix", (False, True, 32)),
        ("kvzip+tokenwise@0.4", "hold", ("plain", "codes")),  # prompts that waited in codes
        ("snapkv@0.4", "compile", (None, True)),
    ],
)
def test_answers_of_other_options_are_not_reused(make: Any, policy: str, option: str, values: tuple[Any, ...]) -> None:
    assert len({make(policy, **{option: value}).fingerprint for value in values}) == len(values)


def test_several_processes_are_refused() -> None:
    """They would have other groups, and wait for each other."""
    check_processes(0, 2)
    check_processes(256, 1)
    with pytest.raises(KVPolicyError, match="group_by_prefix must be false if several processes"):
        check_processes(256, 2)


def test_policies_that_read_a_part_are_refused_at_the_start(make: Any) -> None:
    with pytest.raises(KVPolicyError, match="Every slot must be read in a step"):
        make("full+quest:page=4:read=8", group_by_prefix=True)


REQUESTS = [(None, [1, 2, 3], [4]), (None, [1, 2, 3], [5, 6]), (None, [7], [8, 9]), (None, [1, 2, 3, 4, 5], [6])]


def test_split_shares_prefixes_longest_first():
    groups = split(REQUESTS, max_length=10, holdback=1)
    assert list(groups) == [(1, 2, 3, 4), (1, 2), ()]
    assert [(p.request, p.tokens, p.scored) for p in groups[1, 2]] == [(0, (3, 4), 1), (1, (3, 5, 6), 2)]


def test_split_cuts_on_the_left_like_lm_eval():
    (prefix, (piece,)), *_ = split([(None, [1, 2, 3, 4, 5], [6, 7])], max_length=4, holdback=1).items()
    assert (prefix, piece.tokens) == ((3, 4), (5, 6, 7))


@pytest.mark.parametrize("answer", [[], [1, 2, 3]])
def test_split_rejects_answers_that_cannot_be_scored(answer: list[int]):
    with pytest.raises(
        ValueError, match=f"An answer must have between 1 and 2 tokens to be scored, got {len(answer)};"
    ):
        split([(None, [1], answer)], max_length=2, holdback=1)


@pytest.mark.parametrize("holdback", [0, 1, 3, 9])
def test_with_prefixes_restores_the_requests(holdback: int):
    pieces = with_prefixes(split(REQUESTS, max_length=10, holdback=holdback))
    assert {p.request: p.tokens for p in pieces} == {i: (*c, *a) for i, (_, c, a) in enumerate(REQUESTS)}


def test_reported_lengths_are_those_of_the_caches():
    groups = split(REQUESTS, max_length=10, holdback=1)
    assert sorted(reported_lengths(groups, rolling=False)) == [2, 2, 4]  # [7] alone feeds two of its three tokens
    assert sorted(reported_lengths(groups, rolling=True)) == [2, 3, 4, 5]


def test_reports_means_per_sequence():
    tally = Tally(requests=3, prompt_tokens=90, new_tokens=10, seconds=2.0)
    tally.add_cache(2, 100, 400)
    tally.add_cache(1, 200, 500)
    report = tally.report()
    assert (report["kv_bytes"], report["full_kv_bytes"], report["kv_share"]) == (100, 300, 0.3333)
    assert (report["tokens_per_second"], report["new_tokens_per_second"]) == (50.0, 5.0)


def test_processes_are_summed():
    stats = Stats()
    stats.replace(
        [{"a": Tally(requests=1, seconds=1.0)}, {"a": Tally(requests=2, seconds=2.0), "b": Tally(requests=5)}]
    )
    assert {name: (t.requests, t.seconds) for name, t in stats.tallies.items()} == {"a": (3, 3.0), "b": (5, 0.0)}
