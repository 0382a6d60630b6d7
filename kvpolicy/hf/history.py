"""History of a cache: decode steps since a mark, and prompts and tokens that a crop removes."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from numbers import Integral
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicSlidingWindowLayer

from kvpolicy.engine.rollback import mark as mark_layer
from kvpolicy.hf import cropping
from kvpolicy.hf.layer import PolicyLayer
from kvpolicy.hf.seen_text import KnownTokens
from kvpolicy.hf.states import States
from kvpolicy.text.errors import KVPolicyError, KVPolicyStateError
from kvpolicy.text.validation import check_size


class Mark:
    """The state that a rollback restores; each layer under the policy has a separate log.

    Attributes:
        most: The most tokens of each row until a rollback.
        columns: Columns seen at the mark.
        fed: Eager steps since then.
        left: For each unmanaged layer, what left its window in each step: keys and values [B, H, 1, D], or None while
            the window was not full.
        states: For each step, copies of the states of each layer before it.
    """

    def __init__(self, most: int, columns: int) -> None:
        """Nothing was fed yet."""
        self.most = most
        self.columns = columns
        self.fed = 0
        self.left: dict[int, list[tuple[Tensor, Tensor] | None]] = {}
        self.states: list[dict[int, list[Tensor]]] = []

    def note_states(self, layers: Sequence[Any]) -> None:
        """Copy all states, which the step that begins will overwrite."""
        kept = {index: layer.copy_states() for index, layer in enumerate(layers) if isinstance(layer, States)}
        self.states.append(kept)

    def undo_states(self, layers: Sequence[Any], keep: int) -> None:
        """Undo all steps of all states but the first `keep`."""
        for index, copies in (self.states[keep] if keep < len(self.states) else {}).items():
            layers[index].restore_states(copies)

    def note_window(self, layer_idx: int, layer: DynamicSlidingWindowLayer) -> None:
        """Keep what a step is about to push out of a window."""
        keys = layer.keys
        values = layer.values
        assert keys is not None and values is not None
        # transformers keeps one token less than the window, so that from there on each step pushes one out, unless the
        # layer records its past. Cloned, since a slice would keep the whole window alive.
        full = keys.shape[2] >= layer.sliding_window - 1 and not layer.record_past
        oldest = (keys[:, :, :1].clone(), values[:, :, :1].clone()) if full else None
        self.left.setdefault(layer_idx, []).append(oldest)

    def undo_window(self, layer_idx: int, layer: DynamicSlidingWindowLayer, keep: int) -> None:
        """Undo all steps of a window but the first `keep`."""
        # The newest step first: what it pushed out stood behind what earlier steps pushed out.
        for oldest in reversed(self.left.get(layer_idx, [])[keep:]):
            assert layer.keys is not None and layer.values is not None
            keys, values = (t[:, :, :-1] for t in (layer.keys, layer.values))
            if oldest is not None:
                keys, values = (torch.cat(pair, 2) for pair in zip(oldest, (keys, values), strict=True))
            layer.keys, layer.values = keys.clone(), values.clone()
            layer.cumulative_length -= 1

    def nbytes(self, layer_idx: int) -> int:
        """Bytes that are kept of an unmanaged layer."""
        windows = sum(t.nbytes for pair in self.left.get(layer_idx, []) for t in pair or ())
        return windows + sum(t.nbytes for step in self.states for t in step.get(layer_idx, ()))


class History:
    """History of a cache: decode steps since a mark, and prompts and tokens behind them that a crop removes.

    Attributes:
        mark: The mark that is held; None without.
        prompts: The last prompts and chunks, the latest last.
        is_shared: Whether other caches share the slots, so that nothing may change them.
        known: The token ids of the first columns, where a file told them; else None.
        is_whole: Whether the last prompt was added whole, beyond the budget.
    """

    def __init__(self, known: KnownTokens | None = None) -> None:
        """Nothing to take back."""
        self.known = known
        self.mark: Mark | None = None
        self.prompts: list[cropping.PromptForward] = []
        self.is_shared = False
        self.is_whole = False

    def map_rows(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Select or repeat rows."""
        self.prompts = [prompt.map_rows(fn) for prompt in self.prompts]
        self.known = None if self.known is None else self.known.map_rows(fn)

    def begun(self, columns: int) -> History:
        """The history of a cache that has only the first columns, as one behind a shared prefix after a reset."""
        return History(None if self.known is None else self.known.first(columns))

    def forget(self) -> None:
        """Forget what refers to columns, which an edit has changed: a crop is refused then, and no ids are compared."""
        self.prompts = []
        self.known = None

    def refuse_marked(self, what: str) -> None:
        """Refuse what a rollback could not undo."""
        if self.mark is not None:
            raise KVPolicyStateError(
                f"{what} must be called without a mark, which could not undo it, got a mark that is held with "
                f"{self.mark.fed} token(s) fed; try cache.rollback(accepted) first."
            )

    def refuse_changes(self, what: str) -> None:
        """Refuse what would change slots that other caches share, or that a rollback could not undo."""
        self.refuse_marked(what)
        self.refuse_shared(what)

    def refuse_shared(self, what: str) -> None:
        """Refuse what would change slots that other caches share."""
        if self.is_shared:
            raise KVPolicyStateError(
                f"{what} must not change a cache whose slots other caches share, got one after fork(shared=True); try "
                "cache.fork() for a copy, or cache.reset() for another prompt."
            )

    def note_window(self, layer_idx: int, layer: Any) -> None:
        """Note what a step is about to push out of a layer, if it is a sliding window under a mark."""
        if self.mark is None or not isinstance(layer, DynamicSlidingWindowLayer):
            return
        if torch.compiler.is_compiling():
            raise KVPolicyStateError(
                "A step must not be compiled under a mark if layers have sliding windows, which are logged on the "
                f"host, got one in layer {layer_idx}; try it uncompiled."
            )
        self.mark.note_window(layer_idx, layer)


