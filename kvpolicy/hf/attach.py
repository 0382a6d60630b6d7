"""Connect a policy to a model, and disconnect it without a trace."""

from __future__ import annotations

import functools
import inspect
import threading
import weakref
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch._dynamo import OptimizedModule
from transformers.cache_utils import EncoderDecoderCache

from kvpolicy.hf import forward_calls, forward_checks
from kvpolicy.hf.attachment import (
    HOLD,
    PLAIN,
    SELECT,
    Attachment,
    Chunks,
    Hold,
    attachments,
    check_chunks,
    check_compile,
    check_held_codes,
    check_hold,
    check_projections,
    check_replayed_ids,
)
from kvpolicy.hf.attention_interface import PREFIX, attached, configs_of, replace_falcon_forward, swap_implementation
from kvpolicy.hf.cache import PolicyCache
from kvpolicy.hf.cache_names import OLD, cache_name, check_cache_name, check_version, rename_cache
from kvpolicy.hf.discovery import Site, Sites, around, find_sites, is_falcon, rope_owner, sample_weights
from kvpolicy.hf.division import division_of
from kvpolicy.hf.edit_checks import move_obstacle
from kvpolicy.hf.generation_hooks import RecentCache, offer_cache
from kvpolicy.hf.identity import identity
from kvpolicy.hf.joining_rows import open_rows
from kvpolicy.hf.latent import latent_projection
from kvpolicy.hf.masks import defer_masks
from kvpolicy.hf.model_spec import check_supported, describe, resolve_for
from kvpolicy.hf.passing_cache import PassingCache
from kvpolicy.hf.projection import Reading, gathered, output_projection
from kvpolicy.hf.residual_hooks import active_stream, measure
from kvpolicy.hf.rope_deltas import RopeDeltas
from kvpolicy.hf.rotary_lookup import ropes_of, trained_positions
from kvpolicy.hf.running_forward import newest_valid
from kvpolicy.hf.shared_keys import cuts, joint_projections, ranks_by_queries, read_whole
from kvpolicy.hf.tile_size import AUTO, TileSize, check_tile
from kvpolicy.hf.tiles import check_layers, last_norms, norm_in_tiles, take_tiles, tile_obstacle
from kvpolicy.kernels.rotary import Rope
from kvpolicy.planning.result import CachePlan
from kvpolicy.policy import Policy
from kvpolicy.reporting import report as notebook
from kvpolicy.reporting.logging import (
    check_caching,
    log_attached,
    log_compressed,
    log_detached,
    log_tile,
    warn_beyond_trained,
    warn_of_chunks,
    warn_of_states,
)
from kvpolicy.reporting.report import Report
from kvpolicy.statistics import NewestQueries, RecentQueries
from kvpolicy.statistics.statistic import Projection
from kvpolicy.text.arguments import named_arguments
from kvpolicy.text.budget import Budget, least_of
from kvpolicy.text.errors import KVPolicyError, KVPolicyTypeError
from kvpolicy.text.tables import shorten

_LOCK = threading.RLock()
"""Held while a policy is attached or detached: both change configs and modules that threads share."""


class _Running(threading.local):
    """The forward of a thread. Hooks belong to the model, and several threads may run it, each with a cache of its own.

    Attributes:
        cache: The cache of the forward; None while none runs, as in a compiled step.
        chosen: The rows and columns of the forward that begins, and its tile size, once this was chosen.
    """

    cache: PolicyCache | None = None
    chosen: tuple[torch.Size, int | None] | None = None


