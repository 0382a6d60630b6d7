"""Requests about documents beside each other and beside plain ones."""

from __future__ import annotations

from typing import Any

import pytest

from kvpolicy_vllm import read_document
from tests.vllm.engines import BLOCK, about, answers, ask, free_blocks, plain, scheduler_of
from tests.vllm.models import RECORDS, Served, answer, make_question, make_text, short

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]


def test_plain_requests_in_the_same_batch(served: Served, llm: Any) -> None:
    questions = [make_question(served.model, record) for record in RECORDS]
    wanted = [answer(served.model, None, None, question).tokens for question in questions]
    requests: list[Any] = []
    for number, question in enumerate(questions):
        requests += [plain(question), about(*served.asked[number % len(served.asked)], llm)]
    found = short(answers(llm, requests))
    assert found[::2] == wanted
    assert found[1::2] == short([served.wanted[n % len(served.wanted)] for n in range(len(questions))])


def test_a_second_round_comes_from_the_prefix_cache(served: Served, llm: Any) -> None:
    requests = [about(*each, llm) for each in served.asked]
    first = ask(llm, requests)
    second = ask(llm, requests)
    for found in (first, second):
        assert [[*each.outputs[0].token_ids] for each in found] == short(served.wanted)
    kept = [read_document(path).kept for path, _ in served.asked]
    assert [each.num_cached_tokens for each in second] == kept


def test_several_samples(served: Served, llm: Any) -> None:
    found = ask(llm, [about(*each, llm, n=2, temperature=1e-5, seed=0) for each in served.asked[:2]])
    tokens = [[*sample.token_ids] for each in found for sample in each.outputs]
    assert tokens == [each for each in short(served.wanted[:2]) for _ in range(2)]


def test_aborted_requests_leave_nothing(served: Served, llm: Any) -> None:
    before = free_blocks(llm)
    for steps in range(3):
        for number, (text, params) in enumerate(about(*each, llm) for each in served.asked):
            llm.llm_engine.add_request(str(number), text, params)
        for _ in range(steps):
            llm.llm_engine.step()
        llm.llm_engine.abort_request([str(number) for number in range(len(served.asked))])
        while llm.llm_engine.has_unfinished_requests():
            llm.llm_engine.step()
        assert short(answers(llm, [about(*each, llm) for each in served.asked])) == short(served.wanted)
        assert free_blocks(llm) == before
    connector = scheduler_of(llm).connector
    assert not connector._requests._known and not connector._requests._computed


def test_a_penalty_sees_the_tokens_of_the_document(served: Served, llm: Any) -> None:
    """With a huge penalty, no token of the text is generated."""
    path, question = served.asked[0]
    (found,) = answers(llm, [about(path, question, llm, repetition_penalty=1e6, tokens=4)])
    assert not set(found.tokens) & {*make_text(served.model, 150, 0)}


def test_the_smallest_block_is_that_of_these_tests(llm: Any) -> None:
    assert llm.llm_engine.vllm_config.cache_config.block_size == BLOCK
