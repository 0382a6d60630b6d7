"""Prompts that begin with a document, and the two requests of a prompt that is compressed."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import Any

from kvpolicy_vllm.documents import Document, as_ids, placeholders, read_document
from kvpolicy_vllm.engine import Engine
from kvpolicy_vllm.ledger import COMPRESSED, PREFILL, salt_of
from kvpolicy_vllm.requests import PARAM


def prompt(path: str | PathLike[str], question_ids: Any, llm: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
    r"""Make the prompt of a question about a document.

    Args:
        path: A file that `kvpolicy cache make` or `PolicyCache.save` wrote. If the engine has a folder of documents, it
            must be in there.
        question_ids: Token ids of the question, without special tokens: a list, or a tensor [N] or [1, N].
        llm: The `vllm.LLM` that the document must fit; None to leave that check to the engine, which ends a request
            with an error.

    Returns:
        What `vllm.LLM.generate` takes as a prompt, and the `kv_transfer_params` for
        `SamplingParams(extra_args={"kv_transfer_params": ...})`.

    Raises:
        KVPolicyError: If the file was edited, has unequal numbers of tokens, or does not fit the model, or if there is
            no question.

    Examples:
        >>> import tempfile, torch, kvpolicy
        >>> model, tokenizer = kvpolicy.tiny()
        >>> ids = tokenizer("tiger=1000\nlion=1001\n", return_tensors="pt").input_ids
        >>> with tempfile.TemporaryDirectory() as folder, torch.no_grad(), kvpolicy.attach(model, "keydiff@8"):
        ...     cache = kvpolicy.PolicyCache(model)
        ...     _ = model(ids, cache=cache)
        ...     cache.save(f"{folder}/records.safetensors", tokens=ids)
        ...     text, params = prompt(f"{folder}/records.safetensors", [7, 8])
        >>> len(text["prompt_token_ids"]), len(text["cache_salt"]), sorted(params)
        (10, 80, ['digest', 'document'])
    """
    document = read_document(str(path))
    question = as_ids(question_ids)
    if llm is not None:
        Engine.of(llm.llm_engine.vllm_config).check(document, len(question))
    return request_of(document, question, str(document.path))


def request_of(document: Document, question: list[int], name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The prompt and the `kv_transfer_params` of a question about a document that is known by a name."""
    text = {"prompt_token_ids": [*document.placeholders, *question], "cache_salt": document.salt}
    return text, {PARAM: name, "digest": document.digest}


def first_request(ids: Sequence[int], name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The prompt and the `kv_transfer_params` of the request of one token that prefills and compresses a prompt.

    Args:
        ids: Its token ids.
        name: Its name, which nobody else can guess; of letters and digits.
    """
    return {"prompt_token_ids": [*ids], "cache_salt": salt_of(name, PREFILL)}, {PREFILL: name}


TAIL = 64
"""Tokens at the end of a compressed prompt that stand where they do in the prompt, at most."""


def second_request(ids: Sequence[int], kept: int, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The prompt and the `kv_transfer_params` of the request that goes on behind a compressed prompt.

    The end of the prompt stays as it is, up to half of the kept tokens: parsers of reasoning look there for the mark
    that a chat template writes to turn thinking on or off.

    Args:
        ids: Its token ids.
        kept: How many of them each head keeps, the last one included; see `Recipe.kept`.
        name: Its name.

    Examples:
        >>> second_request([5, 6, 7, 8, 9], 4, "n")[0]["prompt_token_ids"]
        [5, 6, 8, 9]
    """
    tail = max(min(TAIL, kept // 2), 1)
    prompt_ids = [*placeholders(ids, kept - tail), *ids[len(ids) - tail :]]
    text = {"prompt_token_ids": prompt_ids, "cache_salt": salt_of(name, COMPRESSED)}
    return text, {COMPRESSED: name}
