"""The question of a chat: what the chat template writes behind the document's turn, as token ids."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvpolicy.text.errors import KVPolicyError
from kvpolicy_vllm.documents import Document

MARK = "KVPOLICYDOCUMENT"
"""Stands for the text of a document while a template is rendered."""

Message = Mapping[str, Any]
Render = Callable[..., str]
"""`render(messages, add_generation_prompt=False, continue_final_message=False)`: the text that a template makes."""

_EMPTY = {"role": "assistant", "content": ""}


class Chat:
    """Renders chats behind documents.

    A document may be a turn of the user or of the system, as `kvpolicy cache make --chat` writes it, or plain text. The
    messages come behind it; they may also begin with the document's own turn, which is removed then.

    Args:
        tokenizer: The tokenizer of the model.
        template: A chat template; that of the tokenizer by default.
        options: What every rendering passes to the template.
    """

    def __init__(self, tokenizer: Any, template: str | None = None, options: Mapping[str, Any] | None = None) -> None:
        """Render nothing yet."""
        self._tokenizer = tokenizer
        self._template = template
        self._options = {**(options or {})}
        self._roles: dict[str, str] = {}

    def question(self, document: Document, messages: Sequence[Message], **options: Any) -> list[int]:
        """The token ids behind a document.

        Args:
            document: The document, with its token ids.
            messages: The chat behind the document, of texts only.
            options: Of the template: `add_generation_prompt`, `continue_final_message`, `tools` and others.

        Raises:
            KVPolicyError: If there is no template, it refuses the messages, or does not write the document's turn
                first.
        """
        if not document.tokens:
            raise KVPolicyError(
                f"The document {document.path.stem!r} must have its token ids for a chat, got none; try "
                "kvpolicy cache make."
            )
        if self._template is None and not getattr(self._tokenizer, "chat_template", None):
            raise KVPolicyError(
                "The tokenizer must have a chat template for a chat, got one without; try --chat-template, or "
                "/v1/completions."
            )
        self._check(messages)

        def render(turns: Sequence[Message], **more: Any) -> str:
            return self._tokenizer.apply_chat_template(
                [*turns], tokenize=False, chat_template=self._template, **{**self._options, **options, **more}
            )

        text = ""
        whole = []
        refusal = None
        try:
            text = render(messages)
            whole = self.tokens(text)
        except Exception as error:  # of Jinja, or raised by the template
            refusal = error
        if len(whole) > document.total and tuple(whole[: document.total]) == document.tokens:
            return whole[document.total :]
        role = self._role_of(document, render)
        if role:
            return self.tokens(_behind({"role": role, "content": MARK}, messages, render))
        if refusal is not None:
            raise _refused(refusal) from refusal
        bos: str = getattr(self._tokenizer, "bos_token", None) or ""
        return self.tokens(text.removeprefix(bos))

    def tokens(self, text: str) -> list[int]:
        """Token ids of a text that has its special tokens."""
        return self._tokenizer(text, add_special_tokens=False, verbose=False).input_ids

    def _role_of(self, document: Document, render: Render) -> str:
        """The role whose turn a document is; empty if it is plain text."""
        if document.digest not in self._roles:
            text: str = self._tokenizer.decode([*document.tokens], clean_up_tokenization_spaces=False)
            self._roles[document.digest] = next((r for r in ("user", "system") if _is_turn(text, r, render)), "")
        return self._roles[document.digest]

    def _check(self, messages: Any) -> None:
        if not isinstance(messages, list) or not messages or not all(isinstance(each, dict) for each in messages):
            raise KVPolicyError("messages must be a list of messages, got none; try one with the question.")
        for message in messages:
            content: Any = message.get("content")
            parts = content if isinstance(content, list) else []
            if not isinstance(content, str | list | None) or any(
                not isinstance(part, dict) or part.get("type") != "text" for part in parts
            ):
                raise KVPolicyError("messages must contain only text with a document, got other contents.")


def _is_turn(text: str, role: str, render: Render) -> bool:
    try:
        before, _, after = _first_turn({"role": role, "content": MARK}, render).partition(MARK)
    except Exception:  # a template without that role
        return False
    return bool(before or after) and text.startswith(before) and text.endswith(after)


def _first_turn(turn: Message, render: Render) -> str:
    return render([turn], add_generation_prompt=False, continue_final_message=False)


def _behind(turn: Message, messages: Sequence[Message], render: Render) -> str:
    """The text of messages behind a turn; behind an empty answer to it, where roles must alternate."""
    start = _first_turn(turn, render)
    refusal: Exception | None = None
    for between in ([], [_EMPTY]):
        try:
            text = render([turn, *between, *messages])
        except Exception as error:
            refusal = error
            continue
        if text.startswith(start):
            return text[len(start) :]
    if refusal is not None:
        raise _refused(refusal) from refusal
    raise KVPolicyError(
        "The chat template must write the document's turn first, got one that changes it for these messages; try "
        "without a system message."
    )


def _refused(error: Exception) -> KVPolicyError:
    return KVPolicyError(
        f"messages must be such as the chat template accepts, got {str(error) or type(error).__name__}."
    )
