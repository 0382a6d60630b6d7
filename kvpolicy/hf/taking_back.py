"""Going back: to a mark, whatever was evicted since then, or by the newest tokens if nothing was."""

from __future__ import annotations

import operator
from collections.abc import Generator
from contextlib import contextmanager
from numbers import Integral

import torch
from transformers.cache_utils import DynamicSlidingWindowLayer

from kvpolicy.hf.announced import Announced
from kvpolicy.hf.cache_forward import CacheForward
from kvpolicy.hf.journal import REMEMBERED, Mark, PromptEntry, Rows, records_past, windows_of
from kvpolicy.text.errors import KVPolicyError, KVPolicyStateError
from kvpolicy.text.validation import check_size


def set_mark(cache: CacheForward, most: int) -> None:
    """Make the next decode steps of a cache undoable; see `PolicyCache.mark`."""
    most = check_size("most", most, 1)
    cache.forward.check_idle("mark()")
    cache.journal.refuse_shared("mark()")
    if cache.holds_next:
        raise KVPolicyStateError(
            "mark() must not be called between hold_next() and its forward, got both; try the forward first."
        )
    if not cache.has_prompt:
        raise KVPolicyStateError(
            "A cache must hold a whole prompt before a mark, got one that does not; try to run the prompt first."
        )
    try:
        for layer in cache.policy_layers:
            layer.store.journal.mark(most)
    except BaseException:  # such as memory that ran out: a log that no rollback would read
        for layer in cache.policy_layers:
            layer.store.journal.forget_mark()
        raise
    cache.journal.mark = Mark(most, cache.policy_layers[0].get_seq_length(), [])


def roll_back(cache: CacheForward, accepted: int) -> None:
    """Keep the first tokens since the mark; see `PolicyCache.rollback`."""
    cache.forward.check_idle("rollback()")
    mark = cache.journal.mark
    if mark is None:
        raise KVPolicyStateError("A rollback must follow a mark, got none; try cache.mark() before the steps.")
    # By columns, since compiled steps are not noted.
    fed = cache.policy_layers[0].get_seq_length() - mark.columns
    if isinstance(accepted, bool) or not isinstance(accepted, Integral) or not 0 <= accepted <= fed:
        raise KVPolicyError(
            f"accepted must be an integer from 0 to {fed}, the tokens fed since the mark, got {accepted!r}."
        )
    kept = int(accepted)
    with _mode_of_tensors(cache):
        for layer in cache.policy_layers:
            layer.store.journal.roll_back(kept)
        # The newest step first: what it pushed out of a window stood behind what earlier steps pushed out.
        for step in reversed(mark.steps[kept:]):
            step.undo(cache.layers)
    cache.journal.mark = None


def crop(cache: CacheForward, tokens_to_remove: int) -> None:
    """Take back the newest columns of a cache; see `PolicyCache.crop`."""
    cache.forward.check_idle("crop()")
    cache.journal.refuse_shared("crop()")
    try:
        removed = -operator.index(tokens_to_remove)
    except TypeError:
        removed = -1
    if removed < 0 or isinstance(tokens_to_remove, bool):
        raise KVPolicyError(
            f"tokens_to_remove must be 0 or a negative integer, as in transformers, got {tokens_to_remove!r}; try "
            "cache.crop(-1) to take back one token."
        )
    with _mode_of_tensors(cache):
        if not removed:
            # A recording window keeps all tokens until a crop, so that a crop of no token frees memory too.
            for window in windows_of(cache.layers).values():
                if records_past(window):
                    _crop_window(window, 0)
            return
        cache.journal.refuse_marked("crop()")
        _check(cache, removed)
        columns = cache.policy_layers[0].get_seq_length() - removed
        if not columns:
            announced = Announced(cache.prompt, cache.new)
            cache.reset()
            cache.announced = announced
            return
        _crop_rows(cache, columns)
        for window in windows_of(cache.layers).values():
            _crop_window(window, removed)
    known = cache.journal.known
    cache.journal.known = None if known is None else known.first(columns)


@contextmanager
def _mode_of_tensors(cache: CacheForward) -> Generator[None]:
    """The mode in which the tensors were made: only inference mode may change those that were made in it."""
    first = cache.policy_layers[0]
    with torch.no_grad(), torch.inference_mode(first.is_initialized and first.store.contents.is_inference):
        yield


