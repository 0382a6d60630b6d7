"""Requests of an engine's scheduler: which begin with a document or a compressed prompt, and what they load."""

from __future__ import annotations

import logging
import secrets
from collections import deque
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvpolicy.text.errors import KVPolicyError
from kvpolicy_vllm.documents import SALT, Document, Library
from kvpolicy_vllm.engine import Engine
from kvpolicy_vllm.ledger import COMPRESSED, PREFILL, Ledger, Prompt, wants_prompt_logprobs

logger = logging.getLogger(__name__)

PARAM = "document"
"""The name of a document among the `kv_transfer_params` of a request."""


STEPS = 16
"""Steps of which an engine may have scheduled later ones before it knows how they went, at most."""


@dataclass(frozen=True, slots=True)
class Load:
    """Slots of a request that get tokens of a document or of a compressed prompt, or that cannot.

    Attributes:
        request_id: The request.
        path: The file; empty for a compressed prompt, and to report the blocks as failed.
        digest: The hash that it must have.
        kept: The end of the loaded tokens.
        start: The first token that is loaded; those before are in blocks that other requests have loaded.
        blocks: The blocks of the request, from its first token on.
        reason: Why the request is refused.
        prompt: The name of the compressed prompt; empty for a document.
    """

    request_id: str
    path: str
    digest: str
    kept: int
    start: int
    blocks: tuple[int, ...]
    reason: str = ""
    prompt: str = ""


class _Begun(NamedTuple):
    """A request that a step has begun.

    Attributes:
        request: The request.
        new: Index of the first of its blocks that was not in the prefix cache.
        blocks: The blocks.
    """

    request: Any
    new: int
    blocks: tuple[int, ...]


