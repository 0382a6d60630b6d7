"""`kvpolicy serve` with the official client: answers, streams, refusals, several clients, and clients that leave."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

import kvpolicy
from kvpolicy.cli.app import main
from kvpolicy.serving import handlers
from kvpolicy.serving.capacity import Capacity
from kvpolicy.serving.prefix import PrefixFile
from kvpolicy.serving.server import bind, listen, serving
from tests.modules import forget
from tests.parallel.launchers import free_port
from tests.serving.servers import POLICY, PROMPT, client_of, get, is_healthy, metric, post, running, wait_for
from tests.vllm.models import save_text


@pytest.fixture(scope="module")
def tiny() -> tuple[Any, Any]:
    return kvpolicy.tiny()


@pytest.fixture(scope="module")
def wanted(tiny: tuple[Any, Any]) -> tuple[str, dict[str, Any]]:
    """What `generate` answers under the policy, and what its cache holds; computed before the server attaches."""
    model, tokenizer = tiny
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    with torch.no_grad(), kvpolicy.attach(model, POLICY) as handle:
        made = model.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :]
    report = handle.report()
    held = {"kept_tokens": report.layers[0].kept[0], "cache_nbytes": report.nbytes, "full_nbytes": report.full_nbytes}
    return tokenizer.decode(made, skip_special_tokens=True), held


@pytest.fixture(scope="module")
def port(tiny: tuple[Any, Any], wanted: Any) -> Iterator[int]:
    """A running server."""
    with running(tiny) as number:
        yield number


@pytest.fixture
def client(port: int) -> Iterator[Any]:
    with client_of(port) as made:
        yield made


def complete(client: Any, **fields: Any) -> Any:
    return client.completions.create(**{"model": "tiny", "prompt": PROMPT, "max_tokens": 8, "temperature": 0, **fields})


def chat(client: Any, *contents: str, **fields: Any) -> Any:
    messages = [{"role": "user", "content": content} for content in contents]
    return client.chat.completions.create(model="tiny", messages=messages, max_tokens=8, temperature=0, **fields)


def test_an_answer_is_that_of_generate(client: Any, wanted: tuple[str, dict[str, Any]]) -> None:
    answer = complete(client)
    assert (answer.choices[0].text, answer.usage.kvpolicy) == wanted
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 8
    assert answer.model == "tiny" and answer.choices[0].finish_reason == "length"


def test_a_stream_is_the_answer_in_pieces(client: Any, wanted: Any) -> None:
    text, held = wanted
    chunks = list(chat(client, PROMPT, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == text
    assert len(chunks) > 5 and chunks[-2].choices[0].finish_reason == "length"
    assert not chunks[-1].choices and chunks[-1].usage.kvpolicy == held
    chunks = list(complete(client, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == text
    assert all(chunk.usage is None for chunk in chunks)


def test_there_is_one_model(client: Any, port: int) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").policy == POLICY
    assert json.loads(get(port, "/health"))["status"] == "ok"
    with pytest.raises(openai.NotFoundError, match="model must be 'tiny'"):
        client.models.retrieve("gpt")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model": "gpt"}, "model must be 'tiny', the one that this server has, got \"gpt\""),
        ({"prompt": ""}, "must have at least one token"),
        ({"max_tokens": 2048}, "must fit into 2,048 positions"),
        ({"temperature": -1}, "temperature must be a number from 0"),
    ],
)
def test_bad_requests_get_a_sentence(fields: dict[str, Any], message: str, client: Any) -> None:
    with pytest.raises(openai.APIStatusError, match=re.escape(message)) as caught:
        complete(client, **fields)
    assert caught.value.status_code == (404 if "model" in fields else 400)


def test_a_body_that_is_not_json(port: int) -> None:
    for kind, body, status in (("application/json", b"{", 400), ("text/plain", b"{}", 415)):
        found, answer = post(port, body, ("Content-Type", kind))
        assert found == status and "must be" in answer["error"]["message"]


def test_a_client_that_leaves_frees_its_memory(client: Any, port: int) -> None:
    """The gauge follows a weak reference: it is 0 only once the cache is gone."""
    before = metric(port, 'requests_total{outcome="cancelled"}')
    stream = complete(client, max_tokens=1500, stream=True, temperature=1, seed=1)
    for _ in zip(range(3), stream, strict=False):
        pass
    assert metric(port, "cache_nbytes") > 0
    stream.close()
    wait_for(lambda: metric(port, "requests_running") == 0)
    assert metric(port, "cache_nbytes") == 0
    with pytest.raises(openai.APITimeoutError):
        complete(client, max_tokens=1500, temperature=1, seed=1, timeout=0.3)
    wait_for(lambda: metric(port, "requests_running") == 0 == metric(port, "requests_waiting"))
    assert metric(port, 'requests_total{outcome="cancelled"}') == before + 2
    assert metric(port, "cache_nbytes") == 0
    assert complete(client).usage.kvpolicy["kept_tokens"] == metric(port, "last_kept_tokens")


@pytest.mark.parametrize(
    ("signals", "grace", "code"), [([signal.SIGTERM], 0.1, 0), ([signal.SIGINT, signal.SIGINT], 20.0, 130)]
)
def test_a_signal_ends_the_command(
    signals: list[int], grace: float, code: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that takes too long then, or runs at a second interrupt, ends with an error.

    Uvicorn would break it off, and log a traceback.
    """
    monkeypatch.setattr("kvpolicy.serving.server.GRACE", grace)
    number = free_port()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # workers of pytest-xdist ignore it

    def end() -> tuple[str, float]:
        wait_for(lambda: is_healthy(number))
        with client_of(number, timeout=60) as client:
            stream = complete(client, max_tokens=1900, stream=True, temperature=1, seed=1)
            next(stream)
            os.kill(os.getpid(), signals[0])
            begun = time.monotonic()
            for second in signals[1:]:
                wait_for(lambda: not is_healthy(number))
                begun = time.monotonic()
                os.kill(os.getpid(), second)
            with pytest.raises(openai.APIError) as caught:
                list(stream)
            return caught.value.message, time.monotonic() - begun

    try:
        with ThreadPoolExecutor(1) as pool:
            told = pool.submit(end)
            assert main(["serve", "tiny", POLICY, "--port", str(number)]) == code
            message, seconds = told.result(20)
    finally:
        signal.signal(signal.SIGINT, before)
    assert message == "The server is shutting down; try again later." and seconds < 15
    said = capsys.readouterr().err
    assert f"tiny under {POLICY}:least=1024: http://127.0.0.1:{number}/v1\n" in said
    assert "One request is answered at a time" in said and "no chat template" in said and "Traceback" not in said
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_sigterm_lets_answers_end_and_refuses_those_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpolicy.serving.server.GRACE", 300.0)
    number = free_port()

    def end() -> tuple[int, int]:
        wait_for(lambda: is_healthy(number))
        with client_of(number) as client, ThreadPoolExecutor(1) as pool:
            stream = complete(client, max_tokens=200, stream=True, temperature=1, seed=1)
            next(stream)
            waiting = pool.submit(complete, client)
            wait_for(lambda: metric(number, "requests_waiting") == 1)
            os.kill(os.getpid(), signal.SIGTERM)
            error = waiting.exception(60)
            assert isinstance(error, openai.APIStatusError)
            return error.status_code, 1 + len([*stream])

    with ThreadPoolExecutor(1) as pool:
        told = pool.submit(end)
        assert main(["serve", "tiny", POLICY, "--port", str(number)]) == 0
        status, chunks = told.result(300)
    assert status == 503 and chunks > 50
    with pytest.raises(ConnectionError):
        socket.create_connection(("127.0.0.1", number), timeout=5).close()


