"""The functions that transformers calls for a model under a policy: one for attention, one for masks.

Each has a name such as `kvpolicy_sdpa`: the part after `kvpolicy_` is what layers without slots go on using. The name
is put into the configs of one model alone. Falcon's attention calls no such function, so that it is replaced.
"""

from __future__ import annotations

import copy
import inspect
import sys
import weakref
from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    blockwise_overlay,
    causal_mask_function,
    or_masks,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb

from kvpolicy.engine.attention import attend
from kvpolicy.engine.host import outside_autocast
from kvpolicy.hf.cache_forward import CacheForward
from kvpolicy.hf.discovery import home
from kvpolicy.hf.latent_attention import LatentAttention
from kvpolicy.hf.layer import PolicyLayer
from kvpolicy.hf.masks import DeferredMask, are_deferred, hides_padding, is_token, under_mask
from kvpolicy.hf.passing_cache import PassingCache
from kvpolicy.statistics import Forward
from kvpolicy.statistics.windows import ScoreTransform
from kvpolicy.text.errors import KVPolicyError

PREFIX = "kvpolicy_"
REFUSED = ("position_bias", "cache", "sinks")
"""Arguments of stock attention functions that change their result in ways the engine does not know."""

KNOWN = frozenset(
    {
        "position_ids",
        "cache_position",
        "cu_seq_lens_q",
        "cu_seq_lens_k",
        "max_length_q",
        "max_length_k",
        "seq_idx",
        "num_items_in_batch",
        "labels",
        "logits_to_keep",
        "token_type_ids",
        "mm_token_type_ids",
        "s_aux",
        "sliding_window",
        "is_causal",
        "dropout",
        "deterministic",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "use_cache",
        "return_dict",
    }
)
"""Arguments that stock attention ignores where a mask says the same, or that are taken into account here."""

attached: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""The attention modules of models with a policy."""


def register(stock: str | None, other: str = "sdpa") -> str:
    """Register the functions beside a stock implementation, or another that stands in for it, and return their name."""
    stock = stock if stock in ("sdpa", "eager") else other
    name = PREFIX + stock
    AttentionInterface.register(name, partial(attention_forward, stock))
    AttentionMaskInterface.register(name, partial(policy_mask, stock))
    return name


def attention_forward(
    stock: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    policy_cache: CacheForward | PassingCache | LatentAttention | None = None,
    policy_call: Forward | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend through a layer's slots, or as the stock function does for a layer without.

    Args:
        stock: Name of the stock implementation.
        module: The attention module.
        query: [B, Hq, P, D].
        key: [B, H, P, D].
        value: [B, H, P, D].
        attention_mask: Which of the P tokens are not padding, [B, P] bool; a stock mask for a layer without slots.
        dropout: Probability of attention dropout.
        scaling: Factor of the scores.
        softcap: Cap of the scores, or None.
        policy_cache: The `PolicyCache` that holds the layer's slots, or what attends in its place; else None.
        policy_call: The module's arguments, if the selector needs them.
        **kwargs: Arguments that the stock function takes.

    Returns:
        The output, [B, P, Hq, D], and None; only the stock eager function makes an attention matrix.
    """
    kwargs["dropout"] = dropout  # by its place: libraries that wrap every attention function give it so
    how = {"scaling": scaling, "softcap": softcap, **kwargs}
    if policy_cache is None:
        if key.shape[2] != query.shape[2]:
            _check_attached(stock, module)
        _check_arguments(module, kwargs, allowed=REFUSED)  # which the stock function takes
        return _as_stock(stock, module, query, key, value, attention_mask, how)
    _check_arguments(module, kwargs)
    if kwargs.get("is_causal") is False:
        raise _looks_ahead(module)
    attention = attend
    if attention_mask is not None and attention_mask.dim() != 2:
        seen = _behind(policy_cache, module, attention_mask, query.shape[2])
        if seen is None:
            attention = _under_own_mask(stock, module, attention_mask, how)
            seen = is_token(attention_mask)
        attention_mask = seen
    sinks: Tensor | None = kwargs.get("s_aux")
    if sinks is not None and len(sinks) != query.shape[1]:
        raise _other_sinks(module, len(sinks), query.shape[1])
    # Each KV head has as many query heads; a rank of several may have none of either.
    rest = query.shape[1] % key.shape[1] if key.shape[1] else query.shape[1]
    if key.shape[:3] != value.shape[:3] or rest:
        raise _other_heads(module, query, key, value)
    if kwargs.get("dropout"):
        raise _drops_attention(kwargs["dropout"])
    if query.dtype != value.dtype:  # under autocast, where the stock function would do the same
        query = query.to(value.dtype)
        key = key.to(value.dtype)
    transform = ScoreTransform(query.shape[-1] ** -0.5 if scaling is None else scaling, softcap, sinks)
    layer_idx: Any = module.layer_idx
    with outside_autocast(query.device):
        given = (query, key, value, attention_mask, transform, policy_call)
        if attention is not attend and isinstance(policy_cache, CacheForward):
            out = policy_cache.attend(layer_idx, *given, attention)
        else:
            out = policy_cache.attend(layer_idx, *given)
    return out.transpose(1, 2).contiguous(), None