def _check(cache: CacheForward, removed: int) -> None:
    """Refuse to take back what cannot be; nothing is changed then."""
    if part := cache.journal.obstacle:
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
    if not all(layer.store.journal.keeps_all() for layer in cache.policy_layers):
        raise KVPolicyError(
            f"Tokens must not be cropped after an eviction, which cannot be undone, got crop({-removed}); try "
            "cache.mark() before the tokens and cache.rollback(accepted) after them."
        )
    if any(not records_past(w) and w.get_seq_length() >= w.sliding_window for w in windows_of(cache.layers).values()):
        raise KVPolicyError(
            f"Tokens must not be cropped after they pushed others out of a sliding window, got crop({-removed}); try "
            "cache.activate_past_recording() before the tokens."
        )


def _crop_rows(cache: CacheForward, columns: int) -> None:
    """Leave the layers under the policy with the first columns."""
    first = cache.policy_layers[0]
    digest = first.mask_digest
    assert digest is not None
    now = Rows(first.get_seq_length(), first.length.tolist(), digest.tolist())
    prompts = list(cache.journal.prompts)
    last = None
    while prompts and prompts[-1].before.columns >= columns:
        last = prompts.pop()
        now = last.before
    prompt = prompts[-1] if prompts else None
    end = None if prompt is None else prompt.rows_after(prompt.columns)
    undoes_prompt = last is not None or (end is not None and columns < end.columns)
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
    elif prompt is None or end is None:
        raise KVPolicyError(
            f"A crop must not go back further than to one of the last {REMEMBERED} prompts, which a load or a shift "
            "forgets, got an earlier position; try cache.mark() before the tokens and cache.rollback(accepted) after "
            "them."
        )
    elif columns < end.columns:
        kept = prompt.rows_after(columns - prompt.before.columns)
        inside = prompt
        none = [0] * len(now.length)
        if (prompt.rope_deltas or none) != (deltas or none):
            raise KVPolicyError(
                "A prompt with pictures must be cropped as a whole, since the positions behind it depend on them, got "
                f"crop({columns - first.get_seq_length()}); try crop({prompt.before.columns - first.get_seq_length()})."
            )
    else:
        kept = end.after(columns - end.columns, None)
        if now != end.after(now.columns - end.columns, None):
            raise KVPolicyError(
                "Every row must have a token in each column after a prompt to be cropped, got padding among generated "
                "tokens; try to remove rows that are finished."
            )
    # Nothing was changed above, so that a refused crop leaves the cache as it was.
    if last is not None:
        cache.return_to(last.end, last.plan)
    if inside is not None:
        _shorten_prompt(cache, inside, kept)
        prompts[-1] = inside._replace(columns=columns - inside.before.columns)
    else:
        for layer in cache.policy_layers:
            layer.store.journal.crop(columns, layer.store.tensors.length.new_tensor(kept.length))
    digest.copy_(digest.new_tensor(kept.digest))
    first.rope_deltas = deltas
    cache.journal.prompts = prompts


def _shorten_prompt(cache: CacheForward, prompt: PromptEntry, kept: Rows) -> None:
    """Leave the layers with the first tokens of a prompt: these are placed again, under the budget that it has."""
    cache.return_to(prompt.end, prompt.plan)
    count = kept.columns - prompt.before.columns
    valid = prompt.first_valid(count)
    for layer in cache.policy_layers:
        store = layer.store
        length = store.tensors.length.new_tensor(prompt.before.length)
        # Before the crop, which empties the slots that these tokens are read from.
        pending = store.journal.newest_tokens(length, count, None if valid is None else valid.to(length.device))
        store.journal.crop(prompt.before.columns, length)
        # As `attend_prompt` does: `compress` notes the sizes before a prompt by columns that were counted already.
        store.contents.set_columns(kept.columns)
        # At once, not held for a measurement or a replay: `obstacle_of` refuses policies that need either.
        cache.compress(layer, pending)
    cache.forget_forward()  # this was none, and its division of the budget is of no other prompt


def _crop_window(window: DynamicSlidingWindowLayer, removed: int) -> None:
    window.crop(-removed)
    assert window.keys is not None and window.values is not None
    # A crop leaves views, which keep what was taken back alive.
    window.keys = window.keys.clone()
    window.values = window.values.clone()