class Requests:
    """The requests that the scheduler knows, and the loads of the next step.

    A request that cannot be served gets one token from outside, whose block is then reported as failed: that ends this
    request with an error, and no other one. An exception would end the engine.

    Args:
        engine: The engine.
        library: The documents.
        block_size: Tokens of a block.
        ledger: The prompts that are compressed; None if none are.
    """

    def __init__(self, engine: Engine, library: Library, block_size: int, ledger: Ledger | None = None) -> None:
        """Know no request."""
        self._engine = engine
        self._library = library
        self._block_size = block_size
        self._ledger = ledger
        self._known: dict[str, Document | Prompt | str] = {}
        self._computed: dict[str, int] = {}
        self._loads: list[Load] = []
        self._begun: deque[list[_Begun]] = deque([[]], maxlen=STEPS)

    def admit(self, request: Any) -> None:
        """Look at a new request; see `KVConnectorBase_V1.on_new_request`."""
        try:
            found = self._beginning_of(request)
        except KVPolicyError as error:
            found = str(error)
        except Exception as error:
            logger.exception("The beginning of request %s cannot be known.", request.request_id)
            found = f"{type(error).__name__}: {error}"
        if found is None:
            return
        if isinstance(found, str):
            _isolate(request)
        self._known[request.request_id] = found
        # Prompt logprobs set it, and then nothing would be loaded: the request is refused, which needs a load.
        request.skip_reading_prefix_cache = False

    def matched(self, request: Any, computed: int) -> int | None:
        """Tokens behind the `computed` ones that are loaded for a request; None if it must wait."""
        found = self._known.get(request.request_id)
        if found is None:
            return 0
        self._computed[request.request_id] = computed
        if isinstance(found, str):
            return min(1, request.num_tokens - 1 - computed)
        if isinstance(found, Prompt) and found.is_first:
            return 0 if self._ledger is None or self._ledger.may_begin(found) else None
        return max(found.kept - computed, 0)

    def allocated(self, request: Any, blocks: Sequence[int], external: int) -> None:
        """Note the blocks of a request whose last `external` tokens from outside are to be loaded."""
        found = self._known.get(request.request_id)
        if found is None:
            return
        start = self._computed[request.request_id]
        if isinstance(found, Prompt):
            if self._ledger is None or found.is_first:
                return
            self._ledger.allocated(found, blocks)
        self._begun[-1].append(_Begun(request, start // self._block_size, tuple(blocks)))
        if external < 1:
            return
        if isinstance(found, str):
            self._loads.append(Load(request.request_id, "", "", start + 1, start, tuple(blocks), found))
            return
        path, digest, name = ("", "", found.name) if isinstance(found, Prompt) else (str(found.path), found.digest, "")
        self._loads.append(Load(request.request_id, path, digest, found.kept, start, tuple(blocks), prompt=name))

    def failed(self, blocks: AbstractSet[int]) -> set[int]:
        """Note blocks that could not be filled.

        vLLM ends the requests that have them, and forgets what they hold. It does not find a request that was aborted
        or preempted meanwhile: blocks that were never filled would stay in the prefix cache, and a preempted request
        would go on behind a token that was generated without its document.

        Args:
            blocks: The blocks.

        Returns:
            All blocks that may hold what follows from them, which must leave the prefix cache.
        """
        spoiled: set[int] = set()
        owners: dict[int, Any] = {}
        for request, new, held in [each for step in self._begun for each in step]:
            owners |= dict.fromkeys(held[new:], request)
            first = next((index for index, block in enumerate(held) if block in blocks), len(held))
            spoiled |= {*held[first:]}
        for request in {id(owners[block]): owners[block] for block in blocks if block in owners}.values():
            if isinstance(self._known.get(request.request_id), Document | Prompt):
                self._known[request.request_id] = "Its beginning could not be loaded."
                _isolate(request)
        return spoiled

    def take(self) -> list[Load]:
        """The loads of the step that was scheduled."""
        loads = self._loads
        self._loads = []
        self._begun.append([])
        return loads

    def forget(self, request: Any) -> None:
        """Forget a request that has ended."""
        self._known.pop(request.request_id, None)
        self._computed.pop(request.request_id, None)
        if self._ledger is not None:
            self._ledger.finished(request)

    def _beginning_of(self, request: Any) -> Document | Prompt | None:
        params: Any = request.kv_transfer_params or {}
        if not isinstance(params, dict):
            raise KVPolicyError(f"kv_transfer_params must be an object, got {type(params).__name__}.")
        if PREFILL not in params and COMPRESSED not in params:
            return self._document_of(request, params)
        if self._ledger is None:
            raise KVPolicyError("The engine must have a policy to compress a prompt, got none; try KVPOLICY_POLICY.")
        return self._ledger.find(request)

    def _document_of(self, request: Any, params: dict[str, Any]) -> Document | None:
        salt = request.cache_salt or ""
        if PARAM not in params:
            if salt.startswith(SALT):
                raise KVPolicyError(
                    "A cache salt of a document must come with kv_transfer_params that name the document, got none; "
                    "try kvpolicy_vllm.prompt."
                )
            return None
        document = self._library.find(params[PARAM])
        if params.get("digest") != document.digest:
            raise KVPolicyError(
                f"The document {document.path.stem!r} must be the one that the prompt was made for, got an edited "
                "file; try the request again."
            )
        if salt != document.salt or not document.begins(request.prompt_token_ids or ()):
            raise KVPolicyError(
                f"The prompt must begin with the placeholders of the document {document.path.stem!r} and have its "
                "cache salt, got another one; try kvpolicy_vllm.prompt."
            )
        if request.lora_request is not None:
            raise KVPolicyError("A document must be asked without an adapter, got one with LoRA.")
        sampling = request.sampling_params
        if sampling is None or wants_prompt_logprobs(sampling):
            raise KVPolicyError("A document has no log probabilities of its prompt; try without prompt_logprobs.")
        self._engine.check(document, len(request.prompt_token_ids) - document.kept)
        return document


def _isolate(request: Any) -> None:
    """Let a request that is refused share no block with others, and have a token that can come from outside.

    Its blocks would be those of a document, if it has the salt of one: other requests of the same step would begin with
    them, and end with it. And what a scheduler finds in the prefix cache needs no load, which could fail.
    """
    request.cache_salt = f"refused-{secrets.token_hex(16)}"
    if request.num_tokens < 2 and request.prompt_token_ids:  # the last one is always computed
        request.prompt_token_ids = [*request.prompt_token_ids, *request.prompt_token_ids]
        request._all_token_ids += request.prompt_token_ids[1:]
        request.num_prompt_tokens = request.num_tokens
    request.block_hashes.clear()
    request.update_block_hashes()
    request.kv_transfer_params = None  # whatever it is, the scheduler looks into it