def _as_stock(
    stock: str, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, how: dict[str, Any]
) -> tuple[Tensor, None]:
    """The stock function for a layer without slots, and for a forward without a cache."""
    looks_ahead = mask is None and stock == "eager" and getattr(module, "is_causal", True)
    if looks_ahead or (mask is not None and mask.dim() == 2):
        mask = _stock_mask(stock, query, key, mask)
    return _stock_attention(stock, module)(module, query, key, value, mask, **how)


def no_padding(dimensions: int) -> KVPolicyError:
    """The error for a mask of a layer with slots that does more than hide padding."""
    return KVPolicyError(
        f"The attention mask must be 2-D under a policy, got {dimensions} dimensions, as for image tokens that attend "
        "to later ones; try text alone, without token_type_ids, and a 2-D padding mask."
    )


def _looks_ahead(module: nn.Module) -> KVPolicyError:
    """The error for attention to later tokens."""
    return KVPolicyError(
        f"Attention must be causal where a policy keeps a cache, got is_causal=False in {type(module).__name__}; try "
        "use_cache=False."
    )


def _other_sinks(module: nn.Module, sinks: int, heads: int) -> KVPolicyError:
    """The error for sinks that are not those of the query heads."""
    return KVPolicyError(
        f"Attention must have one sink for each query head of the rank, got {sinks} sinks for {heads} heads in "
        f"{type(module).__name__}, which were not sharded with the heads; try the model on one rank."
    )


def _other_heads(module: nn.Module, query: Tensor, key: Tensor, value: Tensor) -> KVPolicyError:
    """The error for heads that are not those of ordinary or grouped-query attention."""
    return KVPolicyError(
        "Query heads must be a multiple of the key heads, and value heads must be as many as key heads, got "
        f"{query.shape[1]} query, {key.shape[1]} key and {value.shape[1]} value heads in {type(module).__name__}; "
        "try a model with ordinary or grouped-query attention."
    )


def _drops_attention(dropout: float) -> KVPolicyError:
    """The error for a cache in training with dropout."""
    return KVPolicyError(
        "The model must not drop attention at random where a policy keeps a cache, got training mode with a dropout of "
        f"{dropout}; try model.eval(), or train with use_cache=False."
    )


def _check_arguments(module: nn.Module, kwargs: dict[str, Any], allowed: tuple[str, ...] = ()) -> None:
    """Refuse arguments that may change attention, and would be ignored.

    Models of sparse attention hand over the chosen tokens (`indices`) to every implementation but `eager` and `sdpa`,
    for which they make a mask.
    """
    for name, value in kwargs.items():
        changes = name in REFUSED and value is not None
        if (changes or (name not in KNOWN and _holds_tensor(value))) and name not in allowed:
            raise KVPolicyError(
                f"Attention must be called without {name!r} under a policy, which does not support it, got it from "
                f"{type(module).__name__}; try another model, or detach."
            )


def _behind(
    policy_cache: CacheForward | PassingCache | LatentAttention, module: nn.Module, mask: Tensor, new: int
) -> Tensor | None:
    """Read a mask of pairs of tokens: which new tokens are not padding, if it hides nothing else behind earlier ones.

    Args:
        policy_cache: What attends for the module.
        module: The attention module.
        mask: Its mask, [B, 1, P, N].
        new: P.

    Returns:
        Which tokens are not padding, [B, P] bool, as of text behind a picture; None for the mask of a whole prompt.

    Raises:
        KVPolicyError: If it does more where tokens stand before the new ones, or where layers take tiles.
    """
    layer: Any = None
    if isinstance(policy_cache, CacheForward):
        layer = policy_cache.layers[module.layer_idx]  # pyright: ignore[reportArgumentType, reportCallIssue]
    is_managed = isinstance(layer, PolicyLayer)
    if is_managed and mask.dim() == 4 and layer.is_initialized and hides_padding(mask, layer.length):
        return is_token(mask[..., -new:])
    in_tiles = isinstance(policy_cache, CacheForward) and policy_cache.tile is not None
    stands = in_tiles or not is_managed or layer.holds_tokens
    if stands or mask.dim() != 4 or mask.shape[-1] != new:
        raise KVPolicyError(
            f"The attention mask must be 2-D under a policy, got {mask.dim()} dimensions, as for image tokens that "
            "attend to later ones, of which a whole picture must be in the first forward; try pictures in one prompt "
            "without tile or prefill_chunk_size, or text alone."
        )
    return None