def set_mark(cache: Any, most: int) -> None:
    """Make the next decode steps of a cache undoable; see `PolicyCache.mark`."""
    most = check_size("most", most, 1)
    cache.forward.check_idle("mark()")
    cache.history.refuse_shared("mark()")
    first = cache.policy_layers[0]
    if cache.holds_next:
        raise KVPolicyStateError(
            "mark() must not be called between hold_next() and its forward, got both; try the forward first."
        )
    if not cache.has_prompt:
        raise KVPolicyStateError(
            "A cache must hold a whole prompt before a mark, got one that does not; try to run the prompt first."
        )
    for layer in cache.policy_layers:
        mark_layer(layer.store.contents, layer.store.geometry, most, layer.mask_digest)
    cache.history.mark = Mark(most, first.get_seq_length())


def roll_back(cache: Any, accepted: int) -> None:
    """Keep the first tokens since the mark; see `PolicyCache.rollback`."""
    cache.forward.check_idle("rollback()")
    mark = cache.history.mark
    if mark is None:
        raise KVPolicyStateError("A rollback must follow a mark, got none; try cache.mark() before the steps.")
    first = cache.policy_layers[0]
    # By columns, since `mark.fed` does not count compiled steps.
    fed = first.get_seq_length() - mark.columns
    if isinstance(accepted, bool) or not isinstance(accepted, Integral) or not 0 <= accepted <= fed:
        raise KVPolicyError(
            f"accepted must be an integer from 0 to {fed}, the tokens fed since the mark, got {accepted!r}."
        )
    kept = int(accepted)
    with mode_of_tensors(cache):
        for index, layer in enumerate(cache.layers):
            if isinstance(layer, PolicyLayer):
                layer.rollback(kept)
            elif isinstance(layer, DynamicSlidingWindowLayer):
                mark.undo_window(index, layer, kept)
        mark.undo_states(cache.layers, kept)
    cache.history.mark = None


def crop(cache: Any, tokens_to_remove: int) -> None:
    """Take back the newest tokens of every row; see `PolicyCache.crop`."""
    cache.forward.check_idle("crop()")
    cache.history.refuse_shared("crop()")
    with mode_of_tensors(cache):
        cropping.crop(cache, tokens_to_remove)
    history = cache.history
    history.known = None if history.known is None else history.known.first(cache.get_seq_length())


@contextmanager
def mode_of_tensors(cache: Any) -> Generator[None]:
    """The mode in which the tensors were made: only inference mode may change those that were made in it."""
    first = cache.policy_layers[0]
    with torch.no_grad(), torch.inference_mode(first.is_initialized and first.store.contents.is_inference):
        yield


def note_forward(cache: Any, new: int, one_token: bool, seen: Tensor, valid: Tensor | None) -> None:
    """Note what a rollback or a crop needs of a forward that is about to begin, or refuse it.

    Args:
        cache: The cache.
        new: Its columns.
        one_token: Whether it is a decode step.
        seen: Tokens that each row has seen, [B].
        valid: Which of the new tokens are not padding, [B, P] bool; None if all are.
    """
    cache.history.refuse_shared("A forward")
    mark = cache.history.mark
    if mark is None:
        if not one_token:
            cache.history.is_whole = cache.holds_next
        if not one_token and not cropping.obstacle(cache):
            cropping.remember(cache, cropping.make_prompt(cache, new, seen, valid))
        return
    if not one_token:
        raise KVPolicyStateError(
            f"Tokens must be fed one at a time under a mark, got {new} at once; try cache.rollback(accepted) first."
        )
    if mark.fed >= mark.most:
        raise KVPolicyStateError(
            f"At most {mark.most} tokens must be fed under this mark, got one more; try cache.rollback(accepted) "
            "first, or a mark with a larger most."
        )
    mark.fed += 1
    mark.note_states(cache.layers)
