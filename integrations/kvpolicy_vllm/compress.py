"""Chats and completions whose long prompts are compressed in the engine: `--middleware kvpolicy_vllm.Compress`."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping
from typing import Any, NamedTuple

from kvpolicy.text.errors import KVPolicyError
from kvpolicy_vllm.asgi import (
    CHAT,
    COMPLETION,
    App,
    Event,
    Receive,
    Scope,
    Send,
    body_of,
    is_let_in,
    parsed,
    posted,
    refuse,
    replay,
    with_body,
)
from kvpolicy_vllm.ledger import COMPRESSED, PREFILL
from kvpolicy_vllm.middleware import FIELD, UNANSWERED
from kvpolicy_vllm.prompts import first_request, second_request
from kvpolicy_vllm.recipe import POLICY, Recipe
from kvpolicy_vllm.rendering import rendered
from kvpolicy_vllm.usage import Tokens, UsageEditor

PARAMS = "kv_transfer_params"
"""The field by which this middleware tells the engine about a prompt; clients could take the places of others."""

UNTOUCHED: Mapping[str, tuple[Any, ...]] = {
    FIELD: (),
    "best_of": (None, 1),
    "echo": (None, False),
    "kv_transfer_params": (None,),
    "n": (None, 1),
    "prompt_embeds": (None,),
    "prompt_logprobs": (None,),
    "return_prompt_text": (None, False),
    "return_token_ids": (None, False),
    "suffix": (None, ""),
    "truncate_prompt_tokens": (None,),
    "use_beam_search": (None, False),
}
"""Fields that look at the tokens of a prompt, or ask for several answers, and the values with which a prompt is
compressed; with others it is not."""


class _Asked(NamedTuple):
    """A prompt that is compressed.

    Attributes:
        ids: Its token ids.
        kept: How many of them each head keeps.
        new: The most tokens that are generated.
    """

    ids: list[int]
    kept: int
    new: int


class _Answer:
    """Messages that a server sends.

    Attributes:
        events: The events of the response.
    """

    def __init__(self) -> None:
        """Nothing came yet."""
        self.events: list[Event] = []

    async def send(self, event: Event) -> None:
        """Take an event."""
        self.events.append(event)

    @property
    def status(self) -> int:
        """The HTTP status; 0 if nothing was sent."""
        return self.events[0]["status"] if self.events else 0

    @property
    def body(self) -> bytes:
        """The body."""
        return b"".join(event.get("body", b"") for event in self.events)


class Compress:
    """Compresses the long prompts of chats and completions; all other requests pass unchanged.

    `KVPOLICY_POLICY` in the environment, or `policy` in the `kv_connector_extra_config` of the engine's
    `KVPolicyConnector`, is the policy, such as `snapkv@0.2`; see `kvpolicy_vllm.recipe.Recipe`. Prompts of at least
    `KVPOLICY_THRESHOLD` tokens are compressed.

    A prompt runs as a request of one token first, at whose end the engine compresses it. The request itself then runs
    with the kept tokens. Answers, streams, tools and errors are those of the server. `usage` counts the whole prompt;
    `usage.kvpolicy` has the tokens that are kept.

    Args:
        app: The application of vLLM.

    Raises:
        KVPolicyError: If the environment has a policy that an engine cannot have.
    """

    def __init__(self, app: App) -> None:
        """Wrap the application, and check the environment."""
        self._app = app
        self._recipe: Recipe | None = None
        if os.environ.get(POLICY):
            Recipe.of(None)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or start and stop with the server."""
        if scope["type"] == "lifespan":
            await self._start(scope, receive, send)
            return
        path = posted(scope)
        if path not in (CHAT, COMPLETION, *UNANSWERED):
            await self._app(scope, receive, send)
            return
        raw = await body_of(receive)
        content = parsed(raw)
        if _names_prompt(content):
            await refuse(send, f"{PARAMS} must not name a prompt to compress, got one that does.", PARAMS)
            return
        asked = None
        lets_in = isinstance(content, dict) and is_let_in(scope, scope["app"].state.args)
        if raw is not None and lets_in and path not in UNANSWERED:
            asked = await self._prompt_of(scope, path, content)
        if asked is None:
            await self._app(scope, replay(raw, receive), send)
            return
        name = secrets.token_hex(16)
        text, params = first_request(asked.ids, name)
        first = {
            **{field: content[field] for field in ("model", "priority") if field in content},
            **{"prompt": text["prompt_token_ids"], "cache_salt": text["cache_salt"], "kv_transfer_params": params},
            **{"max_tokens": 1, "temperature": 0},
        }
        answer = await self._ask(scope, COMPLETION, first, receive)
        if answer.status != 200:  # of the server, in its own words; nothing if the client has left
            for event in answer.events:
                await send(event)
            return
        body = json.dumps(_second(content, asked, name, path == CHAT)).encode()
        facts = {"prompt_tokens": len(asked.ids), "kept_tokens": asked.kept}
        editor = UsageEditor(Tokens(len(asked.ids) - asked.kept, facts), send)
        await self._app(with_body(scope, body), replay(body, receive), editor.send)

    async def _start(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check the engine while the server starts."""
        try:
            self._recipe_of(scope)
        except KVPolicyError as error:
            await receive()
            await send({"type": "lifespan.startup.failed", "message": str(error)})
            return
        await self._app(scope, receive, send)

    def _recipe_of(self, scope: Scope) -> Recipe:
        if self._recipe is None:
            transfer = scope["app"].state.vllm_config.kv_transfer_config
            if transfer is None or transfer.kv_connector != "KVPolicyConnector":
                raise KVPolicyError(
                    "The engine must have the KVPolicyConnector to compress prompts, got none; try "
                    "--kv-transfer-config as in the guide."
                )
            recipe = Recipe.of(transfer)
            if recipe is None:
                raise KVPolicyError(f"{POLICY} must name the policy to compress prompts, got none; try snapkv@0.2.")
            self._recipe = recipe
        return self._recipe

    async def _prompt_of(self, scope: Scope, path: str, content: Mapping[str, Any]) -> _Asked | None:
        """The prompt of a body as the server renders it; None if the server is to answer it as it is."""
        recipe = self._recipe_of(scope)
        args = scope["app"].state.args
        models = args.served_model_name or [args.model]
        if content.get("model") not in (None, *models):  # an adapter, or a model that there is not
            return None
        if any(field in content and content[field] not in allowed for field, allowed in UNTOUCHED.items()):
            return None
        found = await rendered(scope["app"].state, content, path == CHAT)
        if found is None or found.new < 1 or len(found.ids) < recipe.threshold:
            return None
        kept = recipe.kept(len(found.ids))
        return None if kept >= len(found.ids) else _Asked(found.ids, kept, found.new)

    async def _ask(self, scope: Scope, path: str, content: Mapping[str, Any], receive: Receive) -> _Answer:
        """Answer of the server to a body of our own, for as long as the client waits."""
        body = json.dumps(content).encode()
        found = _Answer()
        path = f"{scope.get('root_path') or ''}{path}"
        headers = [pair for pair in scope["headers"] if pair[0] != b"x-request-id"]
        asked = {**scope, "path": path, "raw_path": path.encode(), "query_string": b"", "headers": headers}
        await self._app(with_body(asked, body), replay(body, receive), found.send)
        return found


def _names_prompt(content: Any) -> bool:
    """Whether a body names a prompt to the engine: on its own, or in `sampling_params`, as one of token ids can."""
    if not isinstance(content, dict):
        return False
    sampling = content.get("sampling_params")
    extra = sampling.get("extra_args") if isinstance(sampling, dict) else None
    found = [holder.get(PARAMS) for holder in (content, extra) if isinstance(holder, dict)]
    return any(isinstance(params, dict) and (PREFILL in params or COMPRESSED in params) for params in found)


def _second(content: Mapping[str, Any], asked: _Asked, name: str, is_chat: bool) -> dict[str, Any]:
    """The body of the request behind a compressed prompt, which may not generate more than behind the whole one."""
    text, params = second_request(asked.ids, asked.kept, name)
    body = {**content, "cache_salt": text["cache_salt"], "kv_transfer_params": params}
    if not is_chat:
        return {**body, "prompt": text["prompt_token_ids"], "max_tokens": asked.new}
    body.pop("max_tokens", None)
    params["prompt_token_ids"] = text["prompt_token_ids"]
    return {**body, "max_completion_tokens": asked.new}