def _holds_tensor(value: Any) -> bool:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else (value,)
    return any(isinstance(part, Tensor) for part in parts)


def _check_attached(stock: str, module: nn.Module) -> None:
    """Refuse a stock cache in a model without a policy: the masks of its earlier tokens are not made."""
    if torch.compiler.is_compiling() or module in attached:
        return
    # The attention of image encoders has neither.
    if getattr(module, "is_causal", False) and isinstance(getattr(module, "layer_idx", None), int):
        raise KVPolicyError(
            f"The attention implementation {PREFIX + stock!r} must be that of a model with a policy, got it in "
            f"{type(module).__name__} of a model without one, which was made from the config of the other; try "
            f"model.set_attn_implementation({stock!r})."
        )


def _stock_mask(stock: str, query: Tensor, key: Tensor, valid: Tensor | None) -> Tensor:
    """The causal mask that the stock function is given without a cache, [B, 1, P, P]."""
    make: Any = ALL_MASK_ATTENTION_FUNCTIONS[stock]
    return make(
        batch_size=query.shape[0],
        q_length=query.shape[2],
        kv_length=key.shape[2],
        q_offset=0,
        kv_offset=0,
        mask_function=causal_mask_function,
        attention_mask=valid,
        dtype=query.dtype,
        device=query.device,
    )


def _stock_attention(stock: str, module: nn.Module) -> Callable[..., tuple[Tensor, None]]:
    eager = getattr(sys.modules[home(module).__module__], "eager_attention_forward", None)
    stock = "sdpa" if eager is None else stock  # Falcon's eager attention is no function
    return ALL_ATTENTION_FUNCTIONS.get_interface(stock, eager)  # pyright: ignore[reportArgumentType, reportReturnType]


def _under_own_mask(
    stock: str, module: nn.Module, mask: Tensor, how: dict[str, Any]
) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """Attention of a prompt to itself by the stock function, under the mask of the model, [B, 1, P, P]."""
    own = partial(_stock_attention(stock, module), module, attention_mask=mask)
    return under_mask(lambda q, k, v: own(query=q, key=k, value=v, **how)[0])


def _is_causal(mask_function: Callable[..., Any], q_length: int) -> bool:
    """Whether a mask hides later tokens and nothing else, also if a model adds the blocks of pictures to text alone."""
    if torch.compiler.is_compiling():
        return False
    joined = _nonlocals(mask_function, or_masks).get("mask_functions", ())
    return causal_mask_function in joined and all(
        part is causal_mask_function or _has_no_blocks(part, q_length) for part in joined
    )


def _has_no_blocks(overlay: Callable[..., Any], q_length: int) -> bool:
    """Whether an overlay of blocks, whose tokens see each other, shows none of the new tokens a later one."""
    blocks: Tensor | None = _nonlocals(overlay, blockwise_overlay).get("block_sequence_ids")
    # Nothing is later than a single token, and a step does not wait for the device.
    return blocks is not None and (q_length == 1 or not bool((blocks >= 0).any()))


def _nonlocals(function: Callable[..., Any], maker: Callable[..., Any]) -> dict[str, Any]:
    """The variables of a function that `maker` has made; none of any other."""
    if not getattr(function, "__qualname__", "").startswith(f"{maker.__qualname__}.<locals>."):
        return {}
    return dict(inspect.getclosurevars(function).nonlocals)