class Handle:
    """A policy that is attached to a model; as a context manager, it detaches the policy at the end.

    Attributes:
        policy: The policy.
        cache: The most recent cache that the model ran with, whether it made the cache by itself or was given it; None
            before the first one. `generate` counts as a whole, so that afterwards this is the cache of its answer,
            and not that of a negative prompt or of another run of the model within it. A compiled step
            does not count. The handle keeps the cache alive; `handle.cache = None` frees it.
    """

    def __init__(
        self,
        model: nn.Module,
        policy: Policy,
        tile: TileSize = None,
        chunks: Chunks = SELECT,
        hold: Hold = PLAIN,
        compile: bool | None = None,
    ) -> None:
        """Attach; use `kvpolicy.attach`."""
        self._recent = RecentCache()
        self._model = model
        self._undo: list[Callable[[], None]] = []
        self._running = _Running()
        forward_checks.check_adapters(model)
        check_supported(model.config)
        sites = find_sites(model)
        check_cache_name(sites.decoder)
        division = division_of(model)
        dtype: Any = getattr(model, "dtype", None)
        shape = describe(model.config, dtype, division.size, follows_plan=division.follows_plan)
        # Calibrations were made with the whole model, so the weights of a shard identify nothing.
        info = shape.info(sample_weights(sites.layers[0]) if division.size == 1 else division.weights)
        policy = self.policy = resolve_for(policy, shape, info)
        policy.check(info)
        check_held_codes(hold, policy, shape.shape)
        rotations = {} if shape.shape.latent else _rotations(sites, shape.evictable, policy.undoes_rotation)
        rotary = getattr(sites.decoder, "rotary_emb", None)
        trained = None if rotary is None else trained_positions(model.config)
        # Before `_connect`, because `detach` needs it if connecting fails.
        described = identity(model, info=info)
        behind = latent_projection if shape.shape.latent else output_projection
        projections: dict[int, Projection] = {site.layer_idx: Reading(behind, site.attention) for site in sites.layers}
        check_projections(policy, projections)
        projections |= joint_projections(projections, shape.owners, shape.shape.heads)
        vocabulary = forward_checks.vocabulary_of(model)
        check_replayed_ids(policy, vocabulary)
        self._attachment = Attachment(
            policy=policy,
            model_shape=shape,
            info=info,
            identity=described,
            rotations=rotations,
            sharing=division.sharing,
            rotary=rotary,
            trained_positions=trained,
            projections=projections,
            tile=tile,
            chunks=chunks,
            hold=hold,
            compile=compile,
            vocabulary=vocabulary,
            # Measured when first asked.
            move_obstacle=functools.cache(partial(move_obstacle, weakref.ref(model), rotations)),
        )
        try:
            self._connect(sites, gathers=division.gathers)
            attachments[model] = self._attachment
            if shape.states:
                warn_of_states(model, model.config.get_text_config(decoder=True).model_type)  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]
            log_attached(model, policy, shape)
        except BaseException:
            # An interrupt, or a warning that a program makes an error, must not leave a model connected in part.
            self.detach()
            raise

    @property
    def cache(self) -> PolicyCache | None:
        """The most recent cache that the model ran with; None before the first one."""
        return self._recent.cache

    @cache.setter
    def cache(self, cache: PolicyCache | None) -> None:
        """Let go of a cache, or report another one."""
        self._recent.cache = cache

    @property
    def plan(self) -> CachePlan | None:
        """The plan (tokens and bytes) of the most recent cache; None before its first prompt."""
        return None if self.cache is None else self.cache.plan

    def report(self) -> Report:
        """Report the budget, the tokens kept and the bytes by kind of each layer, and the size of the full cache.

        Raises:
            KVPolicyError: If the model has not run with a cache yet.
        """
        if self.cache is None:
            raise KVPolicyError(
                "There is nothing to report yet, since the model has not run with a cache; try generate first."
            )
        return self.cache.report()

    def rows(self, count: int, length: int, new: int | None = None) -> PolicyCache:
        r"""A cache of rows that come and go: many answers in one batch, each as if it were generated alone.

        All rows are free at first. `put` fills one with the cache of a prompt, and `drop` frees it when its answer
        ends; both happen between two steps. A step is an ordinary call of the model with `input_ids` [count, 1], the
        newest token of each row, and this cache, and nothing else: the cache knows the position of each row, and which
        rows are free. The token of a free row may be any that the model knows, such as 0; it is not stored, and its
        logits mean nothing. Around compiled steps, call `tick` as usual.

        Slots are allocated when the first row is filled, on the devices of its layers, and for texts of `length`
        tokens: steps, `put` and `drop` replace no tensor, so that a compiled step stays the same graph. Only where
        layers are measured by the prompt (`squeeze`, `cake`), or get other shares of shorter prompts, `put` adds slots
        to a layer if a row needs more of them there than any before.

        Args:
            count: Number of rows.
            length: The most tokens of a row, its prompt and what follows.
            new: The most tokens that follow a prompt, if known: a cache that grows then has slots for no more.

        Raises:
            KVPolicyError: If the policy or the model does not allow it, or a number is out of range.

        Examples:
            >>> import torch, kvpolicy
            >>> model, tokenizer = kvpolicy.tiny()
            >>> prompts = ["tiger=4821\n" * 12 + "?tiger=", "falcon=1937\n" * 30 + "?falcon="]
            >>> with torch.no_grad(), kvpolicy.attach(model, "snapkv@0.25") as handle:
            ...     rows = handle.rows(4, 512)
            ...     newest = torch.zeros(4, 1, dtype=torch.int64)  # free rows have a token too, which means nothing
            ...     for prompt in prompts:
            ...         cache = kvpolicy.PolicyCache(model)
            ...         logits = model(tokenizer(prompt, return_tensors="pt").input_ids, cache=cache).logits
            ...         row = rows.free_rows()[0]
            ...         rows.put(row, cache)
            ...         newest[row] = logits[0, -1].argmax()
            ...     answers = [newest]
            ...     for _ in range(3):
            ...         answers.append(model(answers[-1], cache=rows).logits[:, -1:].argmax(-1))
            ...     rows.drop(0)
            >>> tokenizer.batch_decode(torch.cat(answers, 1)[:2])
            ['4821', '1937']
            >>> rows.free_rows()
            [0, 2, 3]
        """
        cache = PolicyCache(self._model)
        open_rows(cache, count, length, new)
        forward_checks.check_rows(self._model, cache, self._names, self._learned)
        if self._deltas is not None:
            raise KVPolicyError(
                "Rows that come and go must be of a model that reads text alone, got "
                f"{type(self._model).__name__}, which counts positions behind pictures; try its text model."
            )
        return cache

    def detach(self) -> None:
        """Restore the model to its state before `attach`; a second call does nothing."""
        with _LOCK:
            while self._undo:
                self._undo.pop()()
            self._attachment.active = False
            if attachments.get(self._model) is self._attachment:
                del attachments[self._model]
                log_detached(self._model, self.policy)

    def __enter__(self) -> Handle:
        """Nothing more to do: attaching is done."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Detach."""
        self.detach()

    def __repr__(self) -> str:
        """One line: policy, model, and what the newest cache holds."""
        return notebook.handle_words(self, type(self._model).__name__, self._attachment.active)

    def _repr_html_(self) -> str:
        return notebook.handle_html(self, type(self._model).__name__, self._attachment.active)

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        """Refuse: a copied model has hooks that work for the original."""
        raise KVPolicyTypeError(
            f"A model must have no policy attached to be copied, got {shorten(str(self.policy))}; try detach(), then "
            "attach to both."
        )

    def __reduce__(self) -> NoReturn:
        """Refuse: hooks cannot be pickled."""
        raise KVPolicyTypeError(
            f"A model must have no policy attached to be pickled, got {shorten(str(self.policy))}; try save_pretrained "
            "or state_dict, or detach() first."
        )

    # connecting

    def _connect(self, sites: Sites, *, gathers: bool) -> None:
        # Pushed in this order, undone in reverse.
        self._undo.append(swap_implementation(self._model))
        self._undo.append(sites.decoder.register_forward_pre_hook(self._before, with_kwargs=True).remove)
        self._undo.append(sites.decoder.register_forward_hook(self._after).remove)
        owner = rope_owner(self._model, sites.decoder)
        self._deltas = None if owner is None else RopeDeltas(owner)
        if self._deltas is not None:
            self._undo.append(self._deltas.connect())
        self._learned = forward_checks.learned_positions(sites.decoder)
        self._makes_both = forward_calls.makes_both_caches(sites.decoder)
        self._names = list(inspect.signature(sites.decoder.forward).parameters)
        self._cache_name = cache_name(sites.decoder)
        for outer in around(self._model, sites.decoder):
            if cache_name(outer) == OLD:  # it would pass on no cache of the new name
                self._undo.append(outer.register_forward_pre_hook(_take_new_name, with_kwargs=True).remove)
        for site in sites.layers:
            self._undo.append(
                site.attention.register_forward_pre_hook(forward_calls.bind_cache, with_kwargs=True).remove
            )
            for known in (attached, gathered) if gathers else (attached,):
                known.add(site.attention)
                self._undo.append(partial(known.discard, site.attention))
            if is_falcon(site.attention):
                self._undo.append(replace_falcon_forward(site.attention))
            if site.layer_idx not in self._attachment.model_shape.evictable:  # has no budget and no codec
                continue
            if self.policy.layer_metric == "cosine":
                # Of the module that an attachment knows, a hook must not hold the model, as this handle does.
                self._undo += measure(site, partial(getattr, self._running, "cache"))
            if self.policy.at(site.layer_idx).codec.traits.pins == "massive":
                self._look(site)
        if self._attachment.tile == AUTO and tile_obstacle(sites.layers):
            self._attachment.tile = None
        if self._attachment.tile is not None:
            check_layers(sites.layers)
            self._undo += [take_tiles(site) for site in sites.layers]
            self._undo += [norm_in_tiles(norm, self._tile_size) for norm in last_norms(sites.decoder)]
            for outer in around(self._model, sites.decoder):
                self._undo.append(outer.register_forward_pre_hook(self._before_outer, with_kwargs=True).remove)
                self._undo.append(outer.register_forward_hook(_end_masks, always_call=True).remove)
            self._undo.append(sites.decoder.register_forward_hook(_end_masks, always_call=True).remove)
        self._undo += offer_cache(self._model, self._recent, self._deltas)

    def _tile_size(self) -> int | None:
        """The tile size of this thread's forward; None if its layers take all tokens at once, or none runs."""
        cache = self._running.cache
        return None if cache is None else cache.tile_size

    def _look(self, site: Site) -> None:
        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            cache = self._running.cache
            if cache is not None and cache.forward.wants_massive:
                cache.note_massive(site.layer_idx, active_stream(site, args[0] if args else kwargs["hidden_states"]))

        self._undo.append(site.block.register_forward_pre_hook(before, with_kwargs=True).remove)

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make sure that a forward has a cache under the policy."""
        if self._running.cache is not None:  # it was broken off, and is not this forward's to finish
            self._running.cache = None
        if torch.compiler.is_compiling():
            forward_calls.check_step(module, args, kwargs)
            return forward_calls.with_positions(args, kwargs)
        if len(args) > 1:
            args, kwargs = forward_checks.by_name(self._names, args, kwargs)
        rename_cache(kwargs, self._cache_name)
        given = kwargs.get(self._cache_name)
        if self._makes_both and isinstance(given, EncoderDecoderCache):
            given = given.self_attention_cache
        cache = given
        tokens: Any = kwargs.get("input_ids", args[0] if args else None)
        tokens = kwargs.get("inputs_embeds") if tokens is None else tokens
        defer_masks(False)
        if self._attachment.model_shape.owners and cuts(self._names) and tokens is not None and tokens.shape[1] > 1:
            policy = self.policy if not isinstance(given, PolicyCache) else given.policy
            may_cut = (
                forward_calls.caches(module, kwargs) and self._attachment.tile is None and not ranks_by_queries(policy)
            )
            read_whole(kwargs, tokens.shape[1], kwargs.get("attention_mask"), may_cut=may_cut)
        if tokens is None:
            return args, kwargs  # the model says so itself
        if isinstance(cache, PassingCache):  # it stores nothing, and its maker has checked what it passes
            self._choose_tile(cache, tokens)
            return args, kwargs
        if cache is None and forward_calls.caches(module, kwargs):
            cache = kwargs[self._cache_name] = PolicyCache(self._model)
        elif cache is not None and not isinstance(cache, PolicyCache):
            forward_calls.check_stock(cache)
            cache = kwargs[self._cache_name] = PolicyCache(self._model)
        if isinstance(cache, PolicyCache):
            if cache.attachment.active and cache.attachment is not self._attachment:
                raise KVPolicyError(
                    "The cache must belong to this model, got one that was made for another model; try "
                    "kvpolicy.PolicyCache(model)."
                )
            if cache.rows is not None:
                cache.rows.check_step(tokens, kwargs)
            mask = forward_checks.own_mask(module, kwargs.get("attention_mask"))
            forward_checks.check_call(self._model, cache, tokens, {**kwargs, "attention_mask": mask}, self._learned)
            limit = self._attachment.trained_positions
            if (
                limit is not None
                and forward_checks.exceeds(cache, limit, tokens.shape[1], kwargs)
                and self._attachment.first_warning("positions")
            ):
                warn_beyond_trained(self._model, limit)
            if tokens.shape[1] > 1:
                self._warn_of_chunks(cache, tokens, mask)
            cache.begin(tokens, mask, kwargs.get("position_ids"))
            answers = self._recent.note(cache)
            if self._deltas is not None:
                self._deltas.note(cache, tokens.shape[0], answers=answers)
            if tokens.shape[1] > 1:  # else layers take the token at once
                self._choose_tile(cache, tokens)
            self._running.cache = cache
            # Last, since a call that was refused has not used the stock cache, which may be passed again.
            if given is not None and given is not cache:
                forward_calls.note_replaced(given)
            return forward_calls.with_positions(args, kwargs)
        return args, kwargs

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
        is_chunk = cache.is_chunk(seen.cpu(), new, None if valid is None else valid.cpu())
        if is_chunk and self._attachment.first_warning("chunks"):
            warn_of_chunks(policy)

    def _before_outer(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Choose the tile size before the decoder runs: a model around it may make the masks (Gemma-3)."""
        if torch.compiler.is_compiling():
            return
        tokens: Any = kwargs.get("input_ids", args[0] if args else None)
        tokens = kwargs.get("inputs_embeds") if tokens is None else tokens
        size = self._attachment.tile_size(tokens) if isinstance(tokens, Tensor) else None
        self._running.chosen = (tokens.shape[:2], size) if isinstance(tokens, Tensor) else None
        defer_masks(size is not None)

    def _choose_tile(self, cache: PolicyCache | PassingCache, tokens: Tensor) -> None:
        """Set how many tokens layers take at a time in the forward of `tokens` [B, P(, hidden)] that begins."""
        cache.tile = cache.tile_size = None
        chosen, self._running.chosen = self._running.chosen, None
        if not isinstance(cache, PassingCache) or cache.takes_tiles:
            # The free memory may have changed since, and the masks are made already: one choice for both.
            if chosen is not None and chosen[0] == tokens.shape[:2]:
                cache.tile_size = chosen[1]
            else:
                cache.tile_size = self._attachment.tile_size(tokens)
            if self._attachment.tile == AUTO:
                log_tile(tokens.shape[1], cache.tile_size)
        defer_masks(cache.tile_size is not None)

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        """Do what had to wait for every layer; in a compiled step nothing runs, and nothing waits."""
        cache = self._running.cache
        if cache is not None:
            # Before `finish`, which may replay a prompt through the same decoder, and so through these hooks.
            self._running.cache = None
            forward = cache.forward
            cache.finish(module)
            if forward.tokens is not None:  # a budget was divided, and a prompt compressed
                log_compressed(cache)


