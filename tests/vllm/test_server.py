"""vLLM's OpenAI server answers about documents and compresses long prompts as kvpolicy does, and outlives failures."""

from __future__ import annotations

import functools
import json
import shutil
import urllib.request
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvpolicy_vllm import read_document
from kvpolicy_vllm.middleware import UNANSWERED
from tests.vllm.compressed import recipe_of, wanted
from tests.vllm.models import RECORDS, answer, records, save_text
from tests.vllm.servers import CHAT, COMPLETION, VLLMServer, serving

pytestmark = pytest.mark.vllm

NEW = 8
POLICIES = {
    "report": "keydiff:decode=grow@0.5",
    "notes": "keydiff:decode=grow@0.3",
    "codes": "kvzip:decode=grow+tokenwise:bits=4@0.5",
}
"""Of documents."""

POLICY = "snapkv:window=8@0.5"
"""Of long prompts."""

BOTH = ("kvpolicy_vllm.Documents", "kvpolicy_vllm.Compress")
PROMPTLESS = {
    "/detokenize",
    "/inference/v1/abort_requests",
    "/is_scaling_elastic_ep",
    "/ping",
    "/scale_elastic_ep",
    "/v1/chat/completions/derender",
    "/v1/completions/derender",
    "/v1/responses/{response_id}/cancel",
}
"""Paths of vLLM that take something else than a prompt."""


