"""The cache: the slots of every layer, and the budget that they share."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicSlidingWindowLayer

from kvpolicy.engine.host import inference_as, on_host
from kvpolicy.engine.state import HOST
from kvpolicy.hf.announced import Announced, several_follow
from kvpolicy.hf.attachment import attachment_of, detached
from kvpolicy.hf.cache_file import rank_path, write
from kvpolicy.hf.cache_forward import CacheForward
from kvpolicy.hf.editing import check_rows, shift
from kvpolicy.hf.file_forms import FileForm, form_of
from kvpolicy.hf.joining_rows import drop, put
from kvpolicy.hf.layer import PolicyLayer
from kvpolicy.hf.layer_budgets import LayerBudgets
from kvpolicy.hf.model_spec import resolve_for
from kvpolicy.hf.rows import given_rows, refuse_rows
from kvpolicy.hf.saved_cache import describe_cache, load_cache
from kvpolicy.hf.shared_fork import behind, own_policy, refuse_prefix, refuse_windows, share
from kvpolicy.hf.states import stock_nbytes
from kvpolicy.hf.taking_back import crop, roll_back, set_mark
from kvpolicy.planning.memory import resident_bytes
from kvpolicy.policy import Policy
from kvpolicy.reporting import report
from kvpolicy.reporting.report import Report, make_report
from kvpolicy.text.arguments import named_options
from kvpolicy.text.errors import KVPolicyError, KVPolicyStateError
from kvpolicy.text.validation import check_index, check_size


@named_options
class PolicyCache(CacheForward):
    """A KV cache under a policy, to be passed as `cache`, or `past_key_values` before transformers 5.24.

    A model that a policy is attached to makes one by itself. Make your own to keep two conversations on one model
    apart, or to announce how long they will be.

    Args:
        model: A model that a policy is attached to.
        policy: The cache's policy or its spec string; the attached one by default.
        prompt: Tokens of each row's whole prompt, if it comes in chunks: [B], one number, or None. One number is the
            longest row's, with which the others end too; a share of it is the budget of every row.
        new: Tokens that will be generated, if known: a growing cache then allocates exactly that.

    Raises:
        KVPolicyError: If no policy is attached to the model, the attachment lacks a metric that this policy needs, or a
            number of tokens is out of range.

    Examples:
        >>> import torch, kvpolicy
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(num_hidden_layers=1, hidden_size=32, num_attention_heads=2, vocab_size=9)
        >>> model = LlamaForCausalLM(config).eval()
        >>> with torch.no_grad(), kvpolicy.attach(model, "window@0.5"):
        ...     cache = kvpolicy.PolicyCache(model)
        ...     _ = model(torch.tensor([[1, 2, 3, 4]]), cache=cache)
        >>> cache.layers[0].positions.tolist()
        [[[2, 3], [2, 3]]]
    """

    def __init__(
        self,
        model: nn.Module,
        policy: Policy | str | None = None,
        *,
        prompt: Tensor | Sequence[int] | int | None = None,
        new: int | None = None,
    ) -> None:
        """Make an empty cache."""
        attachment = attachment_of(model)
        wanted = attachment.policy
        if policy is not None:
            wanted = resolve_for(Policy.of(policy), attachment.model_shape, attachment.info)
        attachment.check(wanted)
        super().__init__(attachment, wanted)
        self.announced = Announced(prompt, new)

    __repr__ = report.cache_words  # pyright: ignore[reportAssignmentType]
    _repr_html_ = report.cache_html

    @property
    def mask_digest(self) -> Tensor | None:
        """Digest of the columns that each row has seen, [B] int64; None before the first forward."""
        return self.policy_layers[0].mask_digest

    @property
    def nbytes(self) -> int:
        """Every byte held, on this rank."""
        return sum(sum(layer.held().values()) for layer in self.policy_layers) + sum(self.unmanaged_bytes().values())

    @property
    def host_nbytes(self) -> int:
        """The bytes of `nbytes` that are in host memory."""
        return sum(layer.held().get(HOST, 0) for layer in self.policy_layers)

    @property
    def full_nbytes(self) -> int:
        """Bytes that a stock cache would hold of the tokens seen, padding excluded."""
        own = 0
        for layer in self.policy_layers:
            if layer.is_initialized:
                own += int(layer.length.sum()) * layer.store.shape.token_nbytes
                own += len(layer.length) * layer.prefix_full_nbytes
        return own + sum(self.unmanaged_bytes().values())

    @property
    def resident_nbytes(self) -> int:
        """Bytes of calibrated tensors, which belong to the model and not to the cache."""
        filled = [layer.store for layer in self.policy_layers if layer.is_initialized]
        held = (store.contents for store in filled)
        return resident_bytes(part for contents in held for part in contents.resident)

    def report(self) -> Report:
        """Per layer: budget, tokens kept and bytes by kind, compared with the full cache."""
        return make_report(self)

    # editing

    def fork(
        self,
        rows: Tensor | Sequence[int] | None = None,
        *,
        shared: bool = False,
        own: Policy | str | None = None,
    ) -> PolicyCache:
        """A copy of the cache that goes on by itself, such as for several questions about one text.

        With `shared=True`, nothing is copied: the slots of this cache, of one row, are a prefix that the rows of the
        new one share. They are held once, and a step reads them once for all rows. They are never evicted, merged or
        encoded again, whatever rows add behind them, and this cache must not change until its `reset`. What rows add
        has slots and a policy of its own, `own`. A file or a crop of the new cache is refused, and its `reset` leads
        back to the end of the prefix.

        Args:
            rows: Which rows the copy has, [B'], in any order and any number of times; all by default.
            shared: Whether the rows share the slots of this cache instead of copying them.
            own: With `shared`, the policy of what rows add, or its spec: one that keeps tokens for their position
                alone. By default `full`, which keeps all of it in full precision.

        Raises:
            KVPolicyError: If there is no such row, or, with `shared`, if there are several, or a part of either policy
                does not allow it: the reader of the prefix must read everything.
            KVPolicyStateError: If the slots are to be shared of a cache without a whole prompt, under a mark, or
                behind a shared prefix itself.

        Source:
            Hydragen (arXiv:2402.05099): attention of all rows to a prefix is computed together, and joined with that to
            each row's own tokens by log-sum-exp. Differences: the prefix may be compressed, evicted from and in codes;
            there is one prefix, and no tree of them.
        """
        if shared:
            refuse_rows(self.rows, "fork(shared=True)")
            other = PolicyCache.__new__(type(self))
            CacheForward.__init__(other, self.attachment, own_policy(self, own))
            share(self, other, rows)
            return other
        if own is not None:
            raise KVPolicyError(
                f"own must be None without shared=True, got {own!r}; try fork(rows, shared=True, own=own)."
            )
        other = copy.deepcopy(self)
        other.journal.is_shared = False
        if rows is not None:
            indices = check_rows(rows, self.batch_size)
            other.batch_select_indices(indices)
        return other

    def shift(self, from_position: int, by: int) -> None:
        """Move every token from a position on, as if the text before it had become longer or shorter.

        Keys are rotated to their new positions, exactly; codes of unrotated keys stay as they are. If `by` is negative,
        the tokens at the positions `from_position + by` to `from_position - 1` are removed. If it is positive, the
        positions in between are left without tokens, like those of evicted ones. What the moved tokens took from the
        text before the edit stays in their keys and values.

        Args:
            from_position: The first position that moves, counted without padding. Every row must reach behind it.
            by: How far.

        Raises:
            KVPolicyError: If a part of the policy or the model does not allow it, or a position is out of range.

        Source:
            PIE (arXiv:2407.03157), positional integrity encoding. Difference: nothing is recomputed here; what replaces
            a removed span is passed to the model as further tokens.
        """
        self.journal.refuse_changes("shift()")
        refuse_prefix(self, "shift()")
        refuse_rows(self.rows, "shift()")
        self.forward.check_idle("shift()")
        shift(self, from_position, by)

    # rows that come and go

    @on_host
    def put(self, row: int, other: PolicyCache) -> None:
        """Let a free row go on as another cache, of one row; only on a cache of `Handle.rows`.

        The row holds bit for bit what the other cache holds, and answers as that would alone. The other cache is not
        changed, and may be filled into several rows. Its prompt ran under the same policy. What it was announced to
        answer (`new`) holds for the row too; else the row has slots for as many tokens as the cache was made for.

        Args:
            row: Number of the row, one of `free_rows`.
            other: The cache of a whole prompt.

        Raises:
            KVPolicyError: If there is no such row, or it is not free, or the other cache has several rows, too many
                tokens, or another policy.
            KVPolicyStateError: If this is an ordinary cache, or the other one is in the middle of something.

        Examples:
            >>> import torch, kvpolicy
            >>> model, _ = kvpolicy.tiny()
            >>> with torch.no_grad(), kvpolicy.attach(model, "window@4") as handle:
            ...     rows = handle.rows(2, 64)
            ...     prompt = kvpolicy.PolicyCache(model)
            ...     _ = model(torch.arange(5, 14)[None], cache=prompt)
            ...     rows.put(1, prompt)
            ...     _ = model(torch.tensor([[0], [20]]), cache=rows)
            >>> rows.free_rows(), rows.layers[0].length.tolist()
            ([0], [0, 10])
        """
        put(self, row, other)

    @on_host
    def drop(self, row: int) -> None:
        """Free a row, which then holds nothing; only on a cache of `Handle.rows`.

        Args:
            row: Number of the row.

        Raises:
            KVPolicyError: If there is no such row, or it is free.
            KVPolicyStateError: If this is an ordinary cache.
        """
        drop(self, row)

    def is_free(self, row: int) -> bool:
        """Whether a row holds nothing; only on a cache of `Handle.rows`. The device is not asked."""
        rows = given_rows(self.rows, "is_free()")
        return not rows.live[check_index("row", row, rows.count)]

    def free_rows(self) -> list[int]:
        """The rows that hold nothing, ascending; only on a cache of `Handle.rows`. The device is not asked."""
        return [row for row, is_live in enumerate(given_rows(self.rows, "free_rows()").live) if not is_live]

    # files

    def save(
        self,
        path: str | PathLike[str],
        tokens: Tensor | Sequence[Sequence[int]] | None = None,
        compress: str | FileForm | None = None,
    ) -> None:
        """Save the cache to a safetensors file; `load` makes an equal one, which goes on bit for bit.

        Codes are stored as codes, so that saving and loading again loses nothing, unless `compress` names a form with
        loss. Each rank of tensor parallelism writes a file of its own, `NAME-00001-of-00002.safetensors`.

        Args:
            path: The file; one that exists is replaced, atomically.
            tokens: The token ids that the cache has seen, [B, N], padding included, to be stored beside it.
            compress: `zlib` to compress the codes without loss; None for a file that is read faster. With
                `kvtc:calibration=DIR:ratio=16`, keys and values in full precision are encoded with loss, and `load`
                needs the same calibration; see `kvpolicy.hf.kvtc.form.KVTC`.

        Raises:
            KVPolicyError: If the cache is empty or in the middle of a prompt, a part of its policy holds an object, an
                argument is wrong, or the form does not fit the model or its ranks.

        Examples:
            >>> import tempfile, torch, kvpolicy
            >>> from transformers import LlamaConfig, LlamaForCausalLM
            >>> config = LlamaConfig(num_hidden_layers=1, hidden_size=32, num_attention_heads=2, vocab_size=9)
            >>> model = LlamaForCausalLM(config).eval()
            >>> with tempfile.TemporaryDirectory() as folder, torch.no_grad(), kvpolicy.attach(model, "window@0.5"):
            ...     cache = kvpolicy.PolicyCache(model)
            ...     _ = model(torch.tensor([[1, 2, 3, 4]]), cache=cache)
            ...     cache.save(f"{folder}/prompt.safetensors")
            ...     loaded = kvpolicy.PolicyCache.load(model, f"{folder}/prompt.safetensors")
            >>> loaded.layers[0].positions.tolist()
            [[[2, 3], [2, 3]]]
        """
        self.journal.refuse_marked("save()")
        refuse_prefix(self, "save()")
        refuse_rows(self.rows, "save()")
        self.forward.check_idle("save()")
        if self.holds_next:
            raise KVPolicyStateError("save() must not follow hold_next(), which no file keeps; try to save before it.")
        form = form_of(compress)
        content = describe_cache(self, tokens, {"nbytes": self.nbytes, "full_nbytes": self.full_nbytes})
        if form is not None:
            content = form.encode(content, self.attachment)
        write(rank_path(path, *self.attachment.place), content, deflates=compress is not None)

    @classmethod
    def load(cls, model: nn.Module, path: str | PathLike[str], new: int | None = None) -> PolicyCache:
        """Load a cache from the file that `save` wrote.

        Each rank of tensor parallelism loads its own file, or its KV heads of the file of a whole model.

        Args:
            model: The model that the cache was made with, with a policy attached that has the same hooks.
            path: The path that was given to `save`.
            new: Tokens that will be generated: a growing cache makes room for them at once. By default the cache has
                the slots that it was saved with.

        Raises:
            KVPolicyError: If the file is of another model, dtype, calibration or tensor parallel size, cannot be
                divided among these ranks, was truncated or edited, or was written by a newer version.
        """
        cache = load_cache(cls, model, str(rank_path(path, 0, 1)))[0]
        if new is not None:
            cache.expect(None, new)
        return cache

    def unmanaged_bytes(self) -> dict[int, int]:
        """Bytes that the policy does not manage, by layer: of sliding windows, and of states."""
        held = {index: stock_nbytes(layer) for index, layer in enumerate(self.layers)}
        return {index: nbytes + self.journal.nbytes(index) for index, nbytes in held.items() if nbytes}

    @on_host
    def tick(self) -> None:
        """Do the work between decode steps: demote a full block, extend a growing cache.

        `generate` and an uncompiled loop do this by themselves; a loop over `torch.compile(model)` calls it after
        each step. A block that had to be demoted and was not is an error in the next step, never a lost token. Each
        call counts as a step: behind an uncompiled one, readers that sort their slots every few steps do so sooner.
        """
        self.journal.refuse_shared("tick()")
        begun = [layer for layer in self.policy_layers if layer.holds_prompt]
        for layer in begun:
            with inference_as(layer.store.contents.is_inference):
                layer.count_step()
        for layer in begun:
            layer.make_room()

    @on_host
    def make_room(self) -> None:
        """Add slots for the next step where there are none; an uncompiled forward does this by itself."""
        for layer in self.policy_layers:
            if layer.is_initialized and layer.store.contents.free_steps < 1:
                layer.make_room()

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
            ...     _ = model(torch.arange(5, 14)[None], cache=cache)
            ...     cache.mark(most=3)
            ...     for token in (20, 21, 22):
            ...         _ = model(torch.tensor([[token]]), cache=cache)
            ...     cache.rollback(1)
            >>> cache.layers[0].length.tolist()
            [10]
        """
        refuse_rows(self.rows, "mark()")
        set_mark(self, most)

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
        roll_back(self, accepted)

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
        refuse_prefix(self, "crop()")
        refuse_rows(self.rows, "crop()")
        crop(self, tokens_to_remove)

    def expect(self, prompt: Tensor | Sequence[int] | int | None, new: int) -> None:
        """Announce a prompt and `new` more tokens: a growing cache makes room for them at once.

        A shared prefix is a part of the prompt.
        """
        self.journal.refuse_changes("expect()")
        refuse_rows(self.rows, "expect()")
        own = behind(Announced(prompt, new).prompt, self.policy_layers[0])
        self.announced = self.announced.again(own, new)
        if self.is_initialized and several_follow(own, self.policy_layers[0].length):
            # These are compressed, which makes the slots of all that was announced, within the budget. Slots that are
            # made before would be in addition to it.
            return
        for layer in self.policy_layers:
            # One that waits for its prompt has no slots yet, and makes them as announced.
            if layer.holds_prompt and layer.store.spec.grows:
                layer.make_room(new)

    def hold_next(self) -> None:
        """Add the next forward whole: all its tokens are kept, beyond the budget, until the prompt after it.

        A question about a text that was compressed before is part of no budget then, and nothing of the text is evicted
        for it. The budget of each layer is larger by as many tokens, also for the tokens that are generated behind it.
        The next prompt without `hold_next` brings the tokens under the budget again; the slots stay, and are counted.
        What kvpress calls a compressed context works so.

        Raises:
            KVPolicyStateError: If a row has no prompt yet, or one that waits for the rest of it, or under a mark.

        Examples:
            >>> import torch, kvpolicy
            >>> from transformers import LlamaConfig, LlamaForCausalLM
            >>> config = LlamaConfig(num_hidden_layers=1, hidden_size=32, num_attention_heads=2, vocab_size=9)
            >>> model = LlamaForCausalLM(config).eval()
            >>> with torch.no_grad(), kvpolicy.attach(model, "window@0.5"):
            ...     cache = kvpolicy.PolicyCache(model)
            ...     _ = model(torch.tensor([[1, 2, 3, 4]]), cache=cache)
            ...     cache.hold_next()
            ...     _ = model(torch.tensor([[5, 6, 7]]), cache=cache)
            >>> cache.layers[0].positions[0, 0].sort().values.tolist()
            [2, 3, 4, 5, 6]
        """
        self.journal.refuse_changes("hold_next()")
        refuse_rows(self.rows, "hold_next()")
        self.forward.check_idle("hold_next()")
        if not self.is_initialized or not self.has_prompt or not bool((self.policy_layers[0].length > 0).all()):
            raise KVPolicyStateError(
                "Every row of the cache must hold a whole prompt before hold_next(), got one that does not; try to run "
                "the prompt first."
            )
        self.holds_next = True

    # the interface of transformers

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Pass keys and values to the layer.

        Raises:
            KVPolicyError: If the policy was detached, or no forward of the cache's own model runs.
        """
        if not self.attachment.active:
            raise detached()
        if not self.forward.runs and not torch.compiler.is_compiling():
            raise KVPolicyError(
                "The model must be the one whose policy the cache belongs to, got one without a policy; try to attach "
                "one to it, and to make its cache with kvpolicy.PolicyCache(model)."
            )
        layer: Any = self.layers[layer_idx]
        if isinstance(layer, PolicyLayer):
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)
        states = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        # A sliding layer keeps a view of the whole prompt: release it.
        layer.keys = layer.keys.clone()
        layer.values = layer.values.clone()
        return states

    def batch_select_indices(self, indices: Tensor | Sequence[int]) -> None:
        """Take rows `indices` [B']."""
        self.journal.refuse_changes("batch_select_indices()")
        if not isinstance(indices, Tensor):  # those of beams are right, and looking at them would wait for the device
            indices = check_rows(indices, self.batch_size)
        taken = indices
        every: list[Any] = self.layers
        for layer in every:
            keys: Any = layer.keys if isinstance(layer, DynamicSlidingWindowLayer) else None
            layer.batch_select_indices(taken if keys is None else taken.to(keys.device))
        self._map_rows(lambda t: t[taken.to(t.device)])

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Take rows `beam_idx` [B']."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row, as often as beams or answers to one prompt need it.

        Raises:
            KVPolicyError: If `repeats` is no integer from 1.
        """
        self.journal.refuse_changes("batch_repeat_interleave()")
        repeats = check_size("repeats", repeats, 1)
        super().batch_repeat_interleave(repeats)
        self._map_rows(lambda t: t.repeat_interleave(repeats, 0))

    def _map_rows(self, fn: Callable[[Tensor], Tensor]) -> None:
        self.journal.map_rows(fn)
        if self.rows is not None:
            self.rows.map_rows(fn)
        self.announced.map_rows(fn)
        self.budgets.measured.map_rows(fn)

    def reset(self) -> None:
        """Forget everything, what was announced too, so that the cache can be used for another prompt; see `expect`.

        A cache behind a shared prefix returns to its end, with the rows of its fork.
        """
        refuse_windows(self)
        super().reset()
        self.journal = self.journal.begun(self.policy_layers[0].prefix_columns)
        self.plan = None
        self.announced = Announced()
        self.budgets = LayerBudgets(self.policy, self.attachment, self.policy_layers)
        self.holds_next = False
        self.counts_columns = False
        if self.rows is not None:
            self.rows.clear()
        self.forget_forward()
