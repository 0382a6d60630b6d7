"""The plan of a cache: from a config alone, before anything runs, or from a budget that was divided for a known prompt.

Nothing here needs transformers, but for configs that are given by name.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kvpolicy.hf.attachment import (
    CODES,
    HOLD,
    PLAIN,
    SELECT,
    Chunks,
    Hold,
    check_chunks,
    check_held_codes,
    check_hold,
    check_projections,
    check_replayed_ids,
)
from kvpolicy.hf.discovery import check_modules, find_sites, lacks_weights, sample_weights, vocabulary_of
from kvpolicy.hf.division import division_of
from kvpolicy.hf.embedded import as_config
from kvpolicy.hf.model_spec import ModelShape, check_supported, describe, resolve_for
from kvpolicy.hf.rotary_lookup import trained_positions
from kvpolicy.hf.weights import weights_per_rank
from kvpolicy.planning import memory
from kvpolicy.planning.notes import beyond_trained_length, plan_notes
from kvpolicy.planning.planner import divide, trimmed_bytes
from kvpolicy.planning.result import SHARED, CachePlan
from kvpolicy.planning.tokens import Tokens, expect_tokens
from kvpolicy.policy import Policy
from kvpolicy.protocols import LayerShape
from kvpolicy.text.arguments import named_arguments
from kvpolicy.text.errors import KVPolicyError
from kvpolicy.text.validation import check_size, each_row


class Prefilling(NamedTuple):
    """How a prompt is prefilled.

    Attributes:
        columns: Tokens of the longest prompt, padding of other rows included.
        chunk: Tokens that are prefilled at a time; None for all.
        tile: Tokens that a layer takes at a time; None for all.
        holds: Whether chunks are held until the last one.
        coded: Whether a prompt that waits is held in codes.
    """

    columns: int
    chunk: int | None = None
    tile: int | None = None
    holds: bool = False
    coded: bool = False


def build_plan(
    policy: Policy,
    model: ModelShape,
    shape: LayerShape,
    tokens: Tokens,
    prompt: Tensor,
    prefilling: Prefilling,
    *,
    full_tokens: int,
    unmanaged: dict[int, int],
    measured: bool,
    held: slice,
) -> CachePlan:
    """The plan of a cache.

    Args:
        policy: The policy.
        model: The model's cache.
        shape: The shape of a layer on this rank.
        tokens: The divided budget.
        prompt: Tokens of each row's prompt, [B].
        prefilling: How the prompt is prefilled.
        full_tokens: Tokens that all rows together would hold without a policy.
        unmanaged: Bytes of each layer that is not under the policy.
        measured: Whether the allocator has measured its layer metric, or has none.
        held: KV heads of this rank.
    """
    # What every layer holds in the end.
    batch = len(prompt)
    indices = model.evictable
    layers = memory.plan_layers(policy, tokens, [shape] * len(indices), indices, batch)
    sizes = [layer.device_nbytes for layer in layers]
    columns, chunk, tile, holds, coded = prefilling
    alone = sum(unmanaged.values())
    prefilled = model.unmanaged_prefill_bytes(batch, columns, min(chunk or columns, tile or columns))

    # What a layer holds meanwhile: its prompt in codes, or as it is until its budget is known.
    def held_codes(count: int) -> int:
        return sum(memory.held_codes_bytes(policy.at(index), batch, shape, count) for index in indices)

    def waiting(count: int) -> list[int]:
        return memory.waiting_bytes(policy, layers, batch * shape.token_nbytes, count)

    in_codes = held_codes if coded else None
    # Prompts that wait while layers are measured are trimmed to what may be kept, as `budgets.trim_waiting` does.
    first = min(chunk or columns, columns)
    measures = bool(policy.layer_metric) and not coded
    trimmed = trimmed_bytes(policy, shape, tokens, prompt, first, len(indices)) if measures else None
    return CachePlan(
        policy=policy,
        batch=batch,
        layers=layers,
        unmanaged=unmanaged,
        full_nbytes=full_tokens * shape.token_nbytes * len(indices) + alone,
        measured=measured,
        note=plan_notes(policy, layers, tokens.keep, prompt, measured=measured, coded=coded),
        resident_nbytes=memory.planned_resident(policy, tuple(indices), held),
        peak_nbytes=memory.prefill_peak(
            policy,
            batch,
            shape,
            sizes,
            columns,
            prefilled,
            chunk,
            holds,
            held=in_codes,
            trimmed=trimmed,
            waiting=waiting,
            given=model.given,
        ),
        prefill=model.prefill(policy, layers, columns, chunk, tile, holds=holds),
        full_peak_nbytes=batch * columns * shape.token_nbytes * len(indices) + prefilled,
    )


def check_own(own: Policy) -> None:
    """Refuse a policy that cannot be that of tokens behind a shared prefix.

    Raises:
        KVPolicyError: Naming the part.
    """
    part = next(filter(None, map(_obstacle, own.distinct)), "") if not own.differs_by_layer else "a policy by layer"
    if part:
        raise KVPolicyError(
            f"own must be a policy that selects tokens by position only, in the same way in every layer, got {part}; "
            "try 'full', 'full+kivi' or 'window@256'."
        )


def _obstacle(own: Policy) -> str:
    spec = memory.layer_spec(own, 0)
    if own.layer_metric or own.heads is not None or spec.allocator_statistics:
        return f"the allocator {own.allocator}"
    if spec.statistics:
        return f"the selector {own.selector}"
    if spec.merger_traits.when != "never":
        return f"the merger {own.merger}"
    return f"the reader {own.reader}" if own.reads_part else ""


def check_readable(policy: Policy) -> None:
    """Refuse a policy whose slots several rows cannot read together.

    Raises:
        KVPolicyError: If a part chooses which slots a step reads, or layers store tokens together.
    """
    if policy.layer_groups:
        raise KVPolicyError(
            "Every layer must store its tokens by itself for its slots to be shared, got a codec that stores those of "
            f"several layers together, {policy.codec!r}; try another codec, or shared=False."
        )
    readers = [own.reader for own in policy.distinct if own.reads_part]
    choosers = [*readers, *(own.codec for own in policy.distinct if own.codec.traits.search is not None)]
    if choosers:
        raise KVPolicyError(
            "Every slot must be read in a step for slots to be shared, since a choice depends on the queries of one "
            f"row, got {choosers[0]!r}; try a policy that reads everything, or shared=False."
        )


def beside(plan: CachePlan, shared: list[int], moved: list[int], full: int, length: int) -> CachePlan:
    """A plan of what rows add, beside a prefix that they share.

    Args:
        plan: The plan of what they add.
        shared: Bytes of the prefix in each layer under the policy.
        moved: Bytes of it that a decode step reads.
        full: Bytes of its tokens in the stock cache, of all rows.
        length: Its tokens.
    """
    note = f"{length:,} tokens of a shared prefix are held once for all rows"
    return replace(
        plan,
        layers=tuple(
            replace(own, nbytes=own.nbytes | {SHARED: held}, moved=own.moved + read)
            for own, held, read in zip(plan.layers, shared, moved, strict=True)
        ),
        full_nbytes=plan.full_nbytes + full,
        peak_nbytes=plan.peak_nbytes + sum(shared),
        full_peak_nbytes=plan.full_peak_nbytes + full,
        note="; ".join(filter(None, (plan.note, note))),
    )


def planned_behind(plan: CachePlan, text: CachePlan) -> CachePlan:
    """A plan of what rows add behind a text, whose plan is that of one row."""
    shared = [sum(layer.nbytes.values()) for layer in text.layers]
    shared[0] -= memory.DIGEST_NBYTES  # of the mask, of which each row has its own
    length = text_length(text)
    assert text.prefill is not None
    full = plan.batch * length * text.prefill.shape.token_nbytes * len(shared)
    return beside(plan, shared, [layer.moved for layer in text.layers], full, length)


def text_length(text: CachePlan | None) -> int:
    """The tokens that the plan of a text is of; 0 without one."""
    return 0 if text is None or text.prefill is None else text.prefill.columns


def check_text(text: CachePlan, own: Policy, layers: int) -> None:
    """Refuse the plan of a text whose slots rows cannot share.

    Raises:
        KVPolicyError: If it is not of one row of the same model, or a part of either policy does not allow it.
    """
    if not isinstance(text, CachePlan) or text.batch != 1 or len(text.layers) != layers:  # pyright: ignore[reportUnnecessaryIsInstance]
        got = f"{text.batch} row(s) and {len(text.layers)} layers" if isinstance(text, CachePlan) else repr(text)  # pyright: ignore
        raise KVPolicyError(
            f"prefix must be the plan of one row of the same model, with {layers} layers under the policy, got {got}; "
            "try kvpolicy.plan(config, policy, prompt=4096)."
        )
    check_readable(text.policy)
    check_own(own)


def _check_model(config: Any, module: nn.Module | None) -> None:
    """Refuse a model that no policy could be attached to.

    Raises:
        KVPolicyError: Naming what is not supported.
    """
    check_supported(config)
    if module is None:
        check_modules(config)
    else:
        find_sites(module)


def _fingerprint(module: nn.Module) -> Tensor | None:
    """The weight fingerprint of a loaded model, by which files know the model that they were made for."""
    division = division_of(module)
    return sample_weights(find_sites(module).layers[0]) if division.size == 1 else division.weights


def _check_loaded(policy: Policy, module: nn.Module) -> None:
    """Refuse a policy for what the modules of a loaded model do not have.

    Raises:
        KVPolicyError: Naming it.
    """
    from kvpolicy.hf.latent import latent_projection
    from kvpolicy.hf.projection import Reading, output_projection

    check_replayed_ids(policy, vocabulary_of(module))
    if not lacks_weights(module):
        behind = latent_projection if describe(module.config).shape.latent else output_projection
        check_projections(
            policy, {each.layer_idx: Reading(behind, each.attention) for each in find_sites(module).layers}
        )


def _check_held_next(held_next: int, policy: Policy) -> None:
    """Refuse tokens beyond the budget where the text decides how many pages each head has.

    Raises:
        KVPolicyError: If there are some.
    """
    if held_next and policy.heads is not None:
        raise KVPolicyError(
            f"held_next must be 0 for a policy with budgets by head, whose pages depend on the text, got {held_next}; "
            "try the plan of a cache after its question."
        )


def _divided(
    policy: Policy, model: ModelShape, prompt_len: Tensor, new: int, held_next: int, before: int
) -> tuple[Tokens, dict[int, int]]:
    """Divide the budget of a plan among the layers.

    Args:
        policy: The policy.
        model: The model's cache.
        prompt_len: Tokens of each row's prompt, [B] int64.
        new: Tokens to be generated.
        held_next: Tokens behind the prompt that are added whole.
        before: Tokens of a shared text before every row.

    Returns:
        The tokens of each layer, and the bytes of the layers that the policy does not manage.
    """
    batch = len(prompt_len)
    columns = before + int(prompt_len.max()) + new
    unmanaged = model.unmanaged_bytes(batch, columns)
    shapes = [model.shape] * len(model.evictable)
    # Without a prompt nothing is measured: equal metrics let such an allocator divide evenly.
    metrics = torch.ones(batch, len(shapes), dtype=torch.float32, device="cpu") if policy.layer_metric else None
    tokens = divide(
        policy, metrics, prompt_len, prompt_len + new, shapes, sum(unmanaged.values()), model.evictable, model.whole
    )
    if held_next:
        behind = prompt_len + held_next
        unmanaged = model.unmanaged_bytes(batch, columns + held_next)
        tokens = expect_tokens(policy, tokens.keep + held_next, behind, behind + new)
    return tokens, unmanaged


@named_arguments
def plan(
    config: Any,
    policy: Policy | str,
    *,
    batch: int = 1,
    prompt: int | list[int] = 4096,
    new: int = 0,
    dtype: torch.dtype | None = None,
    tp: int = 1,
    backend: str | None = None,
    chunk: int | None = None,
    tile: int | None = None,
    chunks: Chunks = SELECT,
    hold: Hold = PLAIN,
    held_next: int = 0,
    prefix: CachePlan | None = None,
) -> CachePlan:
    """Plan a policy's cache from a config alone, without weights.

    Args:
        config: A transformers config, a model, or a name that `config_of` finds. Files that a policy names are
            compared with the weights of a model.
        policy: A policy or its spec string.
        batch: Number of rows.
        prompt: Tokens of each row's prompt, one number or one per row.
        new: Tokens to be generated.
        dtype: Dtype of keys and values; by default that of a model's weights, or the config's own.
        tp: The tensor parallel size; the plan is of the rank that holds the most.
        backend: Backend that shards the weights, `deepspeed` or `hf`; the plan then counts them too.
        chunk: Tokens of a prompt that are prefilled at a time, as `prefill_chunk_size` of `generate`; all by default.
        tile: Tokens of a prompt that a layer takes at a time, as `tile` of `attach`; all by default.
        chunks: Treatment of a chunk, as `chunks` of `attach`: it is compressed, or held until the last one.
        hold: How a prompt is held that waits, as `hold` of `attach`: as keys and values, or in the codec's codes.
        held_next: Tokens behind the prompt that are added whole, beyond the budget: see `PolicyCache.hold_next`.
        prefix: The plan of a text of one row, whose slots all rows share: `policy` and `prompt` are then those of what
            rows add behind it, as `own` of `PolicyCache.fork(shared=True)`.

    Returns:
        The plan: `.nbytes` is what the cache will hold, `.weights` what the model holds besides, `.prefill_nbytes` what
        is in use at most while the prompt is prefilled.

    Raises:
        KVPolicyError: If the budget is too small, a size is out of range, or the model is not supported.
        KVPolicyTypeError: If a size is not an integer, or the config or the policy is of a wrong type.

    Examples:
        >>> from transformers import LlamaConfig
        >>> sizes = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 1000}
        >>> config = LlamaConfig(num_hidden_layers=2, num_key_value_heads=2, num_attention_heads=4, **sizes)
        >>> small = plan(config, "window@0.25", prompt=1000, dtype=torch.float32)
        >>> small.layers[0].tokens, small.nbytes, small.full_nbytes
        (250, 132056, 512000)
        >>> on_two = plan(config, "window@0.25", prompt=1000, tp=2, backend="hf", dtype=torch.float32)
        >>> on_two.nbytes, on_two.weights.nbytes, on_two.prefill_nbytes
        (66056, 404736, 2637768)
        >>> on_two.largest_batch(2**30), on_two.full_largest_batch(2**30)
        (480, 461)
    """
    policy = Policy.of(policy)
    module = config if isinstance(config, nn.Module) else None
    if dtype is None and module is not None:
        dtype = getattr(module, "dtype", None)  # as `attach` does: of the weights, which `to` may have converted
    config = as_config(config)
    batch = check_size("batch", batch, 1)
    new = check_size("new", new, 0)
    held_next = check_size("held_next", held_next, 0)
    tp = check_size("tp", tp, 1)
    chunk = None if chunk is None else check_size("chunk", chunk, 1)
    tile = None if tile is None else check_size("tile", tile, 1)
    holds = check_chunks(chunks) == HOLD
    lengths = each_row(prompt, batch)
    _check_model(config, module)
    model = describe(config, dtype, tp, follows_plan=backend == "hf")
    # Calibrations are of all heads.
    info = describe(config, dtype).info(None if module is None else _fingerprint(module))
    policy = resolve_for(policy, model, info)
    policy.check(info)
    if module is not None:
        _check_loaded(policy, module)
    _check_held_next(held_next, policy)
    check_held_codes(check_hold(hold), policy, model.shape)
    if prefix is not None:
        check_text(prefix, policy, len(model.evictable))
    prompt_len = torch.tensor(lengths, dtype=torch.int64, device="cpu")
    before = text_length(prefix)
    tokens, unmanaged = _divided(policy, model, prompt_len, new, held_next, before)
    prefilling = Prefilling(max(lengths), chunk, tile, holds, hold == CODES)
    planned = build_plan(
        policy,
        model,
        model.shape,
        tokens,
        prompt_len + held_next,
        prefilling,
        full_tokens=sum(lengths) + batch * (held_next + new),
        unmanaged=unmanaged,
        measured=not policy.layer_metric,
        held=slice(0, model.shape.heads),
    )
    if prefix is not None:
        planned = planned_behind(planned, prefix)
    beyond = beyond_trained_length(prompt_len + held_next + before, new, trained_positions(config))
    return replace(
        planned,
        note="; ".join(filter(None, (planned.note, beyond))),
        tp=tp,
        weights=None if backend is None else weights_per_rank(config, tp=tp, backend=backend, dtype=model.shape.dtype),
    )
