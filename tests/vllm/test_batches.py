"""Requests about documents beside each other and beside plain ones; one that cannot have its document fails alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvpolicy_vllm import prompt, read_document
from kvpolicy_vllm.documents import SALT
from tests.vllm.engines import BLOCK, about, answers, ask, free_blocks, plain, reasons, sampling, scheduler_of
from tests.vllm.models import POLICY, Answer, Served, answer, make_question, make_text, save, short

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

Request = tuple[Any, Any]
QUESTION = [5]


@pytest.fixture
def full_blocks(served: Served, tmp_path: Path) -> tuple[Path, Answer]:
    """A document that fills whole blocks, which no other test has, and the answer to a question of one token."""
    path = save(
        served.model, POLICY, make_text(served.model, 4 * BLOCK, len(str(tmp_path))), tmp_path / "d.safetensors"
    )
    assert read_document(path).kept == 2 * BLOCK
    return path, answer(served.model, POLICY, path, QUESTION)


REFUSED: dict[str, tuple[Callable[[list[int]], list[int]], dict[str, Any], dict[str, Any]]] = {
    "with another salt": (list, {"cache_salt": SALT + "0" * 64}, {}),
    "of one token without a name": (lambda ids: ids[:1], {}, {"document": None, "digest": None}),
    "of another text": (lambda ids: ids[::-1], {}, {}),
    "of a missing file": (list, {}, {"document": "/missing.safetensors"}),
    "with log probabilities": (list, {}, {"prompt_logprobs": 1}),
}
"""What is changed of a request: its prompt, its salt, its parameters or options; see tests/vllm/test_requests.py."""


def refusal(path: Path, llm: Any, case: str) -> Request:
    """A request with a question of two tokens that is refused; what is None is left out."""
    ids, salted, changes = REFUSED[case]
    text, params = prompt(path, [5, 6], llm)
    params = {name: value for name, value in (params | changes).items() if value is not None}
    options = {"prompt_logprobs": params.pop("prompt_logprobs")} if "prompt_logprobs" in params else {}
    return text | salted | {"prompt_token_ids": ids(text["prompt_token_ids"])}, sampling(params or None, **options)


@pytest.mark.parametrize("case", REFUSED)
def test_others_of_the_batch_answer(served: Served, llm: Any, case: str) -> None:
    before = free_blocks(llm)
    good = [about(*each, llm) for each in served.asked]
    bad = refusal(served.asked[0][0], llm, case)
    for _ in range(2):
        found = ask(llm, [bad, *good[:3], plain([5, 6]), bad, *good[3:], bad])
        assert [n for n, reason in enumerate(reasons(found)) if reason == "error"] == [0, 5, 9]
        assert not any(found[n].outputs[0].token_ids for n in (0, 5, 9))
        assert [[*found[n].outputs[0].token_ids] for n in (1, 2, 3, 6, 7, 8)] == short(served.wanted)
    assert free_blocks(llm) == before


@pytest.mark.parametrize("before", ["nothing", "beside", "answered"])
def test_a_salt_alone_reads_nothing_and_leaves_nothing(llm: Any, full_blocks: tuple[Path, Answer], before: str) -> None:
    """Its blocks have the tokens and the salt of the document, and no other request may share them.

    Also where everything but the last token is in the prefix cache.
    """
    path, wanted = full_blocks
    request = about(path, QUESTION, llm)
    poison = request[0], sampling()
    if before == "beside":
        found = ask(llm, [poison, request])
        assert reasons(found) == ["error", "length"]
        assert [*found[1].outputs[0].token_ids] == wanted.tokens
    elif before == "answered":
        assert short(answers(llm, [request])) == [wanted.tokens]
    assert reasons(ask(llm, [poison])) == ["error"]
    assert short(answers(llm, [request])) == [wanted.tokens]


def test_generated_placeholders_are_no_document(llm: Any, full_blocks: tuple[Path, Answer]) -> None:
    """A prompt of one token goes on with tokens that the request chooses."""
    path, wanted = full_blocks
    text, params = about(path, QUESTION, llm)
    ids = text["prompt_token_ids"]
    for end in range(1, BLOCK + 1):
        forced = sampling(tokens=1, allowed_token_ids=[ids[end]])
        assert reasons(ask(llm, [(text | {"prompt_token_ids": ids[:end]}, forced)])) == ["error"]
    assert short(answers(llm, [(text, params)])) == [wanted.tokens]


def test_an_edited_file(served: Served, llm: Any, tmp_path: Path) -> None:
    path = save(served.model, POLICY, make_text(served.model, 150, 8), tmp_path / "d.safetensors")
    question = make_question(served.model)
    request = about(path, question, llm)
    save(served.model, POLICY, make_text(served.model, 150, 9), path)
    good = about(*served.asked[0], llm)
    found = ask(llm, [request, good])
    assert reasons(found) == ["error", "length"]
    assert [*found[1].outputs[0].token_ids] == short(served.wanted)[0]
    wanted = answer(served.model, POLICY, path, question)
    assert short(answers(llm, [about(path, question, llm)])) == [wanted.tokens]


def _step_with(llm: Any, requests: list[Request], between: Callable[[], Any]) -> list[Any]:
    """Outputs of requests, where something happens between their admission and the step that loads."""
    for number, (text, params) in enumerate(requests):
        llm.llm_engine.add_request(f"step-{number}", text, params)
    between()
    done: dict[str, Any] = {}
    while llm.llm_engine.has_unfinished_requests():
        done |= {each.request_id: each for each in llm.llm_engine.step() if each.finished}
    return [done.get(f"step-{number}") for number in range(len(requests))]


def _break_bytes(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))


def _shorten(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


@pytest.mark.parametrize(("seed", "harm"), [(10, Path.unlink), (11, _break_bytes), (12, _shorten)])
def test_a_file_that_is_harmed_before_it_is_loaded(
    served: Served, llm: Any, tmp_path: Path, seed: int, harm: Callable[[Path], Any]
) -> None:
    path = save(served.model, POLICY, make_text(served.model, 150, seed), tmp_path / "d.safetensors")
    content = path.read_bytes()
    request = about(path, make_question(served.model), llm)
    before = free_blocks(llm)
    requests = [request, about(*served.asked[0], llm), request]
    found = _step_with(llm, requests, lambda: harm(path))
    assert reasons(found) == ["error", "length", "error"]
    assert [*found[1].outputs[0].token_ids] == short(served.wanted)[0]
    path.write_bytes(content)
    wanted = answer(served.model, POLICY, path, make_question(served.model))
    assert short(answers(llm, [request])) == [wanted.tokens]
    assert free_blocks(llm) == before


@pytest.mark.parametrize(("seed", "how"), [(13, "abort"), (14, "preempt")])
def test_blocks_of_a_failed_load_are_not_used_again(
    served: Served, llm: Any, tmp_path: Path, seed: int, how: str
) -> None:
    """Its request is gone before its failure is known: aborted by its client, or preempted."""
    path = save(served.model, POLICY, make_text(served.model, 150, seed), tmp_path / "d.safetensors")
    content = path.read_bytes()
    request = about(path, make_question(served.model), llm)
    wanted = answer(served.model, POLICY, path, make_question(served.model))
    core = llm.llm_engine.engine_core.engine_core
    scheduler = scheduler_of(llm)
    inner = core._process_aborts_queue

    def leave() -> None:
        core._process_aborts_queue = inner
        path.write_bytes(content)
        if how == "preempt":
            while scheduler.running:
                scheduler._preempt_request(scheduler.running.pop(), 0.0)
            return
        llm.llm_engine.abort_request(["step-0"])

    def harm() -> None:
        path.unlink()
        core._process_aborts_queue = leave

    (found,) = _step_with(llm, [request], harm)
    assert found is None or found.outputs[0].finish_reason == "error"
    assert short(answers(llm, [request])) == [wanted.tokens]


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
