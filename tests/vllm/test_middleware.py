"""The middleware turns bodies that name a document into requests of the engine, and passes all others on."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kvpolicy
from kvpolicy_vllm import Documents, read_document
from kvpolicy_vllm.asgi import CHAT, COMPLETION
from kvpolicy_vllm.middleware import UNANSWERED
from tests.vllm.asgi_server import AsgiServer
from tests.vllm.models import engine_config, records, save_text

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
ANSWER: dict[str, Any] = {"usage": {"prompt_tokens": 0, "completion_tokens": 1, "total_tokens": 1}, "choices": []}


class Server(AsgiServer):
    """Answers with a usage, in a stream if it is asked for."""

    def __init__(
        self, config: Any, keys: list[str] | None = None, template: str | None = TEMPLATE, **more: Any
    ) -> None:
        super().__init__(
            Documents, config, api_key=keys, chat_template=template, default_chat_template_kwargs=None, **more
        )

    async def respond(self, content: Any, receive: Any, send: Any) -> None:
        if not isinstance(content, dict) or not content.get("stream"):
            body = json.dumps(ANSWER).encode()
            headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": body[:5], "more_body": True})
            await send({"type": "http.response.body", "body": body[5:]})
            return
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        stream = f"data: {json.dumps({'usage': None})}\n\ndata: {json.dumps(ANSWER)}\n\ndata: [DONE]\n\n".encode()
        for start in range(0, len(stream), 7):  # events may be cut anywhere
            await send({"type": "http.response.body", "body": stream[start : start + 7], "more_body": True})
        await send({"type": "http.response.body", "body": b""})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("documents")
    save_text(kvpolicy.tiny(), records(), "keydiff:decode=grow@0.5", path / "report.safetensors")
    return path


@pytest.fixture(scope="module")
def server(folder: Path) -> Server:
    return Server(engine_config(kvpolicy.tiny()[0], folder))


@pytest.fixture(autouse=True)
def no_bodies(request: pytest.FixtureRequest) -> Iterator[None]:
    if "server" in request.fixturenames:
        request.getfixturevalue("server").bodies.clear()
    yield


def chat(**changes: Any) -> dict[str, Any]:
    return {"document": "report", "messages": [{"role": "user", "content": "?wolf="}], "max_tokens": 4, **changes}


def test_a_chat_becomes_placeholders_and_its_question(server: Server, folder: Path) -> None:
    assert server.post(CHAT, chat())[0] == 200
    (body,) = server.bodies
    document = read_document(folder / "report.safetensors")
    question = kvpolicy.tiny()[1]("?wolf=", add_special_tokens=False).input_ids
    assert body == {
        "messages": chat()["messages"],
        "max_tokens": 4,
        "cache_salt": document.salt,
        "kv_transfer_params": {
            "document": "report",
            "digest": document.digest,
            "prompt_token_ids": [*document.placeholders, *question],
        },
    }


@pytest.mark.parametrize("prompt", ["?wolf=", [34, 724, 32]])
def test_a_completion_becomes_placeholders_and_its_prompt(server: Server, folder: Path, prompt: Any) -> None:
    assert server.post(COMPLETION, {"document": "report", "prompt": prompt}, root="/api")[0] == 200
    (body,) = server.bodies
    document = read_document(folder / "report.safetensors")
    question = kvpolicy.tiny()[1](prompt, add_special_tokens=False).input_ids if isinstance(prompt, str) else prompt
    assert body["prompt"] == [*document.placeholders, *question]
    assert body["kv_transfer_params"] == {"document": "report", "digest": document.digest}


def test_the_usage_counts_the_whole_document(server: Server, folder: Path) -> None:
    document = read_document(folder / "report.safetensors")
    more = document.total - document.kept
    wanted = {
        "prompt_tokens": more,
        "completion_tokens": 1,
        "total_tokens": 1 + more,
        "kvpolicy": {"document_tokens": document.total, "kept_tokens": document.kept},
    }
    assert json.loads(server.post(CHAT, chat())[1])["usage"] == wanted
    events = server.post(CHAT, chat(stream=True))[1].decode().split("\n\n")
    assert [json.loads(events[index][6:])["usage"] for index in (0, 1)] == [None, wanted]
    assert events[2:] == ["data: [DONE]", ""]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [], "model": "é"}),
        (COMPLETION, {"prompt": "document"}),
        (CHAT, b"no JSON"),
        (CHAT, b'["document"]'),
        (CHAT, b""),
        ("/v1/embeddings", {"document": "report"}),
        (UNANSWERED[0], {"token_ids": [1]}),
    ],
)
def test_other_bodies_pass_unchanged(server: Server, path: str, body: Any) -> None:
    status, answer = server.post(path, body)
    assert status == 200 and json.loads(answer) == ANSWER
    if isinstance(body, bytes):
        body = json.loads(body) if body.startswith(b"[") else body
    assert server.bodies == [body]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"document": "other"}, r"one of the folder's \(report\), got 'other'"),
        ({"document": "../report"}, "must be the name of a document"),
        ({"document": None}, "must be the name of a document"),
        ({"messages": []}, "messages must be a list"),
        ({"messages": [{"role": "user", "content": ""}]}, "at least one token"),
        ({"cache_salt": "x"}, "cache_salt must not be set"),
        ({"kv_transfer_params": {"kept": 1}}, "kv_transfer_params must not be set"),
        ({"prompt_logprobs": 0}, "prompt_logprobs must not be set"),
        ({"return_token_ids": True}, "return_token_ids must not be set"),
        ({"echo": True}, "echo must not be set"),
        ({"chat_template_kwargs": [1]}, r"chat_template_kwargs must be an object, got \[1\]"),
        ({"chat_template_kwargs": "x"}, "chat_template_kwargs must be an object"),
        ({"chat_template_kwargs": {"document": 1}}, "chat_template_kwargs must have other names than .*, got document"),
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens must not be set"),
        ({"use_beam_search": True}, "use_beam_search must not be set"),
        ({"messages": [{"role": "user", "content": "?wolf=" * 400}]}, "fewer than 1,024 tokens"),
    ],
)
def test_what_a_document_has_no_answer_to_is_refused(server: Server, changes: Any, message: str) -> None:
    status, answer = server.post(CHAT, chat(**changes))
    error = json.loads(answer)["error"]
    assert (status, error["code"], error["type"]) == (400, 400, "BadRequestError")
    assert re.search(message, error["message"]), error["message"]
    assert not server.bodies


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        *((COMPLETION, {"prompt": prompt}, "") for prompt in (None, "", [], ["?wolf="], [[1]], [True], 5)),
        *((path, {}, "must be asked at") for path in UNANSWERED),  # where vLLM would answer without the document
    ],
)
def test_other_prompts_and_paths_are_refused(server: Server, path: str, body: dict[str, Any], message: str) -> None:
    status, answer = server.post(path, chat(**body))
    assert status == 400 and message in json.loads(answer)["error"]["message"]
    assert not server.bodies


def test_nothing_is_looked_at_before_the_keys_of_the_server(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The key of the environment counts where no argument is."""
    server = Server(engine_config(kvpolicy.tiny()[0], folder), keys=["secret", "other"])
    for key in ("", "wrong", "secre"):
        server.post(CHAT, chat(document="no such document"), key)
    server.post(CHAT, chat(document="no such document"), "secret", scheme="Basic")
    assert [body["document"] for body in server.bodies] == ["no such document"] * 4  # vLLM's own check comes behind
    assert server.post(CHAT, chat(document="no such document"), "secret")[0] == 400
    assert server.post(CHAT, chat(), "other")[0] == 200
    assert server.bodies[-1]["cache_salt"]
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    server = Server(engine_config(kvpolicy.tiny()[0], folder))
    server.post(CHAT, chat(), "wrong")
    server.post(CHAT, chat(), "secret")
    assert ["document" in body for body in server.bodies] == [True, False]