@named_arguments
def attach(
    model: nn.Module,
    policy: Policy | str,
    *,
    budget: Budget | None = None,
    tile: TileSize = None,
    chunks: Chunks = SELECT,
    hold: Hold = PLAIN,
    compile: bool | None = None,
) -> Handle:
    """Attach a policy to a model, so that every KV cache that the model makes is under the policy.

    Every forward pass with caching enabled goes through the policy: `generate`, a loop of your own, chunks, a second
    turn. Nothing is copied or patched in transformers; `detach`, or leaving the `with` block, restores the model.

    Args:
        model: A decoder-only causal language model of transformers, not compiled yet.
        policy: A policy or its spec.
        budget: The budget, instead of that of the policy.
        tile: The most tokens of a prompt that a layer takes at a time, at least 1. A layer takes all of them before the
            next one begins, and is compressed then, so that it keeps the same tokens as without tiles, up to rounding,
            while the tensors of a forward are those of one tile and two hidden states of the prompt. `"auto"` chooses
            by the free memory of the device where it can say it, as a GPU can, and None takes a prompt at once.
        chunks: Treatment of a prompt that comes in several forwards, as with `prefill_chunk_size` of `generate`.
            `"select"` compresses each chunk, so that a selector that looks at the last queries looks at those of each
            chunk; `"hold"` keeps all of a prompt whose length is announced until its last chunk, and selects then. It
            takes the memory of the whole prompt in all layers, which `tile` does not.
        hold: How a prompt is held in all layers while it waits: for its last chunk under `chunks="hold"`, for its
            replay under `kvzip`, or for the budgets of `squeeze`. `"plain"` as its keys and values, `"codes"` in the
            codes of the codec, which takes less memory. What it attends to meanwhile is decoded, and what is kept is
            encoded again, so that other tokens may be kept. The codec must encode every token by itself, as `tokenwise`
            does.
        compile: Whether `generate` compiles its decode steps. `None` does so where transformers compiles those on a
            static cache, on a GPU; `True` on a CPU too; `False` nowhere. What cannot be compiled runs as it is, and
            `True` warns of it once. The first step of the first answer waits for the compilation.

    Returns:
        The handle: `.cache`, `.plan`, `.report()`, `.detach()`.

    Raises:
        KVPolicyError: If the model or its state is not supported; the message says why and what to do.
        KVPolicyTypeError: If `model` is not a model, or `policy` is not a policy.

    Examples:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(num_hidden_layers=2, hidden_size=32, num_attention_heads=2, vocab_size=9)
        >>> model = LlamaForCausalLM(config).eval()
        >>> with torch.no_grad(), attach(model, "streaming:sinks=1@0.5") as handle:
        ...     _ = model(torch.arange(8)[None])
        ...     print(handle.cache.layers[0].positions[0, 0].tolist())
        [0, 5, 6, 7]
    """
    policy = Policy.of(policy)
    if budget is not None:
        policy = policy.with_budget(budget)
    check_version()
    with _LOCK:  # of two threads that attach at the same moment, the second one finds the first one's policy
        _check_fresh(model)
        check_caching(model)
        return Handle(model, policy, check_tile(tile), check_chunks(chunks), check_hold(hold), check_compile(compile))


