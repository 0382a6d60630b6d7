"""Prompts that the scheduler of an engine lets its workers compress: which stage each has reached, and what is due.

A prompt is two requests. The first one, of one token, prefills it: workers gather what the selector needs, and compress
it at its end. The second one begins with the kept tokens, which workers write into its blocks; its last prompt token is
computed again. In between, a prompt is held beside the engine's blocks, so that few may be on that way at a time.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvpolicy.text.errors import KVPolicyError
from kvpolicy_vllm.documents import SALT
from kvpolicy_vllm.recipe import Recipe

PREFILL = "prefill"
COMPRESSED = "compressed"
"""The name of a prompt among the `kv_transfer_params` of its first and of its second request."""

PATIENCE = 60.0
"""Seconds for which a compressed prompt waits for its second request, whose client may have left."""

DONE = ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED")
"""States of a request that has its answer."""


class Part(NamedTuple):
    """Tokens of a prompt that a step prefills.

    Attributes:
        name: The prompt.
        total: Tokens of the prompt.
        start: The first of them.
        tokens: How many.
        slot: The slot of the first of them.
        blocks: The blocks of the prompt, from its first token on.
    """

    name: str
    total: int
    start: int
    tokens: int
    slot: int
    blocks: tuple[int, ...]


class LastToken(NamedTuple):
    """The last token of a compressed prompt, which a step computes again.

    Attributes:
        name: The prompt.
        slot: The slot that it gets.
        block: The first block of the request.
    """

    name: str
    slot: int
    block: int


class Saving(NamedTuple):
    """A prompt whose request loses its blocks.

    Attributes:
        name: The prompt.
        kept: Tokens that came from outside.
        blocks: The blocks that have them, until this step begins.
    """

    name: str
    kept: int
    blocks: tuple[int, ...]


@dataclass
class Work:
    """Work on prompts in a step.

    Attributes:
        parts: Prompts that are prefilled.
        last_tokens: Last tokens that are computed again.
        savings: Prompts that leave their blocks; before everything else.
        dropped: Prompts that are forgotten; before everything else.
    """

    parts: list[Part] = field(default_factory=list)
    last_tokens: list[LastToken] = field(default_factory=list)
    savings: list[Saving] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)


class Stage(enum.Enum):
    """How far a prompt is."""

    ADMITTED = enum.auto()
    PREFILLING = enum.auto()
    READY = enum.auto()
    BEGUN = enum.auto()


@dataclass
class Prompt:
    """A prompt that is compressed, as the scheduler knows it.

    Attributes:
        name: Its name.
        total: Its tokens.
        kept: Tokens that its second request gets from outside: those that a head keeps, but for the last one.
        request: The request that stands for it now.
        stage: How far it is.
        since: When it became ready.
        blocks: The blocks of its second request.
    """

    name: str
    total: int
    kept: int
    request: Any
    stage: Stage = Stage.ADMITTED
    since: float = 0.0
    blocks: tuple[int, ...] = ()

    @property
    def is_first(self) -> bool:
        """Whether its first request stands for it."""
        return self.stage in (Stage.ADMITTED, Stage.PREFILLING)


class Ledger:
    """The prompts that are compressed in an engine.

    Args:
        recipe: How they are compressed.
        block_size: Tokens of a block.
        now: The time in seconds.
    """

    def __init__(self, recipe: Recipe, block_size: int, now: Callable[[], float] = time.monotonic) -> None:
        """Know no prompt."""
        self._recipe = recipe
        self._block_size = block_size
        self._now = now
        self._prompts: dict[str, Prompt] = {}
        self._by_request: dict[str, Prompt] = {}
        self._savings: dict[str, Saving] = {}
        self._dropped: list[str] = []

    def __len__(self) -> int:
        """How many prompts there are."""
        return len(self._prompts)

    def find(self, request: Any) -> Prompt | None:
        """The prompt of a new request; None if it is another kind of request.

        Raises:
            KVPolicyError: If it is not such as `kvpolicy_vllm.prompts` makes it.
        """
        params: Mapping[str, Any] = request.kv_transfer_params or {}
        if PREFILL in params:
            found = self._first(request, params[PREFILL])
        elif COMPRESSED in params:
            found = self._second(request, params[COMPRESSED])
        else:
            return None
        self._by_request[request.request_id] = found
        return found

    def _first(self, request: Any, name: object) -> Prompt:
        if not isinstance(name, str) or name in self._prompts:
            raise KVPolicyError("A prompt to compress must have a unique name, got one that is taken.")
        _check_request(request, salt_of(name, PREFILL))
        total = len(request.prompt_token_ids)
        kept = self._recipe.kept(total)
        if not 2 <= kept < total:
            raise KVPolicyError(
                f"A prompt to compress must be longer than its budget, and keep at least two tokens, got {total} "
                f"tokens, of which {self._recipe.policy} keeps {kept}; try the request as it is."
            )
        self._prompts[name] = Prompt(name, total, kept - 1, request)
        return self._prompts[name]

    def _second(self, request: Any, name: object) -> Prompt:
        found = self._prompts.get(name) if isinstance(name, str) else None
        if found is None or found.stage is not Stage.READY:
            raise KVPolicyError(
                "A compressed prompt must be ready, and used once, got one that is not; try the request again."
            )
        _check_request(request, salt_of(found.name, COMPRESSED))
        if len(request.prompt_token_ids) != found.kept + 1:
            raise KVPolicyError(
                f"A compressed prompt must be {found.kept} placeholders and its last token, got "
                f"{len(request.prompt_token_ids)} tokens."
            )
        found.request = request
        found.stage = Stage.BEGUN
        return found

    def may_begin(self, prompt: Prompt) -> bool:
        """Whether the first request of a prompt may be scheduled now; it then counts as begun."""
        if prompt.stage is Stage.ADMITTED:
            self._expire()
            on_the_way = sum(
                each.stage in (Stage.PREFILLING, Stage.READY) or (each.stage is Stage.BEGUN and not each.blocks)
                for each in self._prompts.values()
            )
            if on_the_way >= self._recipe.prefills:
                return False
            prompt.stage = Stage.PREFILLING
        return True

    def allocated(self, prompt: Prompt, blocks: Sequence[int]) -> None:
        """Note the blocks of the second request of a prompt, which may have lost others in the same step."""
        if prompt.blocks:
            self._savings[prompt.name] = Saving(prompt.name, prompt.kept, prompt.blocks)
        prompt.blocks = tuple(blocks)

    def finished(self, request: Any) -> None:
        """Note that a request has ended."""
        prompt = self._by_request.pop(request.request_id, None)
        if prompt is None or prompt.request is not request:
            return
        if prompt.is_first and request.status.name in DONE:
            prompt.stage = Stage.READY
            prompt.since = self._now()
        else:
            self._drop(prompt)

    def work(
        self, scheduled: Mapping[str, int], preempted: Sequence[str], blocks_of: Callable[[str], Sequence[int]]
    ) -> Work:
        """Work of the step that was scheduled.

        Args:
            scheduled: Tokens of each request in the step.
            preempted: Requests that have lost their blocks.
            blocks_of: The blocks of a request.
        """
        self._expire()
        savings = self._savings
        self._savings = {}
        for request_id in preempted:
            prompt = self._by_request.get(request_id)
            if prompt is not None and prompt.blocks and prompt.name not in savings:
                savings[prompt.name] = Saving(prompt.name, prompt.kept, prompt.blocks)
                prompt.blocks = ()
        found = Work(savings=[*savings.values()], dropped=self._dropped)
        self._dropped = []
        for request_id, tokens in scheduled.items():
            prompt = self._by_request.get(request_id)
            if prompt is None:
                continue
            start = int(prompt.request.num_computed_tokens)
            if prompt.is_first and start < prompt.total:
                blocks = tuple(blocks_of(request_id))
                tokens = min(tokens, prompt.total - start)
                found.parts.append(Part(prompt.name, prompt.total, start, tokens, self._slot(blocks, start), blocks))
            elif not prompt.is_first and start <= prompt.kept < start + tokens:
                found.last_tokens.append(
                    LastToken(prompt.name, self._slot(prompt.blocks, prompt.kept), prompt.blocks[0])
                )
        return found

    def _slot(self, blocks: Sequence[int], token: int) -> int:
        block, offset = divmod(token, self._block_size)
        return blocks[block] * self._block_size + offset

    def _expire(self) -> None:
        """Forget prompts whose second request has not come."""
        oldest = self._now() - PATIENCE
        for prompt in [each for each in self._prompts.values() if each.stage is Stage.READY and each.since < oldest]:
            self._drop(prompt)

    def _drop(self, prompt: Prompt) -> None:
        del self._prompts[prompt.name]
        self._dropped.append(prompt.name)


def salt_of(name: str, what: str) -> str:
    """The cache salt of a request of a prompt: its blocks are shared with no other request, nor with the other one."""
    return f"{SALT}{what}{name}"


def wants_prompt_logprobs(sampling: Any) -> bool:
    """Whether sampling parameters ask for log probabilities of prompt tokens, the best ones or those of given ids."""
    names = ("prompt_logprobs", "prompt_logprob_token_ids")
    return any(getattr(sampling, name, None) is not None for name in names)


def _check_request(request: Any, salt: str) -> None:
    if request.cache_salt != salt or not request.prompt_token_ids:
        raise KVPolicyError("A prompt to compress must have tokens and a cache salt of its own, got another request.")
    if request.lora_request is not None:
        raise KVPolicyError("A prompt must be compressed without an adapter, got one with LoRA.")
    sampling = request.sampling_params
    if sampling is None or wants_prompt_logprobs(sampling):
        raise KVPolicyError("A compressed prompt has no log probabilities; try without prompt_logprobs.")
