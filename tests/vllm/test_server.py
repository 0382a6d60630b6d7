"""vLLM's OpenAI server answers chats about documents as kvpolicy does, and outlives what goes wrong with one."""

from __future__ import annotations

import json
import shutil
import urllib.request
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import kvpolicy
from kvpolicy_vllm import read_document
from kvpolicy_vllm.middleware import UNANSWERED
from tests.vllm.documents import WORDS, records, save
from tests.vllm.servers import CHAT, COMPLETION, VLLMServer, serving

pytestmark = pytest.mark.vllm

NEW = 8
POLICIES = {
    "report": "keydiff:decode=grow@0.5",
    "notes": "keydiff:decode=grow@0.3",
    "codes": "kvzip:decode=grow+tokenwise:bits=4@0.5",
}
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
        save(pair, records(first=1000 + 100 * index), policy, path / f"{name}.safetensors")
    return path


@pytest.fixture(scope="module")
def server(
    checkpoint: Path, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Generator[VLLMServer, None, None]:
    # Few blocks, so that requests wait and are preempted.
    options = ["--num-gpu-blocks-override", "16"]
    with serving(checkpoint, folder, tmp_path_factory.mktemp("log") / "server.log", options) as running:
        yield running


@pytest.fixture(scope="module")
def answer(pair: tuple[Any, Any]) -> Callable[[Path, str], str]:
    """What kvpolicy answers to a question behind a document; behind nothing without one."""
    model, tokenizer = pair
    known: dict[tuple[Path, str], str] = {}

    def ask(path: Path, question: str) -> str:
        if (path, question) not in known:
            ids = tokenizer(question, return_tensors="pt", add_special_tokens=False).input_ids[0]
            policy = POLICIES[path.stem]
            with torch.no_grad(), kvpolicy.attach(model, policy):
                cache = kvpolicy.PolicyCache.load(model, path)
                found: list[int] = []
                for step in range(len(ids) + NEW - 1):
                    token = ids[step] if step < len(ids) else torch.tensor(found[-1])
                    logits = model(token.view(1, 1), cache=cache).logits
                    if step >= len(ids) - 1:
                        found.append(int(logits[0, -1].argmax()))
            known[path, question] = tokenizer.decode(found)
        return known[path, question]

    return ask


def chat(document: str, question: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": question}]
    return {"document": document, "messages": messages, "max_tokens": NEW, "temperature": 0, "ignore_eos": True, **more}


def test_chats_are_answered_as_kvpolicy_answers(
    server: VLLMServer, folder: Path, answer: Callable[[Path, str], str]
) -> None:
    for name in POLICIES:
        path = folder / f"{name}.safetensors"
        document = read_document(path)
        for word in WORDS[:3]:
            found = server.post(CHAT, chat(name, f"?{word}="))
            assert found.status == 200
            assert found.text == answer(path, f"?{word}=")
            usage = found.content["usage"]
            assert usage["kvpolicy"] == {"document_tokens": document.total, "kept_tokens": document.kept}
            assert usage["prompt_tokens"] + NEW == usage["total_tokens"] > document.total + NEW


def test_streams_and_completions_are_answered_too(
    server: VLLMServer, folder: Path, answer: Callable[[Path, str], str]
) -> None:
    path = folder / "report.safetensors"
    *events, last = server.stream(CHAT, chat("report", "?wolf="))
    text = "".join(event["choices"][0]["delta"].get("content") or "" for event in events)
    assert text == answer(path, "?wolf=")
    assert last["usage"]["kvpolicy"]["document_tokens"] == read_document(path).total
    body = {"document": "report", "prompt": "?gold=", "max_tokens": NEW, "temperature": 0, "ignore_eos": True}
    assert server.post(COMPLETION, body).text == answer(path, "?gold=")


def test_every_path_that_takes_a_prompt_is_known(server: VLLMServer) -> None:
    """A version of vLLM with another one would answer there without the document."""
    with urllib.request.urlopen(server.url("/openapi.json"), timeout=30) as response:
        paths = {path for path, kinds in json.load(response)["paths"].items() if "post" in kinds}
    assert {CHAT, COMPLETION} < paths
    assert paths - {CHAT, COMPLETION, *UNANSWERED} <= PROMPTLESS


def test_refusals_are_sentences_and_reach_no_engine(server: VLLMServer) -> None:
    before = server.metric("request_success_total")
    for document in ("../report", "/etc/passwd", "unknown", "", 5, None, ["report"]):
        found = server.post(CHAT, {**chat("report", "?wolf="), "document": document})
        assert found.status == 400 and "document must be" in found.content["error"]["message"]
    assert server.metric("request_success_total") == before


def test_documents_of_others_cannot_be_reached_around_the_middleware(server: VLLMServer, folder: Path) -> None:
    document = read_document(folder / "notes.safetensors")
    prompt = [*document.placeholders, 34, 724, 32]
    body = {"prompt": prompt, "max_tokens": 2, "cache_salt": document.salt}
    assert server.post(COMPLETION, body).status == 500
    for params in ({"document": "notes"}, {"document": "notes", "digest": "x"}, {"document": "../notes"}, {"kept": 3}):
        found = server.post(COMPLETION, {**body, "cache_salt": "mine", "kv_transfer_params": params})
        assert found.status == (200 if "kept" in params else 500)  # an unknown parameter loads nothing
    server.wait_for_idle()


def test_two_hundred_requests_of_all_kinds(
    server: VLLMServer, folder: Path, answer: Callable[[Path, str], str]
) -> None:
    plain = {"max_tokens": NEW, "temperature": 0, "ignore_eos": True}
    alone = {word: server.post(COMPLETION, {"prompt": f"?{word}=", **plain}).text for word in WORDS}
    names = [*POLICIES]
    wanted = {(name, word): answer(folder / f"{name}.safetensors", f"?{word}=") for name in names for word in WORDS}

    def ask(index: int) -> None:
        word = WORDS[index % len(WORDS)]
        name = names[index % len(names)]
        kind = index % 7
        if kind == 0:
            assert server.post(COMPLETION, {"prompt": f"?{word}=", **plain}).text == alone[word]
        elif kind == 1:
            server.cancel(CHAT, chat(name, f"?{word}=", max_tokens=200))
        elif kind == 2:
            assert server.post(CHAT, chat("unknown", f"?{word}=")).status == 400
        elif kind == 3:
            events = server.stream(CHAT, chat(name, f"?{word}="))[:-1]
            text = "".join(event["choices"][0]["delta"].get("content") or "" for event in events)
            assert text == wanted[name, word]
        else:
            assert server.post(CHAT, chat(name, f"?{word}=")).text == wanted[name, word]

    with ThreadPoolExecutor(16) as pool:
        for future in [pool.submit(ask, index) for index in range(200)]:
            future.result(timeout=240)
    server.wait_for_idle()


def test_files_that_change_or_disappear(
    server: VLLMServer, folder: Path, answer: Callable[[Path, str], str], tmp_path: Path
) -> None:
    path = folder / "changing.safetensors"
    shutil.copy(folder / "report.safetensors", path)
    assert server.post(CHAT, chat("changing", "?wolf=")).text == answer(folder / "report.safetensors", "?wolf=")
    shutil.copy(folder / "notes.safetensors", tmp_path / "new")
    (tmp_path / "new").replace(path)
    assert server.post(CHAT, chat("changing", "?wolf=")).text == answer(folder / "notes.safetensors", "?wolf=")
    path.write_bytes(path.read_bytes()[:-100])  # in place, as an editor would
    found = server.post(CHAT, chat("changing", "?wolf="))
    assert found.status == 400 and "truncated or edited" in found.content["error"]["message"]
    path.unlink()
    found = server.post(CHAT, chat("changing", "?wolf="))
    assert found.status == 400 and "must be one of the folder's" in found.content["error"]["message"]
    assert server.post(CHAT, chat("report", "?wolf=")).text == answer(folder / "report.safetensors", "?wolf=")
    server.wait_for_idle()


def test_two_servers_share_a_folder(
    server: VLLMServer, checkpoint: Path, folder: Path, answer: Callable[[Path, str], str], tmp_path: Path
) -> None:
    with serving(checkpoint, folder, tmp_path / "second.log") as second:
        for each in (server, second, server):
            found = each.post(CHAT, chat("codes", "?gold="))
            assert found.text == answer(folder / "codes.safetensors", "?gold=")
