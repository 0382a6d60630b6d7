"""The middleware sends long prompts as two requests, and passes all others on as they are."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from kvpolicy import KVPolicyError
from kvpolicy_vllm import Compress, compress
from kvpolicy_vllm.asgi import CHAT, COMPLETION
from kvpolicy_vllm.rendering import Rendered
from tests.vllm.asgi_server import AsgiServer

IDS = [*range(3, 103)]
KEPT = 50
HALVES = [*IDS[: KEPT // 2], *IDS[-KEPT // 2 :]]
USAGE = {"prompt_tokens": KEPT, "completion_tokens": 1, "total_tokens": KEPT + 1}
COMPLETED = {"model": "m", "prompt": "long", "max_tokens": 7}
ASKED = {"model": "m", "messages": [{"role": "user", "content": "long"}], "max_tokens": 7}


class Server(AsgiServer):
    """Answers with a usage.

    Attributes:
        statuses: Of the next answers; 200 when there are no more, 0 for none.
    """

    def __init__(self, keys: list[str] | None = None, extra: Mapping[str, Any] | None = None) -> None:
        found = {"policy": "window@0.5", "threshold": 64, "least": 0} if extra is None else extra
        transfer = SimpleNamespace(
            kv_connector="KVPolicyConnector", get_from_extra_config=lambda name, default: found.get(name, default)
        )
        config = SimpleNamespace(kv_transfer_config=transfer)
        super().__init__(Compress, config, api_key=keys, served_model_name=["m", "other"], model="folder")
        self.statuses: list[int] = []

    async def respond(self, content: Any, receive: Any, send: Any) -> None:
        status = self.statuses.pop(0) if self.statuses else 200
        if not status:
            assert (await receive())["type"] == "http.disconnect"
            return
        body = json.dumps({"usage": USAGE} if status == 200 else {"error": "of the server"}).encode()
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def asked(self, path: str, body: Any, key: str = "", root: str = "") -> tuple[int, Any]:
        """Send a body; the status and the JSON of the answer."""
        status, content = self.post(path, body, key, root)
        return status, json.loads(content) if status else None


@pytest.fixture(autouse=True)
def texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the server renders."""
    for name in ("KVPOLICY_POLICY", "KVPOLICY_THRESHOLD", "KVPOLICY_PREFILLS", "KVPOLICY_LEAST", "VLLM_API_KEY"):
        monkeypatch.delenv(name, raising=False)

    async def rendered(state: Any, content: Mapping[str, Any], is_chat: bool) -> Rendered | None:
        assert state.args and is_chat == ("messages" in content)
        text = content["messages"][0]["content"] if is_chat else content["prompt"]
        sizes = {"long": 100, "short": 63, "least": 64, "full": 100}
        return Rendered(IDS[: sizes[text]], 0 if text == "full" else 5) if text in sizes else None

    monkeypatch.setattr(compress, "rendered", rendered)


@pytest.mark.parametrize("root", ["", "/root"])
def test_a_long_prompt_is_two_requests(root: str) -> None:
    server = Server()
    status, content = server.asked(COMPLETION, {**COMPLETED, "stop": ["."], "priority": 3}, root=root)
    first, second = server.bodies
    (name,) = first["kv_transfer_params"].values()
    assert first == {
        **{"model": "m", "priority": 3, "prompt": IDS, "max_tokens": 1, "temperature": 0},
        **{"cache_salt": first["cache_salt"], "kv_transfer_params": {"prefill": name}},
    }
    assert second == {
        **{"model": "m", "priority": 3, "stop": ["."], "prompt": HALVES, "max_tokens": 5},
        **{"cache_salt": second["cache_salt"], "kv_transfer_params": {"compressed": name}},
    }
    assert first["cache_salt"] != second["cache_salt"] and name in first["cache_salt"]
    assert [scope["path"] for scope in server.scopes] == [root + COMPLETION] * 2
    assert [(b"x-request-id", b"7") in scope["headers"] for scope in server.scopes] == [False, True]
    facts = {"prompt_tokens": 100, "kept_tokens": KEPT}
    assert content["usage"] == {**USAGE, "prompt_tokens": 100, "total_tokens": 101, "kvpolicy": facts}
    assert status == 200 and len(name) == 32
    server.asked(COMPLETION, COMPLETED)
    assert server.bodies[2]["kv_transfer_params"] != first["kv_transfer_params"]


