"""What a client may ask of `kvpolicy serve` is limited, and a long prompt does not keep it from answering others."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import kvpolicy
from kvpolicy.cli.app import main
from kvpolicy.serving.answering import begin_in_thread
from kvpolicy.serving.answers import rewrite
from kvpolicy.serving.generation import configure, describe, make_jobs
from kvpolicy.serving.metrics import OUTCOMES
from kvpolicy.serving.requests import Call, body_limit
from kvpolicy.serving.server import log_to_terminal
from tests.serving.servers import POLICY, PROMPT, ask, client_of, get, metric, post, running, wait_for

LIMIT = body_limit(2048)
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@pytest.fixture(scope="module")
def tiny() -> tuple[Any, Any]:
    """A model whose tokenizer truncates, as some tokenizer.json do."""
    model, tokenizer = kvpolicy.tiny()
    tokenizer._tokenizer.enable_truncation(4)
    return model, tokenizer


@pytest.fixture(scope="module")
def port(tiny: tuple[Any, Any]) -> Iterator[int]:
    with running(tiny) as number:
        yield number


def complete(port: int, **fields: Any) -> tuple[int, dict[str, Any]]:
    return post(port, json.dumps({"prompt": PROMPT, "max_tokens": 2, "temperature": 0, **fields}).encode())


def test_a_body_has_room_for_all_positions_and_no_more(port: int) -> None:
    body = json.dumps({"prompt": PROMPT, "max_tokens": 2}).encode()
    assert post(port, body + b" " * (LIMIT - len(body)))[0] == 200
    status, answer = post(port, body + b" " * (LIMIT + 1 - len(body)))
    assert status == 413
    assert f"must be at most {LIMIT:,} bytes for this model, got {LIMIT + 1:,};" in answer["error"]["message"]
    assert answer["error"]["type"] == "invalid_request_error"
    escaped = json.dumps({"prompt": "\u043a" * 2049, "max_tokens": 1}).encode()  # refused for its tokens alone
    assert post(port, escaped)[0] == 400


@pytest.mark.parametrize("sent", [0, 2**22])
def test_a_body_that_is_too_large_is_answered_whether_or_not_it_is_sent(sent: int, port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall(HEAD + f"Content-Length: {2**22}\r\n\r\n".encode() + b"x" * sent)
        response = http.client.HTTPResponse(connection, method="POST")
        response.begin()
        assert response.status == 413 and b"at most 131,072 bytes" in response.read()


@pytest.mark.parametrize("prompt", [1, 2040, 2047])
def test_an_answer_may_reach_the_last_position(prompt: int, tiny: tuple[Any, Any]) -> None:
    model, tokenizer = tiny
    config = model.generation_config.__class__()
    configure(config, Call(max_tokens=2048 - prompt), 2048, None, prompt, tokenizer)
    assert config.max_new_tokens == 2048 - prompt
    with pytest.raises(kvpolicy.KVPolicyError, match="must fit into 2,048 positions"):
        configure(config, Call(max_tokens=2049 - prompt), 2048, None, prompt, tokenizer)


def test_a_body_of_unknown_length_is_read_up_to_the_limit(port: int) -> None:
    """The answer comes although the body has no end, and then the connection is closed."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
        try:
            for _ in range(LIMIT // 2**12 + 1):
                connection.sendall(b"1000\r\n" + b" " * 2**12 + b"\r\n")
        except OSError:
            pass  # the server has closed it already
        with connection.makefile() as reader:
            answer = "".join(line for line in reader)
    assert answer.startswith("HTTP/1.1 413 ") and "connection: close" in answer
    assert "bytes for this model, got more; try a shorter prompt." in answer


@pytest.mark.parametrize(
    ("path", "fields"),
    [("completions", {"prompt": PROMPT}), ("chat/completions", {"messages": [{"role": "user", "content": PROMPT}]})],
)
def test_other_requests_are_answered_while_a_prompt_is_tokenized(
    path: str, fields: Any, port: int, tiny: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, release = threading.Event(), threading.Event()
    kind = type(tiny[1])
    tokenize = kind.__call__

    def slow(self: Any, *args: Any, **kwargs: Any) -> Any:
        begun.set()
        assert release.wait(20)
        return tokenize(self, *args, **kwargs)

    monkeypatch.setattr(kind, "__call__", slow)
    with ThreadPoolExecutor(1) as pool:
        body = json.dumps({"max_tokens": 2, **fields}).encode()
        answer = pool.submit(ask, port, "POST", f"/v1/{path}", body)
        try:
            assert begun.wait(20)
            assert "ok" in get(port, "/health")
        finally:
            release.set()
        status, content = answer.result(20)
        assert status == 200 and content["usage"]["completion_tokens"] == 2


def test_only_a_pause_may_suspend_a_coroutine_in_a_thread() -> None:
    async def paused() -> int:
        await asyncio.sleep(0)
        return 1

    async def waits(future: Any) -> None:
        await future

    async def both() -> int:
        future = asyncio.get_running_loop().create_future()
        with ThreadPoolExecutor(1) as pool:
            with pytest.raises(RuntimeError, match="waits for"):
                await begin_in_thread(pool, waits(future))
            return await begin_in_thread(pool, paused())

    assert asyncio.run(both()) == 1


def test_prompts_are_tokenized_whole_at_once(port: int, tiny: tuple[Any, Any]) -> None:
    """Whatever truncation the tokenizer had is gone before the first request."""
    assert tiny[1]._tokenizer.truncation is None
    whole = kvpolicy.tiny()[1]
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda size: complete(port, prompt=PROMPT[:size])[1], range(20, 36)))
    assert [answer["usage"]["prompt_tokens"] for answer in answers] == [
        len(whole(PROMPT[:size]).input_ids) for size in range(20, 36)
    ]
    assert metric(port, "requests_waiting") == 0


