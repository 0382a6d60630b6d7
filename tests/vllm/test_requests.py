"""The requests of a scheduler: what is loaded for each, and that none that is refused touches others."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvpolicy_vllm import prompt, read_document
from kvpolicy_vllm.documents import SALT, Library
from kvpolicy_vllm.engine import Engine
from kvpolicy_vllm.requests import STEPS, Load, Requests
from tests.vllm.models import Saved, make_text, save

BLOCK = 16
NUMBERS = itertools.count()


class Request:
    """What the scheduler knows of a request."""

    def __init__(self, ids: Sequence[int] | None, salt: str | None = None, params: Any = None, **fields: Any) -> None:
        self.request_id = f"r{next(NUMBERS)}"
        self.prompt_token_ids = None if ids is None else [*ids]
        self._all_token_ids = [*(ids or [0, 0])]
        self.num_prompt_tokens = len(self._all_token_ids)
        self.cache_salt = salt
        self.kv_transfer_params = params
        self.lora_request = fields.get("lora")
        self.sampling_params: Any = fields.get("sampling", type("Sampling", (), {"prompt_logprobs": None}))
        self.skip_reading_prefix_cache = fields.get("skip", False)
        self.block_hashes: list[tuple[Any, ...]] = []
        self.update_block_hashes()

    @property
    def num_tokens(self) -> int:
        return len(self._all_token_ids)

    def update_block_hashes(self) -> None:
        for end in range((len(self.block_hashes) + 1) * BLOCK, self.num_tokens + 1, BLOCK):
            self.block_hashes.append((self.cache_salt, *self._all_token_ids[:end]))


@pytest.fixture
def requests(saved: Saved) -> Requests:
    return Requests(saved.engine, Library(None, verify=False), BLOCK)


def about(saved: Saved, question: Sequence[int] = (5, 6), **fields: Any) -> Request:
    text, params = prompt(saved.path, [*question])
    return Request(text["prompt_token_ids"], text["cache_salt"], params, **fields)


def schedule(requests: Requests, request: Request, computed: int = 0, blocks: Sequence[int] = (3, 9, 4)) -> int:
    """What a scheduler does to begin a request; the tokens from outside."""
    external = requests.matched(request, computed)
    assert external is not None
    requests.allocated(request, blocks, external)
    return external


def begun(requests: Requests, request: Request, computed: int = 0, blocks: Sequence[int] = (3, 9, 4)) -> int:
    """Admit a request and begin it."""
    requests.admit(request)
    return schedule(requests, request, computed, blocks)


def refusal(requests: Requests, request: Request) -> str:
    """Why a request is refused."""
    assert begun(requests, request) == 1
    (load,) = requests.take()
    assert load.path == "" and (load.start, load.kept) == (0, 1)
    return load.reason


def test_a_request_loads_what_is_not_in_the_prefix_cache(saved: Saved, requests: Requests) -> None:
    found = read_document(saved.path)
    for computed in (0, 16, 32):
        request = about(saved)
        assert begun(requests, request, computed) == 35 - computed
        wanted = Load(request.request_id, str(saved.path), found.digest, 35, computed, (3, 9, 4))
        assert requests.take() == [wanted] and requests.take() == []
    request = about(saved, range(3, 40))
    requests.admit(request)
    for computed in (48, 64):
        assert schedule(requests, request, computed) == 0
        assert requests.take() == []


def test_plain_requests_are_not_touched(requests: Requests) -> None:
    for salt, params, skip in ((None, None, True), ("mine", {}, False), (None, {"do_remote_prefill": False}, True)):
        request = Request(range(3, 40), salt, params, skip=skip)
        assert begun(requests, request) == 0 and requests.take() == []
        assert (request.cache_salt, request.kv_transfer_params) == (salt, params)
        assert request.skip_reading_prefix_cache is skip and request.block_hashes[0][0] == salt


def test_several_requests_of_a_step(saved: Saved, requests: Requests) -> None:
    one = about(saved)
    plain = Request([5])
    refused = Request([5, 6], SALT)
    other = about(saved)
    for request in (one, plain, refused, other):
        requests.admit(request)
    taken = [schedule(requests, request, blocks=[n]) for n, request in enumerate((one, plain, refused, other))]
    assert taken == [35, 0, 1, 35]
    assert [(load.request_id, load.blocks) for load in requests.take()] == [
        (one.request_id, (0,)),
        (refused.request_id, (2,)),
        (other.request_id, (3,)),
    ]


def test_a_request_that_could_not_be_scheduled_is_asked_about_again(saved: Saved, requests: Requests) -> None:
    request = about(saved)
    requests.admit(request)
    assert requests.matched(request, 0) == 35  # no blocks were free
    assert requests.take() == []
    assert schedule(requests, request, 16) == 19
    assert [load.start for load in requests.take()] == [16]


def test_resumed_requests_load_again(saved: Saved, requests: Requests) -> None:
    request = about(saved)
    begun(requests, request)
    requests.take()
    request._all_token_ids += [7] * 20
    assert schedule(requests, request, 0, (8, 7, 6, 5)) == 35
    assert [(load.start, load.blocks) for load in requests.take()] == [(0, (8, 7, 6, 5))]
    assert schedule(requests, request, 48, (8, 7, 6, 5)) == 0
    assert requests.take() == []


def test_forgotten_requests_leave_nothing(saved: Saved, requests: Requests) -> None:
    for request in (about(saved), Request([5, 6], SALT), Request([5])):
        begun(requests, request)
        requests.forget(request)
        requests.forget(request)
    assert not requests._known and not requests._computed


def test_requests_that_are_refused(saved: Saved, requests: Requests, tmp_path: Path) -> None:
    good = about(saved)
    ids = good.prompt_token_ids or []
    salt = good.cache_salt
    params = good.kv_transfer_params
    other = save(saved.model, "keydiff@0.5", make_text(saved.model, 70, 1), tmp_path / "other.safetensors")
    logprobs = type("Sampling", (), {"prompt_logprobs": 1})
    of_tokens = type("Sampling", (), {"prompt_logprobs": None, "prompt_logprob_token_ids": [[5]]})
    cases = [
        (Request(ids, salt), "must come with kv_transfer_params that name the document"),
        (Request(ids, SALT + "0" * 64, {}), "must come with kv_transfer_params that name the document"),
        (Request(ids, None, params), "must begin with the placeholders of the document 'text' and have its cache salt"),
        (Request(ids, SALT, params), "must begin with the placeholders"),
        (Request(ids[1:], salt, params), "must begin with the placeholders"),
        (Request(ids[:35], salt, params), "must begin with the placeholders"),
        (Request(None, salt, params), "must begin with the placeholders"),
        (Request(ids, salt, params | {"document": str(other)}), "the one that the prompt was made for, got an edited"),
        (Request(ids, salt, {"document": str(saved.path)}), "the one that the prompt was made for, got an edited"),
        (Request(ids, salt, params | {"document": "/missing"}), "document must be a file that exists, got '/missing'"),
        (Request(ids, salt, params | {"document": 7}), "document must be the name of a document, got 7"),
        (Request(ids, salt, "document"), "kv_transfer_params must be an object, got str"),
        (Request(ids, None, ["document"]), "kv_transfer_params must be an object, got list"),
        (about(saved, lora=object()), "must be asked without an adapter, got one with LoRA"),
        (about(saved, sampling=logprobs, skip=True), "no log probabilities of its prompt; try without prompt_logprobs"),
        (about(saved, sampling=of_tokens, skip=True), "no log probabilities of its prompt"),
        (about(saved, sampling=None), "no log probabilities of its prompt"),
        (about(saved, [5] * 221), "must have fewer than 256 tokens"),
    ]
    for request, reason in cases:
        assert reason in refusal(requests, request)
        assert request.skip_reading_prefix_cache is False
        assert not (request.cache_salt or "").startswith(SALT)
    # One of which nothing were read from the prefix cache would get nothing from outside either.
    admitted = about(saved, skip=True)
    requests.admit(admitted)
    assert admitted.skip_reading_prefix_cache is False


def test_other_models_and_whatever_goes_wrong_are_refusals(
    saved: Saved, requests: Requests, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exception would end the engine."""
    config = saved.model.config.__class__(**(saved.model.config.to_dict() | {"num_hidden_layers": 5}))
    others = Requests(Engine(config, "nowhere", 256), Library(None, verify=False), BLOCK)
    assert "with 3 layers instead of 5; make the document with" in refusal(others, about(saved)).replace(")", "")

    def fail(_: object) -> Any:
        raise MemoryError("no memory")

    monkeypatch.setattr(requests._library, "find", fail)
    assert refusal(requests, about(saved)) == "MemoryError: no memory"


