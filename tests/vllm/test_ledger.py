"""The ledger of prompts: what workers do in each step, how many may be on their way, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvpolicy_vllm.documents import Library
from kvpolicy_vllm.ledger import PATIENCE, LastToken, Ledger, Part, Saving, Work
from kvpolicy_vllm.prompts import first_request, second_request
from kvpolicy_vllm.requests import Load, Requests
from tests.vllm.compressed import recipe_of
from tests.vllm.models import Saved
from tests.vllm.test_requests import BLOCK, Request

RECIPE = recipe_of("window@0.5", prefills=2)
IDS = [*range(3, 103)]
KEPT = 50
BLOCKS = (9, 2, 7, 5, 4, 1, 3)


class Scheduler:
    """What a scheduler does with requests of prompts."""

    def __init__(self, saved: Saved) -> None:
        self.time = 0.0
        self.ledger = Ledger(RECIPE, BLOCK, lambda: self.time)
        self.requests = Requests(saved.engine, Library(None, verify=False), BLOCK, self.ledger)
        self.blocks: dict[str, tuple[int, ...]] = {}

    def first(self, name: str, **changes: Any) -> Any:
        return self._admitted(*first_request(IDS, name), **changes)

    def second(self, name: str, **changes: Any) -> Any:
        return self._admitted(*second_request(IDS, KEPT, name), **changes)

    def _admitted(self, text: Any, params: Any, **changes: Any) -> Any:
        text |= changes
        request: Any = Request(text["prompt_token_ids"], text["cache_salt"], params)
        request.num_computed_tokens = 0
        self.requests.admit(request)
        return request

    def begin(self, request: Any, computed: int = 0, blocks: tuple[int, ...] = BLOCKS) -> int | None:
        """Begin a request, if it may; its tokens from outside."""
        found = self.requests.matched(request, computed)
        if found is not None:
            self.blocks[request.request_id] = blocks
            self.requests.allocated(request, blocks, found)
            request.num_computed_tokens = computed + found
        return found

    def step(self, tokens: dict[Any, int], preempted: tuple[Any, ...] = ()) -> Work:
        scheduled = {request.request_id: count for request, count in tokens.items()}
        found = self.ledger.work(scheduled, [each.request_id for each in preempted], self.blocks.__getitem__)
        for request, count in tokens.items():
            request.num_computed_tokens += count
        return found

    def end(self, request: Any, status: str = "FINISHED_LENGTH_CAPPED") -> None:
        request.status = SimpleNamespace(name=status)
        self.requests.forget(request)

    def ready(self, name: str) -> None:
        """Prefill a prompt."""
        request = self.first(name)
        assert self.begin(request) == 0
        self.step({request: len(IDS)})
        self.end(request)

    def refusal(self, request: Any) -> str:
        assert self.requests.matched(request, 0) == 1
        self.requests.allocated(request, (1,), 1)
        (load,) = self.requests.take()
        return load.reason


@pytest.fixture
def scheduler(saved: Saved) -> Scheduler:
    return Scheduler(saved)


def test_a_prompt_is_prefilled_and_then_loaded(scheduler: Scheduler) -> None:
    first = scheduler.first("a")
    assert scheduler.begin(first) == 0 and scheduler.requests.take() == []
    assert scheduler.step({first: 40}) == Work([Part("a", 100, 0, 40, 9 * BLOCK, BLOCKS)])
    assert scheduler.step({first: 60}) == Work([Part("a", 100, 40, 60, 7 * BLOCK + 8, BLOCKS)])
    assert scheduler.step({first: 1}) == Work()  # a generated token
    scheduler.end(first, "FINISHED_STOPPED")
    second = scheduler.second("a")
    assert scheduler.begin(second, 16, (8, 6, 5, 4)) == 33
    assert scheduler.requests.take() == [Load(second.request_id, "", "", 49, 16, (8, 6, 5, 4), prompt="a")]
    assert scheduler.step({second: 1}) == Work(last_tokens=[LastToken("a", 4 * BLOCK + 1, 8)])
    assert scheduler.step({second: 1}) == Work()
    scheduler.end(second)
    assert scheduler.step({}) == Work(dropped=["a"])
    assert scheduler.step({}) == Work() and not len(scheduler.ledger) and not scheduler.requests._known


def test_a_preempted_answer_is_saved_and_loaded_again(scheduler: Scheduler) -> None:
    scheduler.ready("a")
    second = scheduler.second("a")
    scheduler.begin(second)
    scheduler.step({second: 1})
    assert scheduler.step({}, (second,)) == Work(savings=[Saving("a", 49, BLOCKS)])
    assert scheduler.step({}, (second,)) == Work()
    assert scheduler.begin(second, 0, (11, 12, 13, 14)) == 49
    assert scheduler.step({second: 3}) == Work(last_tokens=[LastToken("a", 14 * BLOCK + 1, 11)])
    # Preempted and begun in the same step.
    assert scheduler.begin(second, 32, (11, 12, 3, 4)) == 17
    wanted = Work(last_tokens=[LastToken("a", 4 * BLOCK + 1, 11)], savings=[Saving("a", 49, (11, 12, 13, 14))])
    assert scheduler.step({second: 3}, (second,)) == wanted
    # All of it is in the prefix cache still.
    assert scheduler.begin(second, 64, (11, 12, 3, 4)) == 0
    assert scheduler.step({second: 3}).last_tokens == []


def test_a_preempted_prefill_begins_again(scheduler: Scheduler) -> None:
    first = scheduler.first("a")
    scheduler.begin(first)
    scheduler.step({first: 40})
    assert scheduler.step({}, (first,)) == Work()
    assert scheduler.begin(first, 32, (1, 2, 3)) == 0
    assert scheduler.step({first: 8}) == Work([Part("a", 100, 32, 8, 3 * BLOCK, (1, 2, 3))])


def test_few_prompts_are_on_their_way(scheduler: Scheduler) -> None:
    firsts = [scheduler.first(name) for name in "abc"]
    assert [scheduler.begin(each) for each in firsts] == [0, 0, None]
    scheduler.step({firsts[0]: 100, firsts[1]: 50})
    scheduler.end(firsts[0])
    assert scheduler.begin(firsts[2]) is None  # the first one waits for its second request
    second = scheduler.second("a")
    assert scheduler.begin(firsts[2]) is None  # and now for blocks
    assert scheduler.begin(second) == 49 and scheduler.begin(firsts[2]) == 0
    fourth = scheduler.first("d")
    scheduler.end(firsts[1], "FINISHED_ABORTED")
    assert scheduler.step({}, (second,)).savings  # held beside the blocks again
    assert scheduler.begin(fourth) is None
    scheduler.end(firsts[2], "FINISHED_ABORTED")
    assert scheduler.begin(fourth) == 0


@pytest.mark.parametrize("status", ["FINISHED_ABORTED", "FINISHED_ERROR", "FINISHED_IGNORED"])
def test_what_has_no_answer_is_dropped(scheduler: Scheduler, status: str) -> None:
    first = scheduler.first("a")
    scheduler.end(first, status)
    assert scheduler.step({}).dropped == ["a"]
    scheduler.ready("b")
    second = scheduler.second("b")
    scheduler.end(second, status)
    scheduler.end(second, status)
    assert scheduler.step({}).dropped == ["b"] and not len(scheduler.ledger)


def test_prompts_wait_for_some_time_only(scheduler: Scheduler) -> None:
    scheduler.ready("a")
    scheduler.time += PATIENCE
    scheduler.ready("b")
    assert scheduler.step({}) == Work()
    third = scheduler.first("c")
    assert scheduler.begin(third) is None
    scheduler.time += 1
    assert scheduler.begin(third) == 0
    assert scheduler.step({}).dropped == ["a"]
    assert "must be ready" in scheduler.refusal(scheduler.second("a"))
    scheduler.time += PATIENCE
    assert scheduler.step({}).dropped == ["b"]
    assert len(scheduler.ledger) == 1  # a prefill takes as long as it takes


def test_a_load_that_fails_ends_the_request(scheduler: Scheduler) -> None:
    scheduler.ready("a")
    second = scheduler.second("a")
    scheduler.begin(second)
    scheduler.requests.take()
    assert scheduler.requests.failed({2}) == {*BLOCKS[1:]}
    assert "could not be loaded" in scheduler.refusal(second)
    scheduler.end(second, "FINISHED_ERROR")
    assert scheduler.step({}).dropped == ["a"]


def test_other_requests_are_refused(saved: Saved, scheduler: Scheduler) -> None:
    salts = [first_request(IDS, name)[0]["cache_salt"] for name in "ab"]
    salts.append(second_request(IDS, KEPT, "a")[0]["cache_salt"])  # their blocks are shared with nobody
    assert len({*salts}) == 3 and all(len(salt) <= 128 and salt.isalnum() for salt in salts)
    assert "unique name" in scheduler.refusal(scheduler._admitted(*first_request(IDS, "x")[:1], {"prefill": 5}))
    scheduler.ready("a")
    assert "unique name" in scheduler.refusal(scheduler.first("a"))
    assert "salt of its own" in scheduler.refusal(scheduler.first("b", cache_salt="mine"))
    assert "must be longer than its budget" in scheduler.refusal(scheduler.first("b", prompt_token_ids=[5, 6]))
    assert "must be ready" in scheduler.refusal(scheduler.second("b"))
    assert "salt of its own" in scheduler.refusal(scheduler.second("a", cache_salt=salts[0]))
    assert "49 placeholders" in scheduler.refusal(scheduler.second("a", prompt_token_ids=IDS))
    second = scheduler.second("a")
    assert scheduler.begin(second) == 49 and len(scheduler.requests.take()) == 1
    assert "used once" in scheduler.refusal(scheduler.second("a"))
    plain = Request([5, 6], second.cache_salt)
    scheduler.requests.admit(plain)
    assert "cache salt of a document" in scheduler.refusal(plain)
    assert len(scheduler.ledger) == 1
    scheduler.requests = Requests(saved.engine, Library(None, verify=False), BLOCK)  # without a policy
    for request in (scheduler.first("a"), scheduler.second("a")):
        assert "must have a policy" in scheduler.refusal(request)


LOGPROBS = "no log probabilities"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"lora": object()}, "without an adapter"),
        ({"sampling": SimpleNamespace(prompt_logprobs=1)}, LOGPROBS),
        ({"sampling": SimpleNamespace(prompt_logprobs=None, prompt_logprob_token_ids=[[5]])}, LOGPROBS),
    ],
    ids=["adapter", "best tokens", "given tokens"],
)
def test_adapters_and_logprobs_are_refused(scheduler: Scheduler, fields: dict[str, Any], message: str) -> None:
    text, params = first_request(IDS, "a")
    request = Request(text["prompt_token_ids"], text["cache_salt"], params, **fields)
    scheduler.requests.admit(request)
    assert message in scheduler.refusal(request) and not len(scheduler.ledger)
