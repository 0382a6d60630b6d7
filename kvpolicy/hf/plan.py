"""The plan of a cache from a config alone, before anything runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from kvpolicy.hf.attachment import CODES, HOLD, PLAIN, SELECT, Chunks, Hold, check_chunks, check_held_codes, check_hold
from kvpolicy.hf.build_plan import Prefilling, build_plan
from kvpolicy.hf.config_checks import check_modules
from kvpolicy.hf.discovery import find_sites
from kvpolicy.hf.embedded import as_config
from kvpolicy.hf.model_spec import check_supported, describe, resolve_for
from kvpolicy.hf.rotary_lookup import trained_positions
from kvpolicy.hf.shared_plan import check_text, planned_behind, text_length
from kvpolicy.hf.weights import weights_per_rank
from kvpolicy.planning.notes import beyond_trained_length
from kvpolicy.planning.planner import divide
from kvpolicy.planning.result import CachePlan
from kvpolicy.planning.tokens import expect_tokens
from kvpolicy.policy import Policy
from kvpolicy.text.arguments import named_arguments
from kvpolicy.text.errors import KVPolicyError
from kvpolicy.text.validation import check_size, each_row


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
        config: A transformers config, a model, or a name that `config_of` finds.
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
    check_supported(config)
    if module is None:
        check_modules(config)
    else:
        find_sites(module)
    model = describe(config, dtype, tp)
    info = describe(config, dtype).info()  # calibrations are of all heads
    policy = resolve_for(policy, model, info)
    policy.check(info)
    if held_next and policy.heads is not None:
        raise KVPolicyError(
            f"held_next must be 0 for a policy with budgets by head, whose pages depend on the text, got {held_next}; "
            "try the plan of a cache after its question."
        )
    check_held_codes(check_hold(hold), policy, model.shape)
    if prefix is not None:
        check_text(prefix, policy, len(model.evictable))
    before = text_length(prefix)
    prompt_len = torch.tensor(lengths, dtype=torch.int64, device="cpu")
    shapes = [model.shape] * len(model.evictable)
    unmanaged = model.unmanaged_bytes(batch, before + max(lengths) + new)
    # Without a prompt nothing is measured: equal metrics let such an allocator divide evenly.
    measures = bool(policy.layer_metric)
    metrics = torch.ones(batch, len(shapes), dtype=torch.float32, device="cpu") if measures else None
    tokens = divide(
        policy, metrics, prompt_len, prompt_len + new, shapes, sum(unmanaged.values()), model.evictable, model.whole
    )
    if held_next:
        behind = prompt_len + held_next
        unmanaged = model.unmanaged_bytes(batch, before + max(lengths) + held_next + new)
        tokens = expect_tokens(policy, tokens.keep + held_next, behind, behind + new)
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
        measured=not measures,
        held=slice(0, model.shape.heads),
    )
    if prefix is not None:
        planned = planned_behind(planned, prefix)
    beyond = beyond_trained_length(prompt_len + held_next + before, new, trained_positions(config))
    return replace(
        planned,
        note="; ".join(filter(None, (planned.note, beyond))),
        tp=tp,
        weights=weights_per_rank(config, tp=tp, backend=backend, dtype=model.shape.dtype) if backend else None,
    )