def _take_new_name(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """Let a module with the old name of the cache take it under the new one too."""
    rename_cache(kwargs, OLD)
    return args, kwargs


def _end_masks(module: nn.Module, args: Any, output: Any) -> None:
    """Let the next forward of this thread make its masks at once; also after an error."""
    if not torch.compiler.is_compiling():
        defer_masks(False)


def _rotations(sites: Sites, evictable: list[int], part: str) -> dict[int, Rope]:
    """The rotary embedding of evictable layers; none if one cannot be undone, unless a `part` of the policy does so."""
    try:
        return ropes_of(sites.decoder, [site for site in sites.layers if site.layer_idx in evictable], part)
    except KVPolicyError:
        if part:
            raise
        return {}


def _check_fresh(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise KVPolicyTypeError(
            f"The model must be a torch.nn.Module, got {shorten(repr(model))}; try a model of from_pretrained."
        )
    if model in attachments or any((c._attn_implementation or "").startswith(PREFIX) for c in configs_of(model)):
        raise KVPolicyError(
            "The model must have no policy yet, got one that is already attached to it or to a model around it; try "
            "detach() of its handle first."
        )
    if isinstance(model, OptimizedModule) or any(map(forward_calls.is_compiled, model.modules())):
        raise KVPolicyError(
            f"The model must not be compiled before attaching, got {type(model).__name__} with compiled modules, which "
            "ignore new hooks; try to attach to the model as it was loaded, then torch.compile."
        )
    if not hasattr(model, "config"):
        raise KVPolicyError(
            f"The model must be a causal language model of transformers, got {type(model).__name__}, which has no "
            "config; try AutoModelForCausalLM.from_pretrained."
        )
