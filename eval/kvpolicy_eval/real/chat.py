"""A prompt as the message of a user, in the chat template of a model."""

from __future__ import annotations

from typing import Any

from kvpolicy.text.errors import KVPolicyError
from kvpolicy_eval.real.prompts import Asked

ANSWER = "\nAnswer: "
"""What stands in a question before the words with which its answer begins."""


def in_template(asked: Asked, tokenizer: Any) -> Asked:
    """Put a document and its question into one message, and the first words of the answer behind it.

    Args:
        asked: A prompt whose question contains `ANSWER`.
        tokenizer: That of the model.

    Returns:
        The same prompt; the document begins with the template, and the question contains the rest of it.

    Raises:
        KVPolicyError: If the tokenizer has no chat template.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise KVPolicyError("The tokenizer must have a chat template for the task chat, got none; try another task.")
    question, begun = asked.question.split(ANSWER)
    message = [{"role": "user", "content": asked.document + question}]
    text: str = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    if tokenizer("").input_ids:  # the tokenizer adds the first token itself
        text = text.removeprefix(tokenizer.bos_token or "")
    end = text.rindex(question)
    return asked._replace(document=text[:end], question=text[end:] + begun)