def policy_mask(
    stock: str,
    *,
    q_length: int,
    kv_length: int | Tensor,
    q_offset: int | Tensor,
    mask_function: Callable[..., Any],
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Tensor | DeferredMask | None:
    """Which of the new tokens are no padding, [B, P] bool, or None where all are.

    Masks of other kinds than the plain causal one (sliding windows) are the stock function's, 4-D; where layers take
    tiles, each tile makes its own.
    """
    if mask_function is not causal_mask_function and not _is_causal(mask_function, q_length):
        make: Any = ALL_MASK_ATTENTION_FUNCTIONS[stock]
        sees_ahead = "allow_is_bidirectional_skip" in kwargs  # in a part that looks at pictures, and takes no tiles
        if not torch.compiler.is_compiling() and are_deferred() and not sees_ahead:
            given = kwargs | {"mask_function": mask_function, "attention_mask": attention_mask}
            return DeferredMask(make, given | {"q_length": q_length, "kv_length": kv_length, "q_offset": q_offset})
        return make(
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            **kwargs,
        )
    if attention_mask is None:
        return None
    seen = q_offset + q_length  # `kv_length` is the mask's own number of columns in a forward without a cache
    if not torch.compiler.is_compiling() and attention_mask.shape[-1] not in (q_length, seen):
        raise KVPolicyError(
            f"The attention mask must have {seen} columns for all tokens so far, or {q_length} for the new ones, "
            f"got {attention_mask.shape[-1]}; try the earlier mask with a column for each new token."
        )
    valid = attention_mask[:, -q_length:]
    if not torch.compiler.is_compiling() and bool(valid.all()):
        return None
    return valid


IMPLEMENTATION = "_attn_implementation_internal"


def configs_of(model: nn.Module) -> list[Any]:
    """The configs that a model's modules hold, each once."""
    found = {id(config): config for module in model.modules() if (config := _config(module)) is not None}
    return list(found.values())


def swap_implementation(model: nn.Module) -> Callable[[], None]:
    """Let a model's attention go through the policy's functions; returns how to undo it.

    Two models may share a config, so the modules get copies. What is changed in a copy meanwhile, such as a padding
    token, is taken over when the original comes back.
    """
    originals = configs_of(model)
    other = "sdpa" if getattr(model, "_supports_sdpa", True) else "eager"
    copies = {id(config): copy.copy(config) for config in originals}
    before = {key: dict(vars(config)) for key, config in copies.items()}
    for config in copies.values():
        # Not by the public property: its setter writes to the sub-configs, which are still those of the originals here.
        setattr(config, IMPLEMENTATION, register(config._attn_implementation, other))
        for name in config.sub_configs:
            sub = getattr(config, name, None)
            if id(sub) in copies:
                vars(config)[name] = copies[id(sub)]
    held = [(module, config) for module in model.modules() if (config := _config(module)) is not None]
    for module, config in held:
        vars(module)["config"] = copies[id(config)]

    def undo() -> None:
        for module, config in held:
            vars(module)["config"] = config
        for config in originals:
            _take_over(config, copies[id(config)], before[id(config)])

    return undo


def _config(module: nn.Module) -> PreTrainedConfig | None:
    config = vars(module).get("config")
    return config if isinstance(config, PreTrainedConfig) else None


def _take_over(original: PreTrainedConfig, changed: PreTrainedConfig, before: dict[str, Any]) -> None:
    """Give the original what was set on its copy, but for what the swap itself set."""
    own = {IMPLEMENTATION, *original.sub_configs}
    for name, value in vars(changed).items():
        # By identity: not every value can be compared, and what is changed in place is shared with the shallow copy.
        if name not in own and (name not in before or before[name] is not value):
            vars(original)[name] = value


def replace_falcon_forward(module: Any) -> Callable[[], None]:
    """Let a Falcon attention call the attention function of its config; returns how to undo it."""
    name = "_old_forward" if hasattr(module, "_old_forward") else "forward"  # accelerate keeps the original there
    before = module.__dict__.get(name)
    setattr(module, name, MethodType(_falcon_forward, module))
    module.num_key_value_groups = module.num_heads // max(module.num_kv_heads, 1)  # stock functions repeat by it

    def undo() -> None:
        del module.num_key_value_groups
        if before is None:
            module.__dict__.pop(name, None)
        else:
            setattr(module, name, before)

    return undo


def _falcon_forward(
    self: Any,
    hidden_states: Tensor,
    alibi: Tensor | None,
    attention_mask: Tensor | None,
    position_ids: Tensor | None = None,
    layer_past: Any = None,
    use_cache: bool = False,
    output_attentions: bool = False,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Project, rotate, attend, project: [B, P, hidden]."""
    assert position_embeddings is not None and alibi is None
    query, key, value = (part.transpose(1, 2) for part in _split(self, self.query_key_value(hidden_states)))
    query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
    if layer_past is not None:
        key, value = layer_past.update(key, value, self.layer_idx)
    run = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
    out, _ = run(self, query, key, value, attention_mask, scaling=self.inv_norm_factor, **kwargs)
    return self.dense(out.flatten(2)), None


def _split(self: Any, fused: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [B, P, Hq, D], keys and values [B, P, H, D]; grouped heads stay grouped, where Falcon repeats them."""
    if not self.new_decoder_architecture:
        return self._split_heads(fused)
    grouped = fused.unflatten(-1, (self.num_kv_heads, -1, self.head_dim))
    return grouped[:, :, :, :-2].flatten(2, 3), grouped[:, :, :, -2], grouped[:, :, :, -1]
