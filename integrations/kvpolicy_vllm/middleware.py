"""Chats and completions about a document through vLLM's OpenAI server: `--middleware kvpolicy_vllm.Documents`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kvpolicy.text.errors import KVPolicyError
from kvpolicy_vllm.asgi import (
    CHAT,
    COMPLETION,
    App,
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
from kvpolicy_vllm.chat import Chat
from kvpolicy_vllm.documents import Document, Library, as_ids
from kvpolicy_vllm.engine import Engine
from kvpolicy_vllm.prompts import request_of
from kvpolicy_vllm.usage import UsageEditor, tokens_of

FIELD = "document"
"""The field of a body that names a document."""

UNANSWERED = (
    "/cohere/v2/chat",
    "/cohere/v2/chat/render",
    "/generative_scoring",
    "/inference/v1/generate",
    "/invocations",
    "/tokenize",
    "/v1/chat/completions/batch",
    "/v1/chat/completions/render",
    "/v1/completions/render",
    "/v1/decisions",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/messages/render",
    "/v1/responses",
    "/v1/responses/render",
    "/v1/systemone",
)
"""Paths that take a prompt, where vLLM would answer without the document."""

REFUSED: Mapping[str, tuple[Any, ...]] = {
    "cache_salt": (None,),
    "kv_transfer_params": (None,),
    "chat_template": (None,),
    "documents": (None,),
    "echo": (None, False),
    "prompt_embeds": (None,),
    "prompt_logprobs": (None,),
    "return_prompt_text": (None, False),
    "return_token_ids": (None, False),
    "suffix": (None,),
    "truncate_prompt_tokens": (None,),
    "use_beam_search": (None, False),
}
"""Fields that look at the tokens of a prompt or change them, and the values that they may have beside a document."""

RESERVED = ("chat_template", "conversation", "document", "messages", "self", "tokenize")
"""Names that `chat_template_kwargs` may not have, since the chat itself is passed under them."""


class Documents:
    """Answers bodies with `"document": NAME` from a document; all others pass unchanged.

    The engine must run with `KVPolicyConnector` and a folder of documents. A chat is rendered by the template of the
    model, the document's turn is left out, and the tokens behind it are sent with the document's placeholders. `usage`
    in answers and streams counts the document's whole text; `usage.kvpolicy` has the tokens that are kept.

    Whoever is not let in by the server's API keys gets the server's own refusal, before a document is looked at.

    Args:
        app: The application of vLLM.
    """

    def __init__(self, app: App) -> None:
        """Wrap the application, whose state is known with the first request."""
        self._app = app
        self._desk: Desk | None = None
        self._lock = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        path = posted(scope)
        if path not in (CHAT, COMPLETION, *UNANSWERED):
            await self._app(scope, receive, send)
            return
        state = scope["app"].state
        raw = await body_of(receive)
        content = parsed(raw)
        if raw is None or not isinstance(content, dict) or FIELD not in content or not is_let_in(scope, state.args):
            await self._app(scope, replay(raw, receive), send)
            return
        if path in UNANSWERED:
            await refuse(send, f"A document must be asked at {CHAT} or {COMPLETION}, got {path}.", FIELD)
            return
        try:
            desk = await self._desk_of(state)
            # Files are read and texts are tokenized beside the event loop, which other requests need.
            asked = await asyncio.to_thread(desk.prepare, content, path == CHAT)
        except KVPolicyError as error:
            await refuse(send, str(error), FIELD)
            return
        body = json.dumps(asked.body).encode()
        editor = UsageEditor(tokens_of(asked.document), send)
        await self._app(with_body(scope, body), replay(body, receive), editor.send)

    async def _desk_of(self, state: Any) -> Desk:
        async with self._lock:
            if self._desk is None:
                self._desk = await asyncio.to_thread(Desk.of, state.vllm_config, state.args)
        return self._desk


class Asked(NamedTuple):
    """A request as the engine gets it.

    Attributes:
        body: The body for vLLM.
        document: The document that it begins with.
    """

    body: dict[str, Any]
    document: Document


class Desk:
    """Makes requests of the engine from bodies that name a document.

    Args:
        engine: The engine.
        library: Its documents.
        chat: Renders chats.
        efforts: The reasoning effort that the chat template gets for one that is asked for.
    """

    def __init__(self, engine: Engine, library: Library, chat: Chat, efforts: Mapping[str, str] | None = None) -> None:
        """Prepare nothing yet."""
        self._engine = engine
        self._library = library
        self._chat = chat
        self._efforts = efforts or {}

    @classmethod
    def of(cls, vllm_config: Any, args: Any) -> Desk:
        """The desk of a server.

        Raises:
            KVPolicyError: If its engine has no connector or no folder of documents.
        """
        transfer = vllm_config.kv_transfer_config
        if transfer is None or transfer.kv_connector != "KVPolicyConnector":
            raise KVPolicyError(
                "The engine must have the KVPolicyConnector for documents, got none; try --kv-transfer-config as in "
                "the guide."
            )
        folder = transfer.get_from_extra_config("folder", None)
        if not folder:
            raise KVPolicyError(
                "kv_connector_extra_config must name the folder of documents, got none; try "
                '"kv_connector_extra_config": {"folder": "documents"}.'
            )
        from transformers import AutoTokenizer

        model = vllm_config.model_config
        tokenizer = AutoTokenizer.from_pretrained(
            model.tokenizer, revision=model.tokenizer_revision, trust_remote_code=model.trust_remote_code
        )
        chat = Chat(tokenizer, _template(args.chat_template), args.default_chat_template_kwargs)
        # The map of efforts is new in vLLM 0.33.
        efforts = getattr(args, "reasoning_effort_map", None)
        return cls(Engine.of(vllm_config), Library(folder, verify=True), chat, efforts)

    def prepare(self, content: Mapping[str, Any], is_chat: bool) -> Asked:
        """The request of a body.

        Raises:
            KVPolicyError: If there is no such document, it does not fit the engine, or a field has no meaning for it.
        """
        body = {**content}
        document = self._library.find(body.pop(FIELD))
        for field, allowed in REFUSED.items():
            if body.get(field) not in allowed:
                raise KVPolicyError(
                    f"{field} must not be set together with a document, got {json.dumps(body[field])[:80]}."
                )
        question = self._chat_question(document, body) if is_chat else self._completed(body)
        self._engine.check(document, len(question))
        prompt, params = request_of(document, question, document.path.stem)
        body["cache_salt"] = prompt["cache_salt"]
        if is_chat:
            params["prompt_token_ids"] = prompt["prompt_token_ids"]
        else:
            body["prompt"] = prompt["prompt_token_ids"]
        return Asked({**body, "kv_transfer_params": params}, document)

    def _chat_question(self, document: Document, body: Mapping[str, Any]) -> list[int]:
        given: Any = body.get("chat_template_kwargs") or {}
        if not isinstance(given, dict):
            raise KVPolicyError(
                f"chat_template_kwargs must be an object, got {json.dumps(given)[:80]}; try "
                '{"enable_thinking": false}.'
            )
        for name in RESERVED:
            if name in given:
                raise KVPolicyError(
                    f"chat_template_kwargs must have other names than {', '.join(RESERVED)}, got {name}; try without "
                    "it."
                )
        options: dict[str, Any] = {**given}
        if isinstance(effort := body.get("reasoning_effort"), str):
            effort = self._efforts.get(effort, effort)
            options["reasoning_effort"] = effort
            options.setdefault("enable_thinking", effort != "none")
        options["tools"] = body.get("tools")
        options["continue_final_message"] = bool(body.get("continue_final_message", False))
        options["add_generation_prompt"] = bool(
            body.get("add_generation_prompt", not options["continue_final_message"])
        )
        return as_ids(self._chat.question(document, body.get("messages") or [], **options))

    def _completed(self, body: Mapping[str, Any]) -> list[int]:
        prompt = body.get("prompt")
        if isinstance(prompt, str):
            return as_ids(self._chat.tokens(prompt))
        if isinstance(prompt, list) and prompt and all(type(each) is int for each in prompt):
            return as_ids(prompt)
        raise KVPolicyError("prompt must be a text or token ids with a document, got another kind of prompt.")


def _template(given: str | None) -> str | None:
    """The chat template of a server, which is given as a path or as the template itself."""
    if given is None or any(sign in given for sign in "{}\n"):
        return given
    path = Path(given)
    if not path.is_file():
        raise KVPolicyError(f"chat_template must be a file or a template for documents, got {given!r}.")
    return path.read_text(encoding="utf-8")