def test_refused_requests_share_no_block(saved: Saved, requests: Requests) -> None:
    """Neither with requests about the document nor with each other."""
    good = about(saved)
    hashes = {*good.block_hashes}
    for _ in range(2):
        request = Request(good.prompt_token_ids, good.cache_salt)
        requests.admit(request)
        assert len(request.block_hashes) == len(good.block_hashes)
        assert not {*request.block_hashes} & hashes
        hashes |= {*request.block_hashes}


def test_a_prompt_of_one_token_is_refused(requests: Requests) -> None:
    """The last token of a prompt is always computed, so that another one has to come from outside."""
    request = Request([5], SALT)
    assert "must come with kv_transfer_params" in refusal(requests, request)
    assert request.prompt_token_ids == [5, 5] and request.num_prompt_tokens == request.num_tokens == 2


def test_blocks_behind_failed_ones_are_spoiled(saved: Saved, requests: Requests) -> None:
    """Of the request that should have filled them and of those that share them, though they have ended."""
    loads = about(saved)
    shares = about(saved)
    other = about(saved)
    for request, computed, blocks in ((loads, 16, (1, 2, 3)), (shares, 32, (1, 2, 4)), (other, 0, (5, 6, 7))):
        begun(requests, request, computed, blocks)
        requests.take()
        requests.forget(request)
    assert requests.failed({2}) == {2, 3, 4}
    assert requests.failed({9}) == set()


def test_a_request_whose_load_failed_is_refused_when_it_comes_back(saved: Saved, requests: Requests) -> None:
    """It may have been preempted, with a token that was generated without its document."""
    fails = about(saved)
    earlier = about(saved)
    for request, blocks in ((earlier, (1, 2, 3)), (fails, (2, 5, 6))):  # the earlier one has given its blocks back
        begun(requests, request, 0, blocks)
        requests.take()
    assert requests.failed({2, 5, 6}) == {2, 3, 5, 6}
    assert schedule(requests, fails) == 1
    assert [load.reason for load in requests.take()] == ["Its beginning could not be loaded."]
    assert schedule(requests, earlier) == 35


def test_steps_that_are_long_over_are_forgotten(saved: Saved, requests: Requests) -> None:
    request = about(saved)
    begun(requests, request)
    for _ in range(STEPS):
        requests.take()
    assert requests.failed({3}) == set()
