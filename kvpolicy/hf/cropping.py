"""Taking back the newest tokens of a cache from which nothing was evicted."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import DynamicSlidingWindowLayer

from kvpolicy.engine import editing as layers
from kvpolicy.engine.sizes import crop_obstacle, map_numbers
from kvpolicy.hf.seen_text import extend_digest
from kvpolicy.planning.memory import layer_spec
from kvpolicy.planning.result import CachePlan
from kvpolicy.policy import Policy
from kvpolicy.text.errors import KVPolicyError

REMEMBERED = 64
"""Prompts and chunks that a cache remembers, so that a long conversation does not fill the host's memory."""


class Rows(NamedTuple):
    """Lengths and mask digests of a cache's rows, on the host.

    Attributes:
        columns: Columns seen.
        length: Tokens that each row has seen.
        digest: Digest of the columns that each row has seen.
    """

    columns: int
    length: list[int]
    digest: list[int]

    def after(self, columns: int, valid: Tensor | None) -> Rows:
        """Rows after `columns` more columns, of which `valid` [B, columns] are not padding; all if it is None."""
        digest = torch.tensor(self.digest, device="cpu")
        extend_digest(digest, valid, columns)
        added = torch.tensor(columns, device="cpu") if valid is None else valid.sum(-1)
        return Rows(self.columns + columns, (torch.tensor(self.length, device="cpu") + added).tolist(), digest.tolist())

    def map_rows(self, fn: Callable[[Tensor], Tensor]) -> Rows:
        """Select or repeat rows."""
        length, digest = (map_numbers(fn, rows) for rows in (self.length, self.digest))
        return Rows(self.columns, length, digest)


class PromptForward(NamedTuple):
    """A forward of a prompt or chunk.

    Attributes:
        before: The rows before it.
        after: The rows after it.
        valid: Which of its columns are not padding, one byte for each column of a row; None if all are.
        end: Announced tokens of each row at the end, as known before; None if unknown.
        plan: The cache's plan before.
        rope_deltas: Offset of the positions behind each row's pictures before, or None.
    """

    before: Rows
    after: Rows
    valid: tuple[bytes, ...] | None
    end: list[int] | None
    plan: CachePlan | None
    rope_deltas: list[int] | None

    def map_rows(self, fn: Callable[[Tensor], Tensor]) -> PromptForward:
        """Select or repeat rows."""
        deltas = None if self.rope_deltas is None else map_numbers(fn, self.rope_deltas)
        end = None if self.end is None else map_numbers(fn, self.end)
        valid = self.valid
        if valid is not None:
            valid = tuple(valid[row] for row in fn(torch.arange(len(valid), device="cpu")).tolist())
        return PromptForward(self.before.map_rows(fn), self.after.map_rows(fn), valid, end, self.plan, deltas)

    def first_valid(self, columns: int) -> Tensor | None:
        """Which of its first columns are not padding, [B, columns] bool; None if all are."""
        if self.valid is None or all(0 not in row[:columns] for row in self.valid):
            return None
        return torch.tensor([list(row[:columns]) for row in self.valid], device="cpu").bool()


def obstacle(cache: Any) -> str:
    """Which part of a cache's policy keeps tokens from being taken back; empty if none does."""
    states = cache.attachment.model_shape.states
    return f"the state of layer {min(states)}, which holds no earlier one" if states else policy_obstacle(cache.policy)


def policy_obstacle(policy: Policy) -> str:
    """Which part of a policy keeps tokens from being taken back while nothing is evicted; empty if none does."""
    if policy.layer_metric:
        return f"the allocator {policy.allocator}, which measures the first prompt of a row"
    found = (crop_obstacle(layer_spec(own, 0)) for own in policy.distinct)
    return next(filter(None, found), "")


