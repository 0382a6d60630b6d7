"""The part of a cache that takes tokens back: marks, rollbacks and crops."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicSlidingWindowLayer

from kvpolicy.engine.host import on_host
from kvpolicy.engine.rollback import mark as mark_layer
from kvpolicy.hf import cropping
from kvpolicy.hf.forward_guard import ForwardGuard
from kvpolicy.hf.layer import PolicyLayer
from kvpolicy.spec.errors import KVPolicyError, KVPolicyStateError
from kvpolicy.spec.validation import MAX_SIZE


class Mark:
    """The state that a rollback restores; each layer under the policy has a separate log.

    Attributes:
        most: The most tokens of each row until a rollback.
        columns: Columns seen at the mark.
        fed: Eager steps since then.
        left: For each unmanaged layer, what left its window in each step: keys and values [B, H, 1, D], or None while
            the window was not full.
    """

    def __init__(self, most: int, columns: int) -> None:
        """Nothing was fed yet."""
        self.most = most
        self.columns = columns
        self.fed = 0
        self.left: dict[int, list[tuple[Tensor, Tensor] | None]] = {}

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
        return sum(t.nbytes for pair in self.left.get(layer_idx, []) for t in pair or ())


class UndoableCache(Cache):
    """A cache under a policy that can undo its newest tokens; `PolicyCache` is the one."""

    guard: ForwardGuard
    held_mark: Mark | None = None

    def __init__(self, layers: list[Any]) -> None:
        """Make an empty cache of these layers."""
        super().__init__(layers=layers)
        self.turns: list[cropping.Turn] = []

    @property
    def policy_layers(self) -> list[PolicyLayer]:
        """The layers under the policy."""
        return [layer for layer in self.layers if isinstance(layer, PolicyLayer)]

    @property
    def has_prompt(self) -> bool:
        """Whether every layer holds a prompt that is compressed, and none waits for the rest of it."""
        return all(layer.is_initialized and layer.pending is None for layer in self.policy_layers)

    @on_host
    def mark(self, most: int = 8) -> None:
        """Make the next decode steps undoable, so that a draft can be verified and its rejected tokens taken back.

        A mark holds a log of what these steps overwrite, which counts in `nbytes` until the rollback. Blocks are
        demoted, and slots added, when it is due; the layer is then copied before, and the copy counts too. A second
        mark replaces the first, and keeps all tokens.

        Args:
            most: The most tokens to feed to each row until the rollback, one at a time.

        Raises:
            KVPolicyError: If `most` is no integer from 1.
            KVPolicyStateError: If the cache holds no prompt yet, or one that waits for the rest of it.

        Examples:
            >>> import torch, kvpolicy
            >>> model, _ = kvpolicy.tiny()
            >>> with torch.no_grad(), kvpolicy.attach(model, "h2o@4"):
            ...     cache = kvpolicy.PolicyCache(model)
            ...     _ = model(torch.arange(5, 14)[None], past_key_values=cache)
            ...     cache.mark(most=3)
            ...     for token in (20, 21, 22):
            ...         _ = model(torch.tensor([[token]]), past_key_values=cache)
            ...     cache.rollback(1)
            >>> cache.layers[0].length.tolist()
            [10]
        """
        if isinstance(most, bool) or not isinstance(most, int) or not 1 <= most < MAX_SIZE:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise KVPolicyError(f"most must be an integer from 1 to 2^40 - 1, got {most!r}; try cache.mark(most=8).")
        self._check_idle("mark()")
        first = self.policy_layers[0]
        if not self.has_prompt:
            raise KVPolicyStateError(
                "A cache must hold a whole prompt before a mark, got one that does not; try to run the prompt first."
            )
        for layer in self.policy_layers:
            mark_layer(layer.store.contents, layer.store.geometry, most, layer.mask_digest)
        self.held_mark = Mark(most, first.get_seq_length())

    @on_host
    def rollback(self, accepted: int) -> None:
        """Keep the first tokens since the mark, and leave every tensor as if the others had never been fed.

        The mark is gone afterwards, and its log is freed.

        Args:
            accepted: Tokens of each row to keep, padding included; all that were fed if none is to be undone.

        Raises:
            KVPolicyError: If more tokens are accepted than were fed.
            KVPolicyStateError: If there is no mark.
        """
        self._check_idle("rollback()")
        mark = self.held_mark
        if mark is None:
            raise KVPolicyStateError("A rollback must follow a mark, got none; try cache.mark() before the steps.")
        first = self.policy_layers[0]
        # By columns, since `mark.fed` does not count compiled steps.
        fed = first.get_seq_length() - mark.columns
        if isinstance(accepted, bool) or not isinstance(accepted, int) or not 0 <= accepted <= fed:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise KVPolicyError(
                f"accepted must be an integer from 0 to {fed}, the tokens fed since the mark, got {accepted!r}."
            )
        with self._mode_of_tensors():
            for index, layer in enumerate(self.layers):
                if isinstance(layer, PolicyLayer):
                    layer.rollback(accepted)
                elif isinstance(layer, DynamicSlidingWindowLayer):
                    mark.undo_window(index, layer, accepted)
        self.guard.columns -= fed - accepted
        self.held_mark = None

    @on_host
    def crop(self, tokens_to_remove: int) -> None:
        """Take back the newest tokens of every row, if nothing was evicted, merged or encoded.

        Every tensor is then as if they had never been fed. Assisted decoding of transformers calls this. For what
        evicts, see `mark`.

        Args:
            tokens_to_remove: Minus the number of columns to take back, padding included, as in transformers.

        Raises:
            KVPolicyError: If a part of the policy, or an eviction, cannot be undone; the message names it.
        """
        self._check_idle("crop()")
        with self._mode_of_tensors():
            cropping.crop(self, tokens_to_remove)

    def note_forward(self, new: int, one_token: bool, seen: Tensor, valid: Tensor | None) -> None:
        """Note what a rollback or a crop needs of a forward that is about to begin, or refuse it.

        Args:
            new: Its columns.
            one_token: Whether it is a decode step.
            seen: Tokens that each row has seen, [B].
            valid: Which of the new tokens are not padding, [B, P] bool; None if all are.
        """
        if self.guard.running:  # the guard refuses a forward inside another
            return
        mark = self.held_mark
        if mark is None:
            if not one_token and not cropping.obstacle(self):
                cropping.remember(self, cropping.make_turn(self, new, seen, valid))
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

    def refuse_marked(self, what: str) -> None:
        """Refuse what a rollback could not undo."""
        if self.held_mark is not None:
            raise KVPolicyStateError(
                f"{what} must be called without a mark, which could not undo it, got a mark that is held with "
                f"{self.held_mark.fed} token(s) fed; try cache.rollback(accepted) first."
            )

    @contextmanager
    def _mode_of_tensors(self) -> Generator[None]:
        """The mode in which the tensors were made: only inference mode may change those that were made in it."""
        first = self.policy_layers[0]
        with torch.no_grad(), torch.inference_mode(first.is_initialized and first.store.contents.is_inference):
            yield

    def _check_idle(self, what: str) -> None:
        if self.guard.running:
            raise KVPolicyStateError(
                f"{what} must be called between two forwards, got a cache on which one runs or was interrupted; try a "
                "new cache, or call its reset()."
            )

    # the interface of transformers

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Pass keys and values to the layer."""
        layer = self.layers[layer_idx]
        if self.held_mark is not None and isinstance(layer, DynamicSlidingWindowLayer):
            if torch.compiler.is_compiling():
                raise KVPolicyStateError(
                    "A step must not be compiled under a mark if layers have sliding windows, which are logged on the "
                    f"host, got one in layer {layer_idx}; try it uncompiled."
                )
            self.held_mark.note_window(layer_idx, layer)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Take rows `indices` [B']."""
        self.refuse_marked("batch_select_indices()")
        super().batch_select_indices(indices)
        self._map_turns(lambda t: t[indices.to(t.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row."""
        self.refuse_marked("batch_repeat_interleave()")
        super().batch_repeat_interleave(repeats)
        self._map_turns(lambda t: t.repeat_interleave(repeats, 0))

    def _map_turns(self, fn: Callable[[Tensor], Tensor]) -> None:
        self.turns = [turn.map_rows(fn) for turn in self.turns]

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self.held_mark = None
        self.turns = []
