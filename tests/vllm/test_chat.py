"""The question of a chat is what the template writes behind the document's turn."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

import kvpolicy
from kvpolicy.text.errors import KVPolicyError
from kvpolicy_vllm.chat import Chat
from kvpolicy_vllm.documents import Document

TURNS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""A template of turns, with the beginning of an answer."""

ALTERNATING = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""A template that accepts a user and an assistant in turn, as that of Gemma."""

WELCOMING = (
    "{% if messages[0].role != 'system' %}<system>Be brief.</system>\n{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>\n{% endfor %}"
)
"""A template that begins chats without a system message by one of its own, as that of Qwen."""

CHANGING = "{% for m in messages %}[{{ messages | length }}]{{ m.content }};{% endfor %}"
"""A template whose first turn is not the same in front of others."""

PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"
"""A template that writes contents and nothing else."""

TEXT = "wolf=1002\ngold=1005\n"
QUESTION = {"role": "user", "content": "?wolf="}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return kvpolicy.tiny()[1]


def document(tokenizer: Any, text: str, **changes: Any) -> Document:
    ids = tuple(tokenizer(text, add_special_tokens=False).input_ids)
    facts: dict[str, Any] = {"digest": text, "model": {}, "dtype": "float32", "spec": "full", "path": Path("report")}
    return dataclasses.replace(Document(kept=len(ids), total=len(ids), tokens=ids, **facts), **changes)


def asked(tokenizer: Any, template: str | None, text: str, *messages: dict[str, Any], **options: Any) -> str:
    chat = Chat(tokenizer, template)
    options = {"add_generation_prompt": True, **options}
    return tokenizer.decode(chat.question(document(tokenizer, text), [*messages], **options))


FIRST = {"role": "user", "content": TEXT}
EARLIER = (QUESTION, {"role": "assistant", "content": "1002"}, {"role": "user", "content": "?gold="})
ASKED = "<user>?wolf=</user>\n<assistant>"
PARTED = "{% for m in messages %}<{{ m.role }}>{% for p in m.content %}{{ p.text }}{% endfor %}\n{% endfor %}"
PARTS = {"role": "user", "content": [{"type": "text", "text": "?wo"}, {"type": "text", "text": "lf="}]}
CASES = {
    "behind the turn of a user": (TURNS, f"<user>{TEXT}</user>\n", [QUESTION], ASKED),
    "behind the turn of a system": (TURNS, f"<system>{TEXT}</system>\n", [QUESTION], ASKED),
    "behind the system message": (WELCOMING, f"<system>{TEXT}</system>\n", [QUESTION], "<user>?wolf=</user>\n"),
    "with a system message of its own": (
        *(WELCOMING, TEXT, [QUESTION]),
        "<system>Be brief.</system>\n<user>?wolf=</user>\n",
    ),
    "messages that begin with the document are cut": (TURNS, f"<user>{TEXT}</user>\n", [FIRST, QUESTION], ASKED),
    "earlier answers are a part": (
        *(TURNS, f"<user>{TEXT}</user>\n", EARLIER),
        f"{ASKED}1002</assistant>\n<user>?gold=</user>\n<assistant>",
    ),
    "an empty answer where turns must alternate": (
        *(ALTERNATING, f"<user>{TEXT}\n", [QUESTION]),
        "<assistant>\n<user>?wolf=\n<assistant>",
    ),
    "behind a plain text": (TURNS, TEXT, [QUESTION], ASKED),
    "plain behind a plain text": (PLAIN, TEXT, [QUESTION], "?wolf="),
    # The document's turn is a text, of which this template writes nothing: it is plain text to it.
    "contents of several texts": (PARTED, TEXT, [PARTS], "<user>?wolf="),
}


@pytest.mark.parametrize(("template", "text", "messages", "wanted"), CASES.values(), ids=CASES)
def test_the_question_of_a_chat(tokenizer: Any, template: str, text: str, messages: Any, wanted: str) -> None:
    assert asked(tokenizer, template, text, *messages) == wanted


def test_options_reach_the_template(tokenizer: Any) -> None:
    text = f"<user>{TEXT}</user>\n"
    assert asked(tokenizer, TURNS, text, QUESTION, add_generation_prompt=False) == "<user>?wolf=</user>\n"
    begun = QUESTION, {"role": "assistant", "content": "10"}
    found = asked(tokenizer, TURNS, text, *begun, add_generation_prompt=False, continue_final_message=True)
    assert found == "<user>?wolf=</user>\n<assistant>10"
    with_kind = "{% for m in messages %}{{ kind }}{{ m.content }};{% endfor %}"
    chat = Chat(tokenizer, with_kind, {"kind": "a"})
    report = document(tokenizer, f"a{TEXT};")
    assert tokenizer.decode(chat.question(report, [QUESTION])) == "a?wolf=;"


@pytest.mark.parametrize(
    ("template", "text", "messages", "message"),
    [
        (TURNS, TEXT, [], "messages must be a list of messages"),
        (TURNS, TEXT, "?wolf=", "messages must be a list of messages"),
        (TURNS, TEXT, [{"role": "user", "content": [{"type": "image_url"}]}], "contain only text"),
        (TURNS, TEXT, [{"role": "user", "content": 5}], "contain only text"),
        (ALTERNATING, f"<user>{TEXT}\n", [QUESTION, QUESTION], "roles must alternate"),
        (ALTERNATING, TEXT, [QUESTION, QUESTION], "roles must alternate"),
        (CHANGING, f"[1]{TEXT};", [QUESTION], "must write the document's turn first"),
        (None, TEXT, [QUESTION], "must have a chat template"),
    ],
)
def test_other_chats_are_refused(tokenizer: Any, template: str, text: str, messages: Any, message: str) -> None:
    with pytest.raises(KVPolicyError, match=message):
        Chat(tokenizer, template).question(document(tokenizer, text), messages)
    with pytest.raises(KVPolicyError, match="token ids"):
        Chat(tokenizer, TURNS).question(document(tokenizer, TEXT, tokens=()), [QUESTION])