@pytest.mark.parametrize("fields", [{"temperature": 1e-5}, {"temperature": 100}, {"top_p": 1e-320}, {"top_p": 1e-9}])
def test_extreme_numbers_are_answered(fields: dict[str, float], port: int) -> None:
    assert complete(port, **{"temperature": 1, **fields})[0] == 200


def test_a_stop_string_is_not_compared_with_the_vocabulary(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers' own criterion does so, for as long as the strings and the vocabulary are."""
    whole = complete(port, max_tokens=8)[1]["choices"][0]["text"]
    monkeypatch.setattr("transformers.generation.stopping_criteria.StopStringCriteria.__init__", None)
    answer = complete(port, max_tokens=8, stop=[*("x" * 255 + chr(97 + i) for i in range(15)), whole[2:4]])[1]
    assert answer["choices"][0]["text"] == whole[:2]
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] < 8


def test_a_failure_is_logged_with_its_traceback(
    port: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*args: Any) -> None:
        raise ValueError("a secret of the server")

    monkeypatch.setattr("kvpolicy.serving.metrics.CacheUsage.of", broken)
    with log_to_terminal():
        status, answer = complete(port)
    logged = capsys.readouterr().err
    assert status == 500
    assert answer["error"]["message"] == "The server failed to answer (ValueError); its log says more."
    assert "ERROR: A request failed.\nTraceback" in logged and "a secret of the server" in logged


def test_the_command_logs_to_the_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(server: Any, listener: Any) -> None:
        describe(ValueError("what happened"))

    monkeypatch.setattr("kvpolicy.serving.server.run", fail)
    assert main(["serve", "tiny", POLICY, "--port", "0"]) == 0
    assert "ValueError: what happened" in capsys.readouterr().err


def test_a_client_that_leaves_while_it_sends_the_body_has_not_failed(port: int) -> None:
    outcomes = {name: metric(port, f'requests_total{{outcome="{name}"}}') for name in OUTCOMES}
    head = HEAD + b"Content-Length: 99\r\n\r\n"
    for sent in (b"", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n", head + b"{"):
        with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
            connection.sendall(sent)
    wait_for(lambda: metric(port, 'requests_total{outcome="cancelled"}') == outcomes["cancelled"] + 1)
    assert metric(port, 'requests_total{outcome="failed"}') == outcomes["failed"]
    assert metric(port, 'requests_total{outcome="refused"}') == outcomes["refused"]


def test_a_client_that_never_sends_its_body_does_not_keep_the_server(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is told that the server ends, as all others are; uvicorn would log a traceback and answer with status 500."""
    monkeypatch.setattr("kvpolicy.serving.server.GRACE", 0.5)
    with socket.socket() as connection:
        connection.settimeout(20)
        with running(kvpolicy.tiny()) as own:
            connection.connect(("127.0.0.1", own))
            connection.sendall(HEAD + b"Content-Length: 100\r\n\r\n{")
            wait_for(lambda: "ok" in get(own, "/health"))  # it has begun to read
        response = http.client.HTTPResponse(connection, method="POST")
        response.begin()
        assert response.status == 503 and b"The server is shutting down; try again later." in response.read()
    assert "Traceback" not in capsys.readouterr().err


def test_memory_that_ran_out_on_a_cpu_is_no_fault_of_the_server() -> None:
    failure = describe(RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried ..."))
    assert failure.status == 503 and "not enough memory" in str(failure)


def test_an_error_in_a_stream_ends_it() -> None:
    """Of whatever kind: its client would wait for ever."""

    async def events() -> list[str]:
        async def broken() -> AsyncIterator[str]:
            yield 'data: {"choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": null}]}\n\n'
            raise KeyError("arguments")

        call = Call(stream=True, body={"model": "tiny"})
        return [event async for event in rewrite([broken()], make_jobs("k", call), call)]

    first, second = asyncio.run(events())
    assert '"content": "a"' in first and "The server failed to answer (KeyError)" in second


def test_the_first_of_several_answers_begins_a_stream(port: int) -> None:
    """With one row, the second one begins once the first one has ended."""
    with client_of(port) as client:
        stream: Any = client.completions.create(
            model="tiny", prompt=PROMPT, max_tokens=600, n=2, seed=1, temperature=1.0, stream=True
        )
        first = next(iter(stream)).choices[0]
        assert first.index == 0 and metric(port, "requests_waiting") == 1
        stream.close()
