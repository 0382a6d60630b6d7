"""What OpenAI clients may ask for: several answers, log probabilities, penalties, and a key."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
import torch

import kvpolicy
from kvpolicy.serving.capacity import Capacity
from tests.serving.servers import POLICY, PROMPT, ask, client_of, get, metric, running, wait_for

KEY = "a key of the tests"


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with running(kvpolicy.tiny(), key=KEY, capacity=Capacity(queue=6)) as number:
        yield number


@pytest.fixture
def client(port: int) -> Iterator[Any]:
    with client_of(port, KEY) as made:
        yield made


def complete(client: Any, **fields: Any) -> Any:
    return client.completions.create(**{"model": "tiny", "prompt": PROMPT, "max_tokens": 6, "temperature": 0, **fields})


def texts(answer: Any) -> list[str]:
    """The texts of all choices, streamed or not."""
    if hasattr(answer, "choices"):
        return [choice.text for choice in answer.choices]
    found: dict[int, str] = {}
    for chunk in answer:
        for choice in chunk.choices:
            found[choice.index] = found.get(choice.index, "") + choice.text
    return [found[index] for index in sorted(found)]


def sent(port: int, path: str, **fields: Any) -> Any:
    """The content of a response, in which a field that is missing is not the same as null."""
    body = json.dumps({"max_tokens": 3, "temperature": 0, **fields}).encode()
    status, content = ask(port, "POST", f"/v1/{path}", body, ("Authorization", f"Bearer {KEY}"))
    assert status == 200
    return content


MESSAGES = [{"role": "user", "content": PROMPT}]


def test_fields_that_every_answer_has_are_null_without_a_value(port: int) -> None:
    """As the specification of the OpenAI API requires them."""
    (chat,) = sent(port, "chat/completions", messages=MESSAGES)["choices"]
    assert chat.keys() == {"finish_reason", "index", "logprobs", "message"} and chat["logprobs"] is None
    assert chat["message"].keys() == {"role", "content", "refusal"} and chat["message"]["refusal"] is None
    (text,) = sent(port, "completions", prompt=PROMPT)["choices"]
    assert text.keys() == {"finish_reason", "index", "logprobs", "text"} and text["logprobs"] is None
    (text,) = sent(port, "completions", prompt=PROMPT, logprobs=1)["choices"]
    assert all(isinstance(each, list) for each in text["logprobs"].values())


@pytest.mark.parametrize("usage", [False, True])
@pytest.mark.parametrize(
    ("path", "fields"), [("chat/completions", {"messages": MESSAGES}), ("completions", {"prompt": PROMPT})]
)
def test_every_chunk_of_a_stream_has_its_fields(
    path: str, fields: dict[str, Any], usage: bool, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All have one time and one id; without an end or a usage, they say so."""
    seconds = iter(range(1000, 9999))  # every chunk of transformers' handler has another one
    monkeypatch.setattr("transformers.cli.serving.completion.time.time", lambda: next(seconds))
    events = sent(port, path, stream=True, stream_options={"include_usage": usage}, n=2, **fields).split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1
    if usage:
        assert [chunk["usage"] is None for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
        assert chunks.pop()["choices"] == []
    assert usage or not any("usage" in chunk for chunk in chunks)
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    for index in range(2):
        own = [choice["finish_reason"] for choice in choices if choice["index"] == index]
        assert own == [None] * (len(own) - 1) + ["length"]
    assert all(choice["logprobs"] is None for choice in choices)


@pytest.mark.parametrize("stream", [False, True])
def test_choices_are_the_answers_of_seeds_that_follow_each_other(stream: bool, client: Any) -> None:
    """For each prompt of a list."""
    prompts = [PROMPT, PROMPT[11:], PROMPT]
    sampled = {"temperature": 3.0, "max_tokens": 8}
    alone = [texts(complete(client, prompt=prompt, seed=seed, **sampled)) for prompt in prompts for seed in (5, 6)]
    assert len({*map(tuple, alone)}) == 4
    assert [[text] for text in texts(complete(client, prompt=prompts, n=2, seed=5, stream=stream, **sampled))] == alone


@pytest.mark.parametrize("stream", [False, True])
def test_a_model_whose_name_looks_like_a_file_of_the_hub(stream: bool) -> None:
    """Transformers' handler would cut it at the colon, and refuse the second choice for it."""
    name = "models/a:b.gguf"
    with running(kvpolicy.tiny(), name=name) as port, client_of(port) as client:
        made = complete(client, model=name, n=2, stream=stream)
        assert {chunk.model for chunk in (made if stream else [made])} == {name}


def test_the_usage_of_several_answers(client: Any) -> None:
    """A prompt with several choices counts once."""
    one = complete(client).usage
    answer = complete(client, n=2)
    *_, last = complete(client, n=2, stream=True, stream_options={"include_usage": True})
    for usage in (answer.usage, last.usage):
        assert (usage.prompt_tokens, usage.completion_tokens) == (one.prompt_tokens, 2 * one.completion_tokens)
        assert usage.kvpolicy["cache_nbytes"] == 2 * one.kvpolicy["cache_nbytes"]
        assert usage.kvpolicy["kept_tokens"] == one.kvpolicy["kept_tokens"]


def test_one_prompt_that_is_refused_refuses_the_request(client: Any, port: int) -> None:
    with pytest.raises(openai.BadRequestError, match="must fit into 2,048 positions"):
        complete(client, prompt=["?", "?" * 2048])
    assert metric(port, "requests_running") == metric(port, "requests_waiting") == 0
    assert texts(complete(client)) != []


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities(stream: bool, client: Any) -> None:
    model, tokenizer = kvpolicy.tiny()
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    with torch.no_grad(), kvpolicy.attach(model, POLICY):
        wanted = model(ids).logits[0, -1].log_softmax(-1)
    made = complete(client, logprobs=3, stream=stream)
    choices = [chunk.choices[0] for chunk in made] if stream else [made.choices[0]]
    found = [choice.logprobs for choice in choices if choice.logprobs]
    words = [word for each in found for word in each.tokens]
    assert "".join(words) == "".join(choice.text for choice in choices)
    assert found[0].token_logprobs[0] == pytest.approx(float(wanted.max()), abs=1e-4)
    top = found[0].top_logprobs[0]
    assert len(top) == 3 and max(top, key=lambda word: top[word]) == words[0]
    asked: Any = {"model": "tiny", "messages": MESSAGES, "max_tokens": 6, "temperature": 0, "stream": stream}
    made = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
    choices = [chunk.choices[0] for chunk in made] if stream else [made.choices[0]]
    chat = [word for choice in choices if choice.logprobs for word in choice.logprobs.content]
    assert [word.token for word in chat] == words
    for word in chat:
        assert bytes(word.bytes).decode() == word.token and len(word.top_logprobs) == 2
        assert word.logprob == word.top_logprobs[0].logprob


def test_penalties_and_limits_change_an_answer(client: Any) -> None:
    """A penalty of 2 for each time lets no token of a repetition stay the most likely one forever."""
    plain = texts(complete(client, max_tokens=40))[0]
    for fields in ({"presence_penalty": 2}, {"frequency_penalty": 2}, {"extra_body": {"repetition_penalty": 3.0}}):
        assert texts(complete(client, max_tokens=40, **fields))[0] != plain
    hot = {"temperature": 50, "seed": 1, "max_tokens": 40}
    assert texts(complete(client, **hot))[0] != plain
    for fields in ({"top_k": 1}, {"min_p": 1.0}):
        assert texts(complete(client, extra_body=fields, **hot))[0] == plain


@pytest.mark.parametrize("header", [None, "Bearer another", KEY])
def test_a_key_is_asked_for(header: str | None, port: int) -> None:
    headers = () if header is None else (("Authorization", header),)
    status, answer = ask(port, "GET", "/v1/models", None, *headers)
    assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
    assert "ok" in get(port, "/health") and "kvpolicy_rows 1" in get(port, "/metrics")


def test_too_many_answers_get_their_own_status(client: Any, port: int) -> None:
    """One row, and a queue of six: the eighth answer is refused, and the others are not."""
    long = {"max_tokens": 1500, "temperature": 1, "seed": 1}
    with ThreadPoolExecutor(1) as pool:
        running_one = pool.submit(complete, client, **long)
        wait_for(lambda: metric(port, "requests_running") == 1)
        with pytest.raises(openai.RateLimitError, match="At most 6 answers may wait, got 1"):
            complete(client, n=7)
        waiting = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=2, n=6, stream=True)
        wait_for(lambda: metric(port, "requests_waiting") == 0)
        assert len(texts(waiting)) == 6
        assert running_one.result(60).usage.completion_tokens > 0