def test_a_long_chat_is_rendered_once() -> None:
    server = Server()
    tools = [{"type": "function", "function": {"name": "f"}}]
    status, content = server.asked(CHAT, {**ASKED, "tools": tools, "cache_salt": "mine"})
    first, second = server.bodies
    params = second["kv_transfer_params"]
    assert params == {"compressed": params["compressed"], "prompt_token_ids": HALVES}
    assert {**second, "cache_salt": "", "kv_transfer_params": {}} == {
        **{"model": "m", "messages": ASKED["messages"], "tools": tools, "max_completion_tokens": 5},
        **{"cache_salt": "", "kv_transfer_params": {}},
    }
    assert first["prompt"] == IDS and server.scopes[0]["path"] == COMPLETION and server.scopes[1]["path"] == CHAT
    assert (status, content["usage"]["prompt_tokens"]) == (200, 100)


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt": "short"},
        {"prompt": "unknown"},
        {"prompt": "full"},
        {"model": "adapter"},
        {"n": 2},
        {"best_of": 3},
        {"echo": True},
        {"suffix": "x"},
        {"prompt_logprobs": 0},
        {"use_beam_search": True},
        {"return_token_ids": True},
        {"truncate_prompt_tokens": 5},
        {"kv_transfer_params": {"other": "x"}},
        {"document": "report"},
        {"document": None},
    ],
)
def test_other_requests_pass_as_they_are(changes: dict[str, Any]) -> None:
    server = Server()
    status, content = server.asked(COMPLETION, {**COMPLETED, **changes})
    assert server.bodies == [{**COMPLETED, **changes}] and (status, content) == (200, {"usage": USAGE})


@pytest.mark.parametrize(
    "changes", [{"n": 1}, {"best_of": None}, {"echo": False}, {"model": "other"}, {"prompt": "least"}]
)
def test_fields_that_ask_for_nothing_else(changes: dict[str, Any]) -> None:
    server = Server()
    server.asked(COMPLETION, {**COMPLETED, **changes})
    assert len(server.bodies) == 2


@pytest.mark.parametrize("path", [CHAT, COMPLETION, "/v1/responses", "/inference/v1/generate"])
@pytest.mark.parametrize("params", [{"prefill": "x"}, {"compressed": "x", "other": 1}])
def test_clients_name_no_prompts_to_the_engine(path: str, params: dict[str, str]) -> None:
    server = Server()
    named = {"kv_transfer_params": params}
    for fields in (named, {"sampling_params": {"extra_args": named}}):
        status, content = server.asked(path, {**COMPLETED, **fields})
        assert status == 400 and "must not name a prompt" in content["error"]["message"] and not server.bodies
    assert server.asked("/v1/responses", COMPLETED)[0] == 200 and server.bodies == [COMPLETED]


@pytest.mark.parametrize("sampling", [None, [], {"extra_args": None}, {"extra_args": {"kv_transfer_params": [1]}}])
def test_other_sampling_parameters_pass(sampling: Any) -> None:
    server = Server()
    body = {"token_ids": [5], "sampling_params": sampling}
    assert server.asked("/inference/v1/generate", body)[0] == 200 and server.bodies == [body]


def test_other_paths_and_bodies_pass() -> None:
    server = Server()
    assert server.asked("/v1/embeddings", COMPLETED)[0] == 200 and server.bodies == [COMPLETED]
    assert server.asked(COMPLETION, [5])[0] == 200 and server.bodies[1:] == [[5]]
    scope = {"type": "http", "method": "POST", "path": COMPLETION, "headers": []}
    assert server.call(scope, []) == [] and server.bodies[2:] == [None]  # the client left


def test_without_a_key_nothing_is_looked_at() -> None:
    """Nor is a prompt changed of which a policy keeps all."""
    keeps_all = Server(extra={"policy": "window@200", "threshold": 64})
    keeps_all.asked(COMPLETION, COMPLETED)
    assert keeps_all.bodies == [COMPLETED]
    server = Server(["secret"])
    server.asked(COMPLETION, COMPLETED, "other")
    assert server.bodies == [COMPLETED]
    server.asked(COMPLETION, COMPLETED, "secret")
    assert len(server.bodies) == 3


@pytest.mark.parametrize(("path", "body"), [(COMPLETION, COMPLETED), (CHAT, ASKED)])
@pytest.mark.parametrize("statuses", [[400], [500], [200, 500], [0]])
def test_the_first_error_is_the_answer(statuses: list[int], path: str, body: Any) -> None:
    """None if the client leaves; nothing more is asked then."""
    server = Server()
    server.statuses = [*statuses]
    last = statuses[-1]
    assert server.asked(path, body) == (last, {"error": "of the server"} if last else None)
    assert len(server.bodies) == len(statuses)


def started(server: Server) -> list[Any]:
    return server.call({"type": "lifespan"}, [{"type": "lifespan.startup"}])


def test_it_starts_with_a_policy_only(monkeypatch: pytest.MonkeyPatch) -> None:
    assert started(Server()) == [{"type": "lifespan.startup.complete"}]
    (failed,) = started(Server(extra={}))
    assert failed["type"] == "lifespan.startup.failed" and "KVPOLICY_POLICY must name the policy" in failed["message"]
    (failed,) = started(Server(extra={"policy": "kvzip@0.2"}))
    assert "must be one of window" in failed["message"]
    other = Server()
    other.state.vllm_config.kv_transfer_config = None
    assert "must have the KVPolicyConnector" in started(other)[0]["message"]
    monkeypatch.setenv("KVPOLICY_POLICY", "squeeze+snapkv@0.2")
    with pytest.raises(KVPolicyError, match="equally many"):
        Server()
    monkeypatch.setenv("KVPOLICY_POLICY", "snapkv@0.2")
    assert started(Server(extra={})) == [{"type": "lifespan.startup.complete"}]