def make_prompt(cache: Any, new: int, seen: Tensor, valid: Tensor | None) -> PromptForward:
    """The prompt that is about to begin; see `kvpolicy.hf.history.note_forward`."""
    first = cache.policy_layers[0]
    digest = torch.zeros_like(seen) if first.mask_digest is None else first.mask_digest
    before = Rows(first.get_seq_length(), seen.tolist(), digest.tolist())
    valid = None if valid is None or bool(valid.all()) else valid.cpu()
    rows = None if valid is None else tuple(bytes(row) for row in valid.byte().tolist())
    return PromptForward(before, before.after(new, valid), rows, cache._end, cache.plan, first.rope_deltas)


def remember(cache: Any, prompt: PromptForward) -> None:
    """Note a prompt, and forget the oldest one of too many."""
    cache.history.prompts = [*cache.history.prompts, prompt][-REMEMBERED:]
    oldest = cache.history.prompts[0].before.columns
    if oldest and len(cache.history.prompts) == REMEMBERED:
        for layer in cache.policy_layers:
            layer.store.contents.sizes.forget(oldest)


def crop(cache: Any, tokens_to_remove: int) -> None:
    """Take back the newest columns of a cache; see `PolicyCache.crop`."""
    try:
        removed = -operator.index(tokens_to_remove)
    except TypeError:
        removed = -1
    if removed < 0 or isinstance(tokens_to_remove, bool):
        raise KVPolicyError(
            f"tokens_to_remove must be 0 or a negative integer, as in transformers, got {tokens_to_remove!r}; try "
            "cache.crop(-1) to take back one token."
        )
    if not removed:
        # A recording window keeps all tokens until a crop, so that a crop of no token frees memory too.
        for window in _windows(cache):
            if _records(window) and window.is_initialized:
                _crop_window(window, 0)
        return
    cache.history.refuse_marked("crop()")
    _check(cache, removed)
    first = cache.policy_layers[0]
    columns = first.get_seq_length() - removed
    if not columns:
        told = cache.prompt, cache.new
        cache.reset()
        cache.prompt, cache.new = told
        return
    _crop_rows(cache, columns)
    for window in _windows(cache):
        _crop_window(window, removed)


def _check(cache: Any, removed: int) -> None:
    """Refuse to take back what cannot be; nothing is changed then."""
    if part := obstacle(cache):
        raise KVPolicyError(
            f"Tokens must not be cropped under {part}, got crop({-removed}); try cache.mark() before the tokens and "
            "cache.rollback(accepted) after them."
        )
    first = cache.policy_layers[0]
    seen = first.get_seq_length()
    if removed > seen:
        raise KVPolicyError(f"At most {seen} tokens can be cropped from this cache, got crop({-removed}).")
    if first.pending is not None and removed < seen:
        raise KVPolicyError(
            "A cache must have compressed its prompt before tokens are cropped, got one with an incomplete prompt; "
            "try after the last chunk."
        )
    if not all(layers.keeps_all(layer.store) for layer in cache.policy_layers):
        raise KVPolicyError(
            f"Tokens must not be cropped after an eviction, which cannot be undone, got crop({-removed}); try "
            "cache.mark() before the tokens and cache.rollback(accepted) after them."
        )
    if any(not _records(w) and w.get_seq_length() >= w.sliding_window for w in _windows(cache)):
        raise KVPolicyError(
            f"Tokens must not be cropped after they pushed others out of a sliding window, got crop({-removed}); try "
            "cache.activate_past_recording() before the tokens."
        )


