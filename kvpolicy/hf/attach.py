"""Connect a policy to a model, and disconnect it without a trace."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any, NoReturn

from torch import nn
from torch._dynamo import OptimizedModule

from kvpolicy.hf import forward_calls, forward_checks
from kvpolicy.hf.attachment import (
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
    not_copied,
    not_pickled,
)
from kvpolicy.hf.attention_interface import PREFIX, attached, configs_of, replace_falcon_forward, swap_implementation
from kvpolicy.hf.cache import PolicyCache
from kvpolicy.hf.cache_names import OLD, cache_name, check_cache_name, check_version
from kvpolicy.hf.discovery import Sites, around, find_sites, is_falcon, rope_owner, sample_weights, vocabulary_of
from kvpolicy.hf.division import Division, division_of
from kvpolicy.hf.editing import move_obstacle
from kvpolicy.hf.forward_hooks import ForwardHooks, end_masks, take_new_name
from kvpolicy.hf.generation_hooks import RecentCache, offer_cache
from kvpolicy.hf.identity import identity
from kvpolicy.hf.joining_rows import open_rows
from kvpolicy.hf.latent import latent_projection
from kvpolicy.hf.model_spec import check_supported, describe, resolve_for
from kvpolicy.hf.projection import Reading, gathered, output_projection
from kvpolicy.hf.residual_hooks import find_massive, measure
from kvpolicy.hf.rope_deltas import RopeDeltas
from kvpolicy.hf.rotary_lookup import ropes_of, trained_positions
from kvpolicy.hf.shared_keys import joint_projections
from kvpolicy.hf.tile_size import AUTO, TileSize, check_tile
from kvpolicy.hf.tiles import check_layers, last_norms, norm_in_tiles, take_tiles, tile_obstacle
from kvpolicy.kernels.rotary import Rope
from kvpolicy.planning.result import CachePlan
from kvpolicy.policy import Policy
from kvpolicy.reporting import report as notebook
from kvpolicy.reporting.logging import (
    check_caching,
    log_attached,
    log_detached,
    warn_of_states,
)
from kvpolicy.reporting.report import Report
from kvpolicy.statistics.statistic import Projection
from kvpolicy.text.arguments import named_arguments
from kvpolicy.text.budget import Budget
from kvpolicy.text.errors import KVPolicyError, KVPolicyTypeError
from kvpolicy.text.tables import shorten

_LOCK = threading.RLock()
"""Held while a policy is attached or detached: both change configs and modules that threads share."""


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
        forward_checks.check_adapters(model)
        check_supported(model.config)
        sites = find_sites(model)
        check_cache_name(sites.decoder)
        division = division_of(model)
        # Before `_connect`, because `detach` needs it if connecting fails.
        self._attachment = _described(
            model, policy, sites, division, tile=tile, chunks=chunks, hold=hold, compile=compile
        )
        self.policy = self._attachment.policy
        shape = self._attachment.model_shape
        try:
            self._connect(sites, gathers=division.gathers)
            attachments[model] = self._attachment
            if shape.states:
                warn_of_states(model, model.config.get_text_config(decoder=True).model_type)  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]
            log_attached(model, self.policy, shape)
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
        self._hooks.check_rows(cache)
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
        raise not_copied(self.policy)

    def __reduce__(self) -> NoReturn:
        """Refuse: hooks cannot be pickled."""
        raise not_pickled(self.policy)

    # connecting

    def _connect(self, sites: Sites, *, gathers: bool) -> None:
        decoder = sites.decoder
        owner = rope_owner(self._model, decoder)
        deltas = None if owner is None else RopeDeltas(owner)
        hooks = ForwardHooks(self._model, decoder, self._attachment, self._recent, deltas)
        self._hooks = hooks
        # Pushed in this order, undone in reverse.
        self._undo.append(swap_implementation(self._model))
        self._undo.append(decoder.register_forward_pre_hook(hooks.before, with_kwargs=True).remove)
        self._undo.append(decoder.register_forward_hook(hooks.after).remove)
        if deltas is not None:
            self._undo.append(deltas.connect())
        outer_models = around(self._model, decoder)
        # A model of several parts may make masks for each kind of layer; the innermost one is called in every way.
        parted = [outer for outer in outer_models if getattr(outer, "config", decoder.config) is not decoder.config]
        if parted and forward_checks.takes_masks_by_kind(decoder):
            self._undo.append(parted[-1].register_forward_pre_hook(hooks.check_mask, with_kwargs=True).remove)
        for outer in outer_models:
            if cache_name(outer) == OLD:  # it would pass on no cache of the new name
                self._undo.append(outer.register_forward_pre_hook(take_new_name, with_kwargs=True).remove)
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
                self._undo += measure(site, partial(getattr, hooks.running, "cache"))
            if self.policy.at(site.layer_idx).codec.traits.pins == "massive":
                self._undo.append(find_massive(site, partial(getattr, hooks.running, "cache")))
        if self._attachment.tile == AUTO and tile_obstacle(sites.layers):
            self._attachment.tile = None
        if self._attachment.tile is not None:
            check_layers(sites.layers)
            self._undo += [take_tiles(site) for site in sites.layers]
            self._undo += [norm_in_tiles(norm, hooks.tile_size) for norm in last_norms(decoder)]
            for outer in outer_models:
                self._undo.append(outer.register_forward_pre_hook(hooks.before_outer, with_kwargs=True).remove)
                self._undo.append(outer.register_forward_hook(end_masks, always_call=True).remove)
            self._undo.append(decoder.register_forward_hook(end_masks, always_call=True).remove)
        self._undo += offer_cache(self._model, self._recent, deltas)


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


def _described(
    model: nn.Module,
    policy: Policy,
    sites: Sites,
    division: Division,
    *,
    tile: TileSize,
    chunks: Chunks,
    hold: Hold,
    compile: bool | None,
) -> Attachment:
    """The attachment of a policy to a model, which knows what caches must know of it; nothing is connected."""
    dtype: Any = getattr(model, "dtype", None)
    shape = describe(model.config, dtype, division.size, follows_plan=division.follows_plan)
    # Calibrations were made with the whole model, so the weights of a shard identify nothing.
    info = shape.info(sample_weights(sites.layers[0]) if division.size == 1 else division.weights)
    policy = resolve_for(policy, shape, info)
    policy.check(info)
    check_held_codes(hold, policy, shape.shape)
    rotations = {} if shape.shape.latent else _rotations(sites, shape.evictable, policy.undoes_rotation)
    rotary = getattr(sites.decoder, "rotary_emb", None)
    described = identity(model, info=info)
    behind = latent_projection if shape.shape.latent else output_projection
    projections: dict[int, Projection] = {site.layer_idx: Reading(behind, site.attention) for site in sites.layers}
    check_projections(policy, projections)
    projections |= joint_projections(projections, shape.owners, shape.shape.heads)
    vocabulary = vocabulary_of(model)
    check_replayed_ids(policy, vocabulary)
    return Attachment(
        policy=policy,
        model_shape=shape,
        info=info,
        identity=described,
        rotations=rotations,
        sharing=division.sharing,
        rotary=rotary,
        trained_positions=None if rotary is None else trained_positions(model.config),
        projections=projections,
        tile=tile,
        chunks=chunks,
        hold=hold,
        compile=compile,
        vocabulary=vocabulary,
        # Measured when first asked.
        move_obstacle=functools.cache(partial(move_obstacle, weakref.ref(model), rotations)),
    )


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
            f"The model must be a torch.nn.Module, got {shorten(repr(model))}; try "
            f"{_model_inside(model) or 'a model of from_pretrained'}."
        )
    if model in attachments or any((c._attn_implementation or "").startswith(PREFIX) for c in configs_of(model)):
        raise KVPolicyError(
            "The model must have no policy yet, got one that is already attached to it or to a model around it; try "
            "detach() of its handle first."
        )
    if any((c._attn_implementation or "").startswith("paged|") for c in configs_of(model)):
        raise KVPolicyError(
            "The model must not be in use by continuous batching, whose attention it has now; try to stop its manager "
            "first, which sets the attention back."
        )
    if isinstance(model, OptimizedModule) or any(map(forward_calls.is_compiled, model.modules())):
        raise KVPolicyError(
            f"The model must not be compiled before attaching, got {type(model).__name__} with compiled modules, which "
            "ignore new hooks; try to attach to the model as it was loaded, then torch.compile."
        )
    if not hasattr(model, "config"):
        raise KVPolicyError(
            f"The model must be a causal language model of transformers, got {type(model).__name__}, which has no "
            f"config; try {_model_inside(model) or 'AutoModelForCausalLM.from_pretrained'}."
        )


def _model_inside(wrapper: object) -> str | None:
    """How to reach the model in a pipeline, or in a module around it; None if there is none."""
    for name in ("model", "module"):
        found = getattr(wrapper, name, None)
        if isinstance(found, nn.Module) and hasattr(found, "config"):
            return f"its attribute {name!r}, which is a {type(found).__name__}"
    return None
