"""The hooks around a forward of a model with a policy: its cache, its tile size, and its end."""

from __future__ import annotations

import inspect
import threading
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers.cache_utils import EncoderDecoderCache

from kvpolicy.hf import forward_calls, forward_checks
from kvpolicy.hf.attachment import HOLD, Attachment, not_copied, not_pickled
from kvpolicy.hf.cache import PolicyCache
from kvpolicy.hf.cache_names import OLD, cache_name, passed_cache, rename_cache
from kvpolicy.hf.generation_hooks import RecentCache
from kvpolicy.hf.masks import defer_masks
from kvpolicy.hf.passing_cache import PassingCache
from kvpolicy.hf.rope_deltas import RopeDeltas
from kvpolicy.hf.running_forward import newest_valid
from kvpolicy.hf.shared_keys import cuts, ranks_by_queries, read_whole
from kvpolicy.hf.tile_size import AUTO
from kvpolicy.reporting.logging import log_compressed, log_tile, warn_beyond_trained, warn_of_chunks, warn_of_padding
from kvpolicy.statistics import NewestQueries, RecentQueries
from kvpolicy.text.budget import least_of
from kvpolicy.text.errors import KVPolicyError


class Running(threading.local):
    """The forward of a thread. Hooks belong to the model, and several threads may run it, each with a cache of its own.

    Attributes:
        cache: The cache of the forward; None while none runs, as in a compiled step.
        chosen: The rows and columns of the forward that begins, and its tile size, once this was chosen.
    """

    cache: PolicyCache | None = None
    chosen: tuple[torch.Size, int | None] | None = None


