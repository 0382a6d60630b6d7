"""Offsets of positions behind pictures (M-RoPE): transformers keeps those of the last prompt in the model.

A picture takes fewer positions than tokens, so that the text behind it goes on at other positions than its columns say.
Each cache keeps the offsets of its own rows, and a forward on it counts from those, whatever the model ran before.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from kvpolicy.hf.cache import PolicyCache
from kvpolicy.hf.cache_names import passed_cache
from kvpolicy.hf.discovery import ROPE_DELTAS
from kvpolicy.hf.forward_calls import runs_compiled, tokens_of
from kvpolicy.hf.forward_checks import by_name
from kvpolicy.hf.running_forward import newest_valid


class RopeDeltas:
    """The offsets of a model's positions, exchanged with its caches."""

    def __init__(self, owner: nn.Module) -> None:
        """Exchange those that a module around a decoder keeps."""
        self._owner = owner
        self._thread = threading.local()
        # What the model counts from, and the same on the host: neither is copied while nothing changes, as in steps.
        self._shown: tuple[Tensor | None, list[int] | None] = (None, None)

    def connect(self) -> Callable[[], None]:
        """Let each forward count from the offsets of its cache; returns how to undo it."""
        self._names = list(inspect.signature(self._owner.forward).parameters)
        return self._owner.register_forward_pre_hook(self._before, with_kwargs=True).remove

    def show(self, cache: PolicyCache) -> None:
        """Let the model count from the offsets of a cache, if it has seen a prompt."""
        if not cache.is_initialized:
            return
        first = cache.policy_layers[0]
        shown, deltas = self._shown
        if deltas is not first.rope_deltas or shown is not getattr(self._owner, ROPE_DELTAS):
            deltas = first.rope_deltas
            shown = None if deltas is None else torch.tensor(deltas, device=first.length.device)[:, None]
            self._shown = (shown, deltas)
            setattr(self._owner, ROPE_DELTAS, shown)

    def note(self, cache: PolicyCache, rows: int, *, answers: bool) -> None:
        """Keep the offsets that the forward of `rows` rows that has begun counts from with its cache.

        A forward that is given positions counts from nothing, and says nothing about offsets. But `generate` computes
        the offsets of a prompt before, and passes its positions.

        Args:
            cache: The cache of the forward.
            rows: Its rows.
            answers: Whether it is that of the answer of a running `generate`.
        """
        counts = getattr(self._thread, "counts", None)
        self._thread.counts = None
        if counts is None:  # the decoder was called alone
            return
        if counts or not cache.is_initialized or (answers and not cache.forward.is_step):
            cache.policy_layers[0].rope_deltas = self._of_rows(rows)

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        named = by_name(self._names, args, kwargs)[1] if len(args) > 1 else kwargs
        cache = passed_cache(named)
        counts = named.get("position_ids") is None
        if counts and isinstance(cache, PolicyCache):
            self.show(cache)
        if runs_compiled(module, args, kwargs):
            return None
        self._thread.counts = counts
        is_new = not cache.is_initialized if isinstance(cache, PolicyCache) else not (cache and cache.get_seq_length())
        if is_new and counts and named.get("inputs_embeds") is None:
            # The model would keep the offsets of the last picture for a prompt of text.
            setattr(module, ROPE_DELTAS, None)
        if isinstance(cache, PolicyCache) and counts and not is_new:
            return self._with_places(cache, args, named)
        return None

    def _with_places(self, cache: PolicyCache, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """The arguments with the positions of the new tokens, if there is a mask; else None.

        The model counts positions from all columns of the mask as if they were new: it finds others behind a picture if
        the mask has the new columns alone, and more than there are tokens if it has all.
        """
        first = cache.policy_layers[0]
        tokens = tokens_of(args, named)
        valid = None if tokens is None else newest_valid(named.get("attention_mask"), tokens.shape[1])
        if valid is None or first.rope_deltas is None or not len(valid) == len(first.rope_deltas) == len(first.length):
            return None
        seen = first.length + (0 if first.prefix is None else first.prefix.slots.length)
        begin = (seen + seen.new_tensor(first.rope_deltas))[:, None].to(valid.device)
        places = (begin + valid.long().cumsum(-1) - 1).masked_fill(~valid, 0)
        return args[:1], named | {"position_ids": places.expand(3, -1, -1)}

    def _of_rows(self, rows: int) -> list[int] | None:
        """The offset of each of some rows; the model may have those of a batch before its rows were repeated."""
        found = getattr(self._owner, ROPE_DELTAS)
        shown, deltas = self._shown
        if found is None or len(found) == 0 or rows % len(found):
            return None
        if found is not shown or deltas is None:
            deltas = found.reshape(len(found), -1)[:, 0].tolist()
            self._shown = (found, deltas)
        return deltas if len(deltas) == rows else [delta for delta in deltas for _ in range(rows // len(deltas))]