def _crop_rows(cache: Any, columns: int) -> None:
    """Leave the layers under the policy with the first columns."""
    first = cache.policy_layers[0]
    now = Rows(first.get_seq_length(), first.length.tolist(), first.mask_digest.tolist())
    prompts: list[PromptForward] = list(cache.history.prompts)
    last = None
    while prompts and prompts[-1].before.columns >= columns:
        last = prompts.pop()
        now = last.before
    prompt = prompts[-1] if prompts else None
    undoes_prompt = last is not None or (prompt is not None and columns < prompt.after.columns)
    scoring = [own.selector for own in cache.policy.distinct if own.selector.statistics]
    if undoes_prompt and scoring:
        raise KVPolicyError(
            "Tokens of a prompt must not be cropped under a selector whose statistics they changed, got "
            f"{scoring[0]!r}; try to crop generated tokens only."
        )
    deltas = first.rope_deltas if last is None else last.rope_deltas
    inside = None  # the prompt that loses its last columns
    if columns == now.columns:  # a prompt begins here
        kept = now
    elif prompt is None:
        raise KVPolicyError(
            f"A crop must not go back further than to one of the last {REMEMBERED} prompts, which a load or a shift "
            "forgets, got an earlier position; try cache.mark() before the tokens and cache.rollback(accepted) after "
            "them."
        )
    elif columns < prompt.after.columns:
        count = columns - prompt.before.columns
        kept = prompt.before.after(count, prompt.first_valid(count))
        inside = prompt
        none = [0] * len(now.length)
        if (prompt.rope_deltas or none) != (deltas or none):
            raise KVPolicyError(
                "A prompt with pictures must be cropped as a whole, since the positions behind it depend on them, got "
                f"crop({columns - first.get_seq_length()}); try crop({prompt.before.columns - first.get_seq_length()})."
            )
    else:
        kept = prompt.after.after(columns - prompt.after.columns, None)
        if now != prompt.after.after(now.columns - prompt.after.columns, None):
            raise KVPolicyError(
                "Every row must have a token in each column after a prompt to be cropped, got padding among generated "
                "tokens; try to remove rows that are finished."
            )
    # Nothing was changed above, so that a refused crop leaves the cache as it was.
    if last is not None:
        cache._end = last.end
        cache.plan = last.plan
    if inside is not None:
        _shorten_prompt(cache, inside, kept)
        prompts[-1] = inside._replace(after=kept)
    else:
        for layer in cache.policy_layers:
            layers.crop(layer.store, columns, layer.store.tensors.length.new_tensor(kept.length))
    first.mask_digest.copy_(first.mask_digest.new_tensor(kept.digest))
    first.rope_deltas = deltas
    cache.history.prompts = prompts


def _shorten_prompt(cache: Any, prompt: PromptForward, kept: Rows) -> None:
    """Leave the layers with the first tokens of a prompt: these are placed again, under the budget that it has."""
    cache._end = prompt.end
    cache.plan = prompt.plan
    count = kept.columns - prompt.before.columns
    valid = prompt.first_valid(count)
    for layer in cache.policy_layers:
        store = layer.store
        length = store.tensors.length.new_tensor(prompt.before.length)
        # Before the crop, which empties the slots that these tokens are read from.
        pending = layers.newest_tokens(store, length, count, None if valid is None else valid.to(length.device))
        layers.crop(store, prompt.before.columns, length)
        # As `attend_prompt` does: `compress` notes the sizes before a prompt by columns that were counted already.
        store.contents.set_columns(kept.columns)
        # At once, not held for a measurement or a replay: `obstacle` refuses policies that need either.
        cache.compress(layer, pending)
    cache.forget_forward()  # this was none, and its division of the budget is of no other prompt


def _windows(cache: Any) -> list[DynamicSlidingWindowLayer]:
    return [layer for layer in cache.layers if isinstance(layer, DynamicSlidingWindowLayer)]


def _records(window: DynamicSlidingWindowLayer) -> bool:
    """Whether a window keeps what leaves it until a crop."""
    return getattr(window, "record_past", False)


def _crop_window(window: DynamicSlidingWindowLayer, removed: int) -> None:
    window.crop(-removed)
    assert window.keys is not None and window.values is not None
    # A crop leaves views, which keep what was taken back alive.
    window.keys, window.values = window.keys.clone(), window.values.clone()