class ForwardHooks:
    """What happens around the forwards of a decoder under a policy, in each thread.

    Attributes:
        running: The forward of this thread.
    """

    def __init__(
        self,
        model: nn.Module,
        decoder: nn.Module,
        attachment: Attachment,
        recent: RecentCache,
        deltas: RopeDeltas | None,
    ) -> None:
        """Prepare for the forwards of a decoder; nothing is registered.

        Args:
            model: The model that the policy is attached to.
            decoder: Its module with the forward that takes the cache.
            attachment: The attachment.
            recent: Told of the cache of each forward.
            deltas: The offsets of the model's positions behind pictures; None in a model that reads text alone.
        """
        self.running = Running()
        self._model = model
        self._attachment = attachment
        self._recent = recent
        self._deltas = deltas
        self._positions = forward_checks.numbering_of(decoder, by_mask=deltas is not None)
        self._makes_both = forward_calls.makes_both_caches(decoder)
        self._names = list(inspect.signature(decoder.forward).parameters)
        self._cache_name = cache_name(decoder)

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make sure that a forward has a cache under the policy."""
        if self.running.cache is not None:  # it was broken off, and is not this forward's to finish
            self.running.cache = None
        if torch.compiler.is_compiling():
            forward_calls.check_step(module, args, kwargs)
            return forward_calls.with_positions(passed_cache(kwargs), args, kwargs)
        forward_calls.LEAVE_COMPILER(None)
        if len(args) > 1:
            args, kwargs = forward_checks.by_name(self._names, args, kwargs)
        rename_cache(kwargs, self._cache_name)
        tokens = forward_calls.tokens_of(args, kwargs)
        defer_masks(False)
        if tokens is None:
            return args, kwargs  # the model says so itself
        given = kwargs.get(self._cache_name)
        if self._makes_both and isinstance(given, EncoderDecoderCache):
            given = kwargs[self._cache_name] = given.self_attention_cache
        if self._attachment.model_shape.owners and tokens.shape[1] > 1 and cuts(self._names):
            self._read_whole(module, kwargs, tokens, given)
        if isinstance(given, PassingCache):  # it stores nothing, and its maker has checked what it passes
            self._choose_tile(given, tokens)
            return args, kwargs
        cache = given if isinstance(given, PolicyCache) else self._new_cache(module, kwargs, given)
        if cache is None:
            return args, kwargs
        if cache.attachment.active and cache.attachment is not self._attachment:
            raise KVPolicyError(
                "The cache must belong to this model, got one that was made for another model; try "
                "kvpolicy.PolicyCache(model)."
            )
        if cache.rows is not None:
            cache.rows.check_step(tokens, kwargs)
        whole_mask = kwargs.get("attention_mask")
        mask = forward_checks.own_mask(module, whole_mask)
        call = {**kwargs, "attention_mask": mask}
        forward_checks.check_call(self._model, cache, tokens, call, self._positions, is_made=mask is not whole_mask)
        limit = self._attachment.trained_positions
        if (
            limit is not None
            and forward_checks.exceeds(cache, limit, tokens.shape[1], kwargs, self._positions)
            and self._attachment.first_warning("positions")
        ):
            warn_beyond_trained(self._model, limit)
        if tokens.shape[1] > 1:
            self._warn_of_chunks(cache, tokens, mask)
            self._warn_of_padding(newest_valid(mask, tokens.shape[1]))
        cache.begin(tokens, mask, kwargs.get("position_ids"), kwargs.get("per_layer_inputs"))
        answers = self._recent.note(cache)
        if self._deltas is not None:
            self._deltas.note(cache, tokens.shape[0], answers=answers)
        if tokens.shape[1] > 1:  # else layers take the token at once
            self._choose_tile(cache, tokens)
        self.running.cache = cache
        # Last, since a call that was refused has not used the stock cache, which may be passed again.
        if given is not None and given is not cache:
            forward_calls.become(given, cache)
        return forward_calls.with_positions(cache, args, kwargs)

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        """Do what had to wait for every layer; in a compiled step nothing runs, and nothing waits."""
        cache = self.running.cache
        if cache is not None:
            # Before `finish`, which may replay a prompt through the same decoder, and so through these hooks.
            self.running.cache = None
            forward = cache.forward
            cache.finish(module)
            if forward.tokens is not None:  # a budget was divided, and a prompt compressed
                log_compressed(cache)

    def before_outer(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Choose the tile size before the decoder runs: a model around it may make the masks (Gemma-3)."""
        if forward_calls.runs_compiled(module, args, kwargs):
            return
        tokens = forward_calls.tokens_of(args, kwargs)
        size = self._attachment.tile_size(tokens) if isinstance(tokens, Tensor) else None
        self.running.chosen = (tokens.shape[:2], size) if isinstance(tokens, Tensor) else None
        defer_masks(size is not None)

    def check_mask(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Check the mask of a model around the decoder, which gives it others: one for each kind of layer (Gemma 3)."""
        mask = kwargs.get("attention_mask")
        tokens = forward_calls.tokens_of(args, kwargs)
        is_usual = mask is None or (isinstance(mask, Tensor) and mask.dim() == 2)
        if torch.compiler.is_compiling() or tokens is None or not is_usual:
            return
        cache = passed_cache(kwargs)
        if cache is None and mask is not None and kwargs.get("use_cache") is not False:
            cache = PolicyCache(self._model)  # like the one that the decoder is given
        if isinstance(cache, PolicyCache) and cache.attachment is self._attachment:
            forward_checks.check_mask(cache, mask, *tokens.shape[:2])

    def tile_size(self) -> int | None:
        """The tile size of this thread's forward; None if its layers take all tokens at once, or none runs."""
        cache = self.running.cache
        return None if cache is None else cache.tile_size

    def check_rows(self, cache: PolicyCache) -> None:
        """Refuse a cache of rows that come and go on a model that does not fit it.

        Raises:
            KVPolicyError: If a row of a batch depends on the positions of the others.
        """
        forward_checks.check_rows(self._model, cache, self._names, self._positions.learned)
        if self._deltas is not None:
            raise KVPolicyError(
                "Rows that come and go must be of a model that reads text alone, got "
                f"{type(self._model).__name__}, which counts positions behind pictures; try its text model."
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        """Refuse: a copied model has hooks that work for the original."""
        raise not_copied(self._attachment.policy)

    def __reduce__(self) -> NoReturn:
        """Refuse: hooks cannot be pickled."""
        raise not_pickled(self._attachment.policy)

    def _read_whole(self, module: nn.Module, kwargs: dict[str, Any], tokens: Tensor, given: Any) -> None:
        """Let layers that read the keys of others run on a whole prompt, of which the model may leave out tokens."""
        policy = given.policy if isinstance(given, PolicyCache) else self._attachment.policy
        may_cut = (
            forward_calls.caches(module, kwargs) and self._attachment.tile is None and not ranks_by_queries(policy)
        )
        read_whole(kwargs, tokens.shape[1], kwargs.get("attention_mask"), may_cut=may_cut)

    def _new_cache(self, module: nn.Module, kwargs: dict[str, Any], given: Any) -> PolicyCache | None:
        """A cache under the policy for a forward that has none, in place of a stock one; None if it makes no cache."""
        if given is None and not forward_calls.caches(module, kwargs):
            return None
        if given is not None:
            forward_calls.check_stock(given)
        cache = PolicyCache(self._model)
        kwargs[self._cache_name] = cache
        return cache

    def _warn_of_chunks(self, cache: PolicyCache, tokens: Tensor, mask: Any) -> None:
        """Warn once if a chunk of an announced prompt is compressed by its own last queries."""
        policy = cache.policy
        new = tokens.shape[1]
        if cache.prompt is None or self._attachment.chunks == HOLD or policy.replay is not None:
            return
        every = [each for own in policy.distinct for each in own.selector.statistics]
        if not any(isinstance(each, RecentQueries | NewestQueries) for each in every):
            return
        if least_of(policy.budget) >= int(cache.prompt.max()):
            return  # nothing is left out
        first = cache.policy_layers[0]
        seen = first.length if first.is_initialized else torch.zeros(tokens.shape[0], dtype=torch.int64, device="cpu")
        valid = newest_valid(mask, new)
        is_chunk = cache.announced.follows(seen.cpu(), new, None if valid is None else valid.cpu())
        if is_chunk and self._attachment.first_warning("chunks"):
            warn_of_chunks(policy)

    def _warn_of_padding(self, valid: Tensor | None) -> None:
        """Warn once if layers have states, and a row ends with padding, by its valid tokens [B, P]."""
        if valid is None or not self._attachment.model_shape.states:
            return
        if bool((valid.any(-1) & ~valid[:, -1]).any()) and self._attachment.first_warning("padding"):
            warn_of_padding(self._model)

    def _choose_tile(self, cache: PolicyCache | PassingCache, tokens: Tensor) -> None:
        """Set how many tokens layers take at a time in the forward of `tokens` [B, P(, hidden)] that begins."""
        cache.tile = cache.tile_size = None
        chosen = self.running.chosen
        self.running.chosen = None
        if not isinstance(cache, PassingCache) or cache.takes_tiles:
            # The free memory may have changed since, and the masks are made already: one choice for both.
            if chosen is not None and chosen[0] == tokens.shape[:2]:
                cache.tile_size = chosen[1]
            else:
                cache.tile_size = self._attachment.tile_size(tokens)
            if self._attachment.tile == AUTO:
                log_tile(tokens.shape[1], cache.tile_size)
        defer_masks(cache.tile_size is not None)


def take_new_name(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """Let a module with the old name of the cache take it under the new one too."""
    rename_cache(kwargs, OLD)
    return args, kwargs


def end_masks(module: nn.Module, args: Any, output: Any) -> None:
    """Let the next forward of this thread make its masks at once; also after an error."""
    if not torch.compiler.is_compiling():
        defer_masks(False)
