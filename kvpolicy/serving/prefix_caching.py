"""Prefix caching: what prompts have in common at their beginning is computed once.

A common beginning is held as a prompt that waits for its last chunk: uncompressed, with what the policy gathers of a
prompt. A prompt goes on from a copy of it, and is compressed as a whole when its last token has come. So it keeps what
it would keep alone, up to rounding, whatever the prompts before it were.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Any

from kvpolicy.hf.announced import Announced
from kvpolicy.hf.cache import PolicyCache
from kvpolicy.hf.rotary_lookup import changing_kind
from kvpolicy.reporting.logging import UNFAITHFUL
from kvpolicy.text.common_prefix import common_length
from kvpolicy.text.errors import KVPolicyError

LEAST_PREFIX = 64
"""Tokens that a prefix saves at least."""

RECENT = 32
"""Prompts that a new one is compared with."""


class PrefixCaching:
    """The beginnings that recent prompts had in common, uncompressed.

    Args:
        model: The model, with a policy attached that holds the chunks of a prompt.
        memory: The most bytes of all beginnings; those that were not used for longest are freed.
        run: Runs tokens on a cache of the model.

    Attributes:
        nbytes: Bytes of all beginnings.

    Raises:
        KVPolicyError: If transformers does not go on behind a part of a prompt as in one piece.
    """

    def __init__(self, model: Any, memory: int, run: Callable[[PolicyCache, list[int]], Any]) -> None:
        """No prompt has come."""
        if model.config.get_text_config(decoder=True).model_type in UNFAITHFUL:
            raise KVPolicyError(
                "--prefix-caching must be for a model that can go on behind a part of a prompt, got "
                f"{type(model).__name__}, whose states transformers does not continue; try without it."
            )
        self.nbytes = 0
        self._model = model
        self._memory = memory
        self._run = run
        self._held: OrderedDict[tuple[int, ...], PolicyCache] = OrderedDict()  # the one used last comes last
        self._recent: deque[Sequence[int]] = deque(maxlen=RECENT)

    def start(self, prompt: Sequence[int]) -> tuple[PolicyCache | None, int]:
        """A cache that a prompt goes on from, and how many of its tokens were not computed for it; None to begin anew.

        What the prompt has in common with a recent one is computed first, and held for later prompts.

        Args:
            prompt: Token ids.
        """
        known = max((ids for ids in self._held if self._begins(ids, prompt)), key=len, default=())
        # One token at least must follow: its logits are those of the first token of the answer.
        common = max((common_length(prompt, other) for other in self._recent), default=0)
        common = min(common, len(prompt) - 1)
        self._recent.append([*prompt])
        if changing_kind(self._model.config, common, len(prompt)):
            common = 0
        if known:
            self._held.move_to_end(known)
            cache = self._held[known].fork()
        elif common >= LEAST_PREFIX:
            cache = PolicyCache(self._model)
        else:
            return None, 0
        if common >= len(known) + LEAST_PREFIX:
            cache.announced = Announced(common + 1)  # more follows; whoever goes on says how much
            self._run(cache, [*prompt[len(known) : common]])
            self._hold(tuple(prompt[:common]), cache)
            cache = cache.fork()
        return cache, len(known)

    def _begins(self, ids: tuple[int, ...], prompt: Sequence[int]) -> bool:
        """Whether a prompt begins with the tokens of a cache, and goes on with the same angles."""
        is_longer = len(ids) < len(prompt) and ids == tuple(prompt[: len(ids)])
        return is_longer and not changing_kind(self._model.config, len(ids), len(prompt))

    def _hold(self, ids: tuple[int, ...], cache: PolicyCache) -> None:
        """Hold a cache if it fits into the memory, in place of those that were not used for longest."""
        needed = cache.nbytes
        if needed > self._memory:
            return
        while self.nbytes + needed > self._memory:
            self.nbytes -= self._held.popitem(last=False)[1].nbytes
        self._held[ids] = cache
        self.nbytes += needed