def test_a_port_that_is_taken(port: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Also by a server that starts at once: Linux reserves it for both, and refuses the second one that listens."""
    message = "must be an address that is free, got 127.0.0.1 and"
    assert main(["serve", "tiny", POLICY, "--port", str(port)]) == 2
    assert message in capsys.readouterr().err
    with (
        pytest.raises(kvpolicy.KVPolicyError, match=message),
        bind("127.0.0.1", 0) as first,
        bind("127.0.0.1", first.getsockname()[1]) as second,
    ):
        listen(first)
        with serving(*kvpolicy.tiny(), "tiny", POLICY, second):
            pass
    assert "http://" not in capsys.readouterr().err


QUESTION = "?wolf="
TEXT = PROMPT.removesuffix(QUESTION)
"""The text of a saved cache, and a question behind it."""


@pytest.mark.parametrize("shared", [False, True])
def test_requests_start_from_a_saved_cache(shared: bool, tmp_path: Path) -> None:
    """From copies, or with slots of their own: the first one does not change what the second one starts from."""
    model, tokenizer = kvpolicy.tiny()
    path = tmp_path / "text.safetensors"
    save_text((model, tokenizer), TEXT, POLICY, path)
    whole = tokenizer(PROMPT, return_tensors="pt").input_ids
    with torch.no_grad(), kvpolicy.attach(model, POLICY):
        text = kvpolicy.PolicyCache.load(model, path)
        cache = text.fork(shared=shared)
        made = model.generate(whole, cache=cache, max_new_tokens=8, do_sample=False)
    expected = tokenizer.decode(made[0, whole.shape[1] :], skip_special_tokens=True)
    kept = cache.report().layers[0].kept[0]
    kept += text.policy_layers[0].positions.shape[-1] if shared else 0
    held = {"kept_tokens": kept, "cache_nbytes": cache.nbytes, "full_nbytes": cache.full_nbytes}
    load = PrefixFile(path, kvpolicy.Policy.parse(POLICY), shared).load
    with running((model, tokenizer), load) as port, client_of(port) as client:
        for answer in [complete(client) for _ in range(2)]:
            assert answer.choices[0].text == expected and answer.usage.prompt_tokens == whole.shape[1]
            assert answer.usage.kvpolicy == held
        assert metric(port, "prefix_nbytes") == text.nbytes
        assert shared or metric(port, "cache_nbytes") == 0
        for prompt, message in ((TEXT, "got only 37 tokens"), ("lion=" + TEXT, "got another token at position 1")):
            with pytest.raises(openai.BadRequestError, match=message):
                complete(client, prompt=prompt)


def test_files_that_are_no_prefix_are_refused_at_the_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, tokenizer = kvpolicy.tiny()
    path, silent, quest = (tmp_path / f"{name}.safetensors" for name in ("text", "silent", "quest"))
    save_text((model, tokenizer), TEXT, POLICY, path)
    with kvpolicy.attach(model, POLICY):
        kvpolicy.PolicyCache.load(model, path).save(silent)
    for policy, file, message in (
        (POLICY, tmp_path / "none.safetensors", "A cache file must exist"),
        ("h2o@0.5", path, f"must have the policy h2o@0.5, got {POLICY}"),
        (POLICY, silent, "must have the token ids of its cache"),
    ):
        assert main(["serve", "tiny", policy, "--port", "0", "--prefix", str(file)]) == 2
        assert message in capsys.readouterr().err
    load = PrefixFile(path, kvpolicy.Policy.parse(POLICY)).load
    no_room = pytest.raises(kvpolicy.KVPolicyError, match="and an answer in 38 tokens, see --length, got 37")
    with no_room, running((model, tokenizer), load, capacity=Capacity(length=38)):
        pass
    policy = "full+quest:page=4:read=8"
    save_text((model, tokenizer), TEXT, policy, quest)
    file = PrefixFile(quest, kvpolicy.Policy.parse(policy), shared=True)
    with kvpolicy.attach(model, policy), pytest.raises(kvpolicy.KVPolicyError, match="Every slot must be read in a st"):
        file.load(model)


def test_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    forget(monkeypatch, "kvpolicy.serving")
    monkeypatch.setitem(sys.modules, "fastapi", None)
    assert main(["serve", "tiny", POLICY]) == 2
    assert "pip install 'kvpolicy[serve]'" in capsys.readouterr().err


def test_another_server_of_transformers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    handlers.check_transformers()
    monkeypatch.setattr(handlers.utils.GenerationState, "get_manager", lambda self, name: None)
    with pytest.raises(kvpolicy.KVPolicyError, match=r"server of versions .*get_manager is different"):
        handlers.check_transformers()
    monkeypatch.setattr(handlers, "completion", None)
    with pytest.raises(kvpolicy.KVPolicyError, match="where completion"):
        handlers.check_transformers()