@pytest.fixture(scope="module")
def folder(pair: tuple[Any, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("documents")
    for index, (name, policy) in enumerate(POLICIES.items()):
        save_text(pair, records(first=1000 + 100 * index), policy, path / f"{name}.safetensors")
    return path


@pytest.fixture(scope="module")
def server(checkpoint: Path, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Generator[VLLMServer]:
    # Few blocks, so that requests wait and are preempted.
    options = ["--num-gpu-blocks-override", "16", "--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    log = tmp_path_factory.mktemp("log") / "server.log"
    # Documents take the place of fewer tokens than a prompt that is compressed has.
    variables = {"KVPOLICY_POLICY": POLICY, "KVPOLICY_THRESHOLD": "300", "KVPOLICY_LEAST": "0"}
    with serving(checkpoint, folder, log, options, BOTH, **variables) as running:
        yield running


@pytest.fixture(scope="module")
def documented(pair: tuple[Any, Any], folder: Path) -> Callable[[str, str], str]:
    """What kvpolicy answers to a question behind a document."""
    model, tokenizer = pair

    @functools.cache
    def ask(name: str, question: str) -> str:
        ids = tokenizer(question, add_special_tokens=False).input_ids
        return tokenizer.decode(answer(model, POLICIES[name], folder / f"{name}.safetensors", ids, NEW).tokens)

    return ask


@pytest.fixture(scope="module")
def compressed(pair: tuple[Any, Any]) -> Callable[[str], str]:
    """What kvpolicy answers behind a long prompt."""
    model, tokenizer = pair

    @functools.cache
    def ask(text: str) -> str:
        return tokenizer.decode(wanted(model, recipe_of(POLICY), tokenizer(text).input_ids, NEW).tokens)

    return ask


def prompt(word: str, first: int = 1000) -> str:
    return f"{records(first=first)}?{word}="


def chat(text: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"messages": messages, "max_tokens": NEW, "temperature": 0, "ignore_eos": True, **more}


def complete(text: Any, **more: Any) -> dict[str, Any]:
    return {"prompt": text, "max_tokens": NEW, "temperature": 0, "ignore_eos": True, **more}


def text_of(events: Sequence[Any]) -> str:
    """The text of the events of a stream."""
    choices = [event["choices"][0] for event in events]
    return "".join(choice["text"] if "text" in choice else choice["delta"].get("content") or "" for choice in choices)


def test_chats_about_documents(server: VLLMServer, folder: Path, documented: Callable[[str, str], str]) -> None:
    for name in POLICIES:
        document = read_document(folder / f"{name}.safetensors")
        for word in RECORDS[:3]:
            found = server.post(CHAT, chat(f"?{word}=", document=name))
            assert found.status == 200
            assert found.text == documented(name, f"?{word}=")
            usage = found.content["usage"]
            assert usage["kvpolicy"] == {"document_tokens": document.total, "kept_tokens": document.kept}
            assert usage["prompt_tokens"] + NEW == usage["total_tokens"] > document.total + NEW


def test_streams_and_completions_about_documents(
    server: VLLMServer, folder: Path, documented: Callable[[str, str], str]
) -> None:
    *events, last = server.stream(CHAT, chat("?wolf=", document="report"))
    assert text_of(events) == documented("report", "?wolf=")
    assert last["usage"]["kvpolicy"]["document_tokens"] == read_document(folder / "report.safetensors").total
    assert server.post(COMPLETION, complete("?gold=", document="report")).text == documented("report", "?gold=")


def test_compressed_completions_and_chats(
    server: VLLMServer, pair: tuple[Any, Any], compressed: Callable[[str], str]
) -> None:
    for word in RECORDS[:2]:
        text = prompt(word)
        ids = pair[1](text).input_ids
        kept = recipe_of(POLICY).kept(len(ids))
        for path, body in (
            (COMPLETION, complete(text)),
            (COMPLETION, complete(ids)),
            (CHAT, chat(text, add_special_tokens=True)),
        ):
            found = server.post(path, body)
            assert found.status == 200 and found.text == compressed(text)
            usage = found.content["usage"]
            assert usage["kvpolicy"] == {"prompt_tokens": len(ids), "kept_tokens": kept}
            assert (usage["prompt_tokens"], usage["total_tokens"]) == (len(ids), len(ids) + NEW)


def test_compressed_streams_stop_strings_and_tools(server: VLLMServer, compressed: Callable[[str], str]) -> None:
    text = prompt("wolf")
    *events, last = server.stream(CHAT, chat(text, add_special_tokens=True))
    assert text_of(events) == compressed(text)
    assert last["usage"]["kvpolicy"]["kept_tokens"] < last["usage"]["prompt_tokens"]
    stop = compressed(text)[2:4]
    found = server.post(COMPLETION, complete(text, stop=[stop]))
    assert found.text == compressed(text)[: compressed(text).index(stop)]
    assert found.content["choices"][0]["finish_reason"] == "stop"
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    found = server.post(CHAT, chat(text, add_special_tokens=True, tools=[tool]))
    assert found.status == 200 and found.text == compressed(text)  # this model calls no tool
    named = {"type": "function", "function": {"name": "f"}}
    found = server.post(CHAT, chat(text, tools=[tool], tool_choice=named, max_tokens=100, ignore_eos=False))
    assert found.status == 200, found
    (call,) = found.content["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "f" and found.content["usage"]["kvpolicy"]


def test_other_requests_pass_unchanged(server: VLLMServer, pair: tuple[Any, Any]) -> None:
    text = prompt("wolf")
    for body in (
        complete("wolf=1002\n?wolf="),
        complete([text, "?wolf="]),
        complete(text, n=2, temperature=1),
        complete(text, echo=True),
    ):
        found = server.post(COMPLETION, body)
        assert found.status == 200 and "kvpolicy" not in found.content["usage"]
    found = server.post(COMPLETION, complete(text, prompt_logprobs=1))
    whole = answer(pair[0], None, None, pair[1](text).input_ids, NEW)
    assert found.text == pair[1].decode(whole.tokens) and found.content["choices"][0]["prompt_logprobs"]
    for body, status in (
        ({"prompt": 5}, 400),
        ({**complete(text), "model": "other"}, 404),
        (complete(text, n=-1), 400),
        (complete(text, max_tokens=5000), 400),  # as without a policy
        (complete(text * 10), 400),
    ):
        assert server.post(COMPLETION, body).status == status
    server.wait_for_idle()


def test_every_path_that_takes_a_prompt_is_known(server: VLLMServer) -> None:
    """A version of vLLM with another one would answer there without the document."""
    with urllib.request.urlopen(server.url("/openapi.json"), timeout=30) as response:
        paths = {path for path, kinds in json.load(response)["paths"].items() if "post" in kinds}
    assert {CHAT, COMPLETION} < paths
    assert paths - {CHAT, COMPLETION, *UNANSWERED} <= PROMPTLESS


def test_refusals_are_sentences_and_reach_no_engine(server: VLLMServer) -> None:
    before = server.metric("request_success_total")
    for document in ("../report", "unknown", None):
        found = server.post(CHAT, chat("?wolf=", document=document))
        assert found.status == 400 and "document must be" in found.content["error"]["message"]
    assert server.metric("request_success_total") == before


def test_what_others_have_cannot_be_reached_around_the_middleware(server: VLLMServer, folder: Path) -> None:
    document = read_document(folder / "notes.safetensors")
    body = complete([*document.placeholders, 34, 724, 32], cache_salt=document.salt)
    assert server.post(COMPLETION, body).status == 500
    for params in ({"document": "notes"}, {"document": "notes", "digest": "x"}, {"document": "../notes"}, {"kept": 3}):
        found = server.post(COMPLETION, {**body, "cache_salt": "mine", "kv_transfer_params": params})
        assert found.status == (200 if "kept" in params else 500)  # an unknown parameter loads nothing
    for params in ({"compressed": "x"}, {"prefill": "x"}, {"prefill": 5}, {"prefill": "x", "compressed": "x"}):
        assert server.post(COMPLETION, complete(prompt("wolf"), kv_transfer_params=params)).status == 400
    server.wait_for_idle()


def test_two_hundred_requests_of_all_kinds(
    server: VLLMServer, documented: Callable[[str, str], str], compressed: Callable[[str], str]
) -> None:
    alone = {word: server.post(COMPLETION, complete(f"?{word}=")).text for word in RECORDS}
    names = [*POLICIES]
    texts = [prompt(word, 1000 + 100 * number) for number in range(2) for word in RECORDS[:4]]
    right = {(name, word): documented(name, f"?{word}=") for name in names for word in RECORDS}
    expected = [compressed(text) for text in texts]

    def ask(index: int) -> None:
        word, name, number = RECORDS[index % len(RECORDS)], names[index % len(names)], index % len(texts)
        question, text = f"?{word}=", texts[number]
        kind = index % 11
        if kind == 0:
            assert server.post(COMPLETION, complete(question)).text == alone[word]
        elif kind == 1:
            server.cancel(CHAT, chat(question, document=name, max_tokens=200))
        elif kind == 2:
            server.cancel(COMPLETION, complete(text, max_tokens=200))
        elif kind == 3:
            assert server.post(CHAT, chat(question, document="unknown")).status == 400
        elif kind == 4:
            assert server.post(COMPLETION, complete(text, kv_transfer_params={"compressed": "x"})).status == 400
        elif kind == 5:
            assert text_of(server.stream(CHAT, chat(question, document=name))[:-1]) == right[name, word]
        elif kind == 6:
            assert text_of(server.stream(COMPLETION, complete(text))[:-1]) == expected[number]
        elif kind < 9:
            assert server.post(CHAT, chat(question, document=name)).text == right[name, word]
        else:
            assert server.post(COMPLETION, complete(text)).text == expected[number]

    with ThreadPoolExecutor(16) as pool:
        for future in [pool.submit(ask, index) for index in range(200)]:
            future.result(timeout=240)
    server.wait_for_idle()


def test_files_that_change_or_disappear(
    server: VLLMServer, folder: Path, documented: Callable[[str, str], str], tmp_path: Path
) -> None:
    path = folder / "changing.safetensors"
    shutil.copy(folder / "report.safetensors", path)
    assert server.post(CHAT, chat("?wolf=", document="changing")).text == documented("report", "?wolf=")
    shutil.copy(folder / "notes.safetensors", tmp_path / "new")
    (tmp_path / "new").replace(path)
    assert server.post(CHAT, chat("?wolf=", document="changing")).text == documented("notes", "?wolf=")
    path.write_bytes(path.read_bytes()[:-100])  # in place, as an editor would
    found = server.post(CHAT, chat("?wolf=", document="changing"))
    assert found.status == 400 and "truncated or edited" in found.content["error"]["message"]
    path.unlink()
    found = server.post(CHAT, chat("?wolf=", document="changing"))
    assert found.status == 400 and "must be one of the folder's" in found.content["error"]["message"]
    assert server.post(CHAT, chat("?wolf=", document="report")).text == documented("report", "?wolf=")
    server.wait_for_idle()


def test_two_servers_share_a_folder(
    server: VLLMServer, checkpoint: Path, folder: Path, documented: Callable[[str, str], str], tmp_path: Path
) -> None:
    """The second one has documents alone."""
    with serving(checkpoint, folder, tmp_path / "second.log") as second:
        for each in (server, second, server):
            assert each.post(CHAT, chat("?gold=", document="codes")).text == documented("codes", "?gold=")


def test_a_server_does_not_start_with_another_policy(checkpoint: Path, folder: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    found = serving(checkpoint, folder, log, middlewares=BOTH, KVPOLICY_POLICY="kvzip@0.2")
    with pytest.raises(AssertionError), found:
        pass
    assert "The selector of KVPOLICY_POLICY must be one of window" in log.read_text()
