"""Answers to a batch of prompts: behind a prefix that they share, or on a cache that their own text fills."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

import kvpolicy
from kvpolicy import Policy
from kvpolicy.hf.cache_names import CACHE
from kvpolicy.hf.text_angles import check_pieces
from kvpolicy_lm_eval.held_back import HeldBack
from kvpolicy_lm_eval.prefixes import SharedText, behind_prefix

NEW_TOKENS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""Arguments of a request that say how long its answer may be; the first one counts."""


def new_tokens_of(options: Mapping[str, Any], default: int) -> int:
    """The most tokens of an answer.

    Args:
        options: The arguments of its request.
        default: What counts if they do not say.

    Examples:
        >>> new_tokens_of({"until": ["."], "max_tokens": 8}, 256), new_tokens_of({}, 256)
        (8, 256)
    """
    return int(next((options[name] for name in NEW_TOKENS if options.get(name) is not None), default))


def end_of_answers(model: Any, columns: int, end: int) -> int:
    """Where `generate` ends answers: `max_new_tokens` of the model's generation config counts more than HFLM's length.

    Args:
        model: A causal language model.
        columns: Columns of the prompts.
        end: Columns of the prompts and of the longest answer, as HFLM passes them on.
    """
    most = getattr(getattr(model, "generation_config", None), "max_new_tokens", None)
    return end if most is None else columns + most


class Batch(NamedTuple):
    """Prompts that are answered at a time.

    Attributes:
        ids: Token ids, padded on the left, [B, T].
        mask: Which of them are not padding, [B, T].
        end: Columns of the prompts and of the longest answer.
        beams: `generate` repeats a row for each beam.
    """

    ids: Tensor
    mask: Tensor
    end: int
    beams: int = 1

    @property
    def new(self) -> int:
        """The most tokens of an answer; `generate` refuses an `end` before the end of the prompts."""
        return max(self.end - self.ids.shape[1], 0)

    @property
    def lengths(self) -> Tensor:
        """The tokens of each row's prompt, [B x beams]."""
        return self.mask.sum(-1).repeat_interleave(self.beams)


@dataclass(frozen=True, kw_only=True, slots=True)
class Completer:
    """Generates answers on caches under a policy that is attached to the model.

    Args:
        model: A causal language model.
        policy: The policy.
        generate: Generates behind token ids, up to a number of columns, with the options of `generate`.
        forward: Runs the model; see `kvpolicy_lm_eval.scoring.Scorer.forward`.
        on_answered: Is called with the number of rows and the cache, when the answers are complete.
        pad: The token id of padding.
    """

    model: Any
    policy: Policy
    generate: Callable[..., Tensor]
    forward: Callable[..., Tensor]
    on_answered: Callable[[int, Any], None]
    pad: int

    def share(self, prefix: Tensor) -> Any:
        """A cache with the tokens of a prefix, [1, S], for rows that share it."""
        columns = prefix.shape[1]
        cache = kvpolicy.PolicyCache(self.model, self.policy, prompt=columns, new=0)
        self._prefill(Batch(prefix, torch.ones_like(prefix), columns), columns, cache)
        return cache

    def behind(self, batch: Batch, shared: SharedText, options: Mapping[str, Any]) -> Tensor | None:
        """The prompts and their answers, [B, T + N], behind a prefix; None if a row does not begin with it."""
        moved = behind_prefix(batch.ids, batch.mask, shared.tokens, self.pad)
        if moved is None:
            return None
        ids, seen = moved
        lengths = batch.lengths
        check_pieces(self.model.config, len(shared.tokens), int(lengths.max()), "A prompt behind a common prefix")
        cache = shared.cache.fork([0] * len(lengths), shared=True)
        most = batch.end - batch.ids.shape[1] + ids.shape[1]
        out = self.generate(ids, most, **{**options, "attention_mask": seen, CACHE: cache})
        self.on_answered(len(lengths), cache)
        return torch.cat([batch.ids, out[:, ids.shape[1] :]], 1)

    def whole(self, batch: Batch, held_back: HeldBack, options: Mapping[str, Any]) -> Tensor:
        """The prompts and their answers, [B, T + N]; the end of a prompt may be fed once the rest is compressed."""
        lengths = batch.lengths
        shortest = int(lengths.min())
        later = max(min(held_back.tokens, shortest - 1), 0)
        cache = kvpolicy.PolicyCache(self.model, self.policy, prompt=lengths - later, new=batch.new + later)
        if later:
            begin = shortest - later
            check_pieces(self.model.config, begin, int(lengths.max()), "The end of a prompt that is held back")
            self._prefill(batch, batch.ids.shape[1] - later, cache)
            if held_back.beyond:
                cache.hold_next()
        out = self.generate(batch.ids, batch.end, **{**options, "attention_mask": batch.mask, CACHE: cache})
        self.on_answered(len(lengths), cache)
        return out

    def _prefill(self, batch: Batch, columns: int, cache: Any) -> None:
        """Fill a cache with the first columns of a batch; `generate` continues with the others."""
        ids = batch.ids.repeat_interleave(batch.beams, 0)
        valid = batch.mask.repeat_interleave(batch.beams, 0)
        positions = (valid.cumsum(-1) - 1).clamp(min=0)[:, :columns]
        self.forward(ids[:, :columns], valid[:, :columns], positions, cache, last=True)