def test_an_engine_without_the_connector_or_a_folder_answers_no_document(folder: Path) -> None:
    no_folder, other, none = (engine_config(kvpolicy.tiny()[0], each) for each in (None, folder, folder))
    other.kv_transfer_config.kv_connector = "OtherConnector"
    none.kv_transfer_config = None
    for config, word in ((no_folder, "folder"), (other, "KVPolicyConnector"), (none, "KVPolicyConnector")):
        status, answer = Server(config).post(CHAT, chat())
        assert status == 400 and word in json.loads(answer)["error"]["message"]


@pytest.mark.parametrize(
    ("changes", "efforts", "wanted"),
    [
        ({}, {"low": "none"}, "-"),
        ({"reasoning_effort": None}, None, "-"),
        ({"reasoning_effort": "low"}, None, "low-True"),
        ({"reasoning_effort": "none"}, None, "none-False"),
        ({"reasoning_effort": "low"}, {"low": "high"}, "high-True"),
        ({"reasoning_effort": "high"}, {"low": "none"}, "high-True"),
        ({"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}}, None, "low-False"),
    ],
)
def test_a_reasoning_effort_reaches_the_template_as_in_vllm(
    folder: Path, changes: dict[str, Any], efforts: dict[str, str] | None, wanted: str
) -> None:
    model, tokenizer = kvpolicy.tiny()
    template = TEMPLATE + "{{ reasoning_effort }}-{{ enable_thinking }}"
    server = Server(engine_config(model, folder), template=template, reasoning_effort_map=efforts)
    assert server.post(CHAT, chat(**changes))[0] == 200
    ids = server.bodies[0]["kv_transfer_params"]["prompt_token_ids"]
    kept = read_document(folder / "report.safetensors").kept
    assert ids[kept:] == tokenizer(f"?wolf={wanted}", add_special_tokens=False).input_ids


def test_the_template_of_the_server_may_be_a_file(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    config = engine_config(kvpolicy.tiny()[0], folder)
    assert Server(config, template=str(tmp_path / "template.jinja")).post(CHAT, chat())[0] == 200
    assert "must be a file" in str(Server(config, template="none.jinja").post(CHAT, chat())[1])
    assert "must have a chat template" in str(Server(config, template=None).post(CHAT, chat())[1])
