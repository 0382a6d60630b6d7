"""vLLM's OpenAI server compresses long prompts, and answers as kvpolicy does under the same policy."""

from __future__ import annotations

from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.vllm.compressed import recipe_of, wanted
from tests.vllm.documents import WORDS, records, save
from tests.vllm.servers import CHAT, COMPLETION, VLLMServer, serving

pytestmark = pytest.mark.vllm

NEW = 8
POLICY = "snapkv:window=8@0.5"
DOCUMENT = "keydiff:decode=grow@0.5"
BOTH = ("kvpolicy_vllm.Documents", "kvpolicy_vllm.Compress")


@pytest.fixture(scope="module")
def folder(pair: tuple[Any, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("documents")
    save(pair, records(), DOCUMENT, path / "report.safetensors")
    return path


@pytest.fixture(scope="module")
def server(
    checkpoint: Path, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Generator[VLLMServer, None, None]:
    # Few blocks, so that requests wait and are preempted.
    options = ["--num-gpu-blocks-override", "16", "--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    log = tmp_path_factory.mktemp("log") / "server.log"
    variables = {"KVPOLICY_POLICY": POLICY, "KVPOLICY_THRESHOLD": "100", "KVPOLICY_LEAST": "0"}
    with serving(checkpoint, folder, log, options, BOTH, **variables) as running:
        yield running


@pytest.fixture(scope="module")
def answer(pair: tuple[Any, Any]) -> Callable[[str], str]:
    """What kvpolicy answers behind a prompt."""
    known: dict[str, str] = {}

    def ask(text: str) -> str:
        if text not in known:
            ids = pair[1](text).input_ids
            known[text] = pair[1].decode(wanted(pair[0], recipe_of(POLICY), ids, NEW).tokens)
        return known[text]

    return ask


def prompt(word: str, first: int = 1000) -> str:
    return f"{records(first=first)}?{word}="


def chat(text: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"messages": messages, "max_tokens": NEW, "temperature": 0, "ignore_eos": True, **more}


def complete(text: Any, **more: Any) -> dict[str, Any]:
    return {"prompt": text, "max_tokens": NEW, "temperature": 0, "ignore_eos": True, **more}


def test_completions_and_chats(server: VLLMServer, pair: tuple[Any, Any], answer: Callable[[str], str]) -> None:
    for word in WORDS[:2]:
        text = prompt(word)
        ids = pair[1](text).input_ids
        kept = recipe_of(POLICY).kept(len(ids))
        for found in (
            server.post(COMPLETION, complete(text)),
            server.post(COMPLETION, complete(ids)),
            server.post(CHAT, chat(text, add_special_tokens=True)),
        ):
            assert found.status == 200 and found.text == answer(text)
            usage = found.content["usage"]
            assert usage["kvpolicy"] == {"prompt_tokens": len(ids), "kept_tokens": kept}
            assert (usage["prompt_tokens"], usage["total_tokens"]) == (len(ids), len(ids) + NEW)


def test_streams_stop_strings_and_tools(server: VLLMServer, answer: Callable[[str], str]) -> None:
    text = prompt("wolf")
    *events, last = server.stream(CHAT, chat(text, add_special_tokens=True))
    assert "".join(event["choices"][0]["delta"].get("content") or "" for event in events) == answer(text)
    assert last["usage"]["kvpolicy"]["kept_tokens"] < last["usage"]["prompt_tokens"]
    stop = answer(text)[2:4]
    found = server.post(COMPLETION, complete(text, stop=[stop]))
    assert found.text == answer(text)[: answer(text).index(stop)]
    assert found.content["choices"][0]["finish_reason"] == "stop"
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    found = server.post(CHAT, chat(text, add_special_tokens=True, tools=[tool]))
    assert found.status == 200 and found.text == answer(text)  # this model calls no tool
    named = {"type": "function", "function": {"name": "f"}}
    found = server.post(CHAT, chat(text, tools=[tool], tool_choice=named, max_tokens=100, ignore_eos=False))
    assert found.status == 200, found
    (call,) = found.content["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "f" and found.content["usage"]["kvpolicy"]


def test_other_requests_pass_unchanged(server: VLLMServer, pair: tuple[Any, Any]) -> None:
    short = "wolf=1002\n?wolf="
    text = prompt("wolf")
    with torch.no_grad():
        ids = pair[1](text, return_tensors="pt").input_ids
        whole = pair[1].decode(
            pair[0].generate(ids, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False)[0, ids.shape[1] :]
        )
    for body in (
        complete(short),
        complete([text, short]),
        complete(text, n=2, temperature=1),
        complete(text, echo=True),
    ):
        found = server.post(COMPLETION, body)
        assert found.status == 200 and "kvpolicy" not in found.content["usage"]
    found = server.post(COMPLETION, complete(text, prompt_logprobs=1))
    assert found.text == whole and found.content["choices"][0]["prompt_logprobs"]
    found = server.post(CHAT, {**chat("?wolf="), "document": "report"})
    assert found.status == 200 and found.content["usage"]["kvpolicy"]["document_tokens"]
    for body, status in (
        ({"prompt": 5}, 400),
        ({**complete(text), "model": "other"}, 404),
        (complete(text, n=-1), 400),
    ):
        assert server.post(COMPLETION, body).status == status
    assert server.post(COMPLETION, complete(text, max_tokens=5000)).status == 400  # as without a policy
    assert server.post(COMPLETION, complete(text * 10)).status == 400
    server.wait_for_idle()


def test_no_client_reaches_prompts_around_the_middleware(server: VLLMServer) -> None:
    for params in ({"compressed": "x"}, {"prefill": "x"}, {"prefill": 5}, {"prefill": "x", "compressed": "x"}):
        assert server.post(COMPLETION, complete(prompt("wolf"), kv_transfer_params=params)).status == 400
    server.wait_for_idle()


def test_many_requests_of_all_kinds(server: VLLMServer, answer: Callable[[str], str]) -> None:
    short = server.post(COMPLETION, complete("?wolf=")).text
    texts = [prompt(word, 1000 + 100 * number) for number in range(2) for word in WORDS[:4]]
    expected = [answer(text) for text in texts]

    def ask(index: int) -> None:
        text = texts[index % len(texts)]
        right = expected[index % len(texts)]
        kind = index % 6
        if kind == 0:
            assert server.post(COMPLETION, complete("?wolf=")).text == short
        elif kind == 1:
            server.cancel(COMPLETION, complete(text, max_tokens=200))
        elif kind == 2:
            assert server.post(COMPLETION, complete(text, kv_transfer_params={"compressed": "x"})).status == 400
        elif kind == 3:
            events = server.stream(COMPLETION, complete(text))[:-1]
            assert "".join(event["choices"][0]["text"] for event in events) == right
        else:
            assert server.post(COMPLETION, complete(text)).text == right

    with ThreadPoolExecutor(16) as pool:
        for future in [pool.submit(ask, index) for index in range(96)]:
            future.result(timeout=240)
    server.wait_for_idle()


def test_a_server_does_not_start_with_another_policy(checkpoint: Path, folder: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    found = serving(checkpoint, folder, log, middlewares=BOTH, KVPOLICY_POLICY="kvzip@0.2")
    with pytest.raises(AssertionError), found:
        pass
    assert "The selector of KVPOLICY_POLICY must be one of window" in log.read_text()
