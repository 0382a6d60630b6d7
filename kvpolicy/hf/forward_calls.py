"""Arguments of a model's forward: its cache, its tokens, and whether a policy can serve it."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._dynamo import eval_frame
from transformers.cache_utils import Cache, DynamicCache

from kvpolicy.engine.decode import assert_async
from kvpolicy.hf.cache import PolicyCache
from kvpolicy.hf.cache_names import CACHE, LAYER_NAMES, passed_cache
from kvpolicy.hf.discovery import home
from kvpolicy.hf.journal import obstacle_of
from kvpolicy.hf.latent import TakesLatents
from kvpolicy.hf.latent_attention import LatentAttention
from kvpolicy.hf.layer import PolicyLayer
from kvpolicy.hf.passing_cache import PassingCache
from kvpolicy.hf.running_forward import newest_valid
from kvpolicy.hf.shared_keys import ReadingLayer
from kvpolicy.policy import Policy
from kvpolicy.selectors.full import KeepAll
from kvpolicy.statistics import Forward
from kvpolicy.text.errors import KVPolicyError, KVPolicyStateError

_OWN_LAYERS = ("assistant_early_exit", "use_mtp")
"""Ways of drafting that run a part of the model, through a cache of some of its layers."""

LEAVE_COMPILER = eval_frame.set_eval_frame
"""Called with None, runs the rest of a call without the compiler, if it was a call of a compiled model.

Of a forward that is no plain step, PyTorch would compile function by function, each as if it were a part of a compiled
step: conditions that hold for one cache are then taken to hold for all. The compiled call that is around this forward
turns the compiler on again when it ends, also after an error.
"""


def bind_cache(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Pass the cache that this call carries, and what its selector needs, on to the attention function."""
    for name in LAYER_NAMES:
        cache = kwargs.get(name)
        if isinstance(cache, PolicyCache):
            layer = cache.layers[module.layer_idx]  # pyright: ignore[reportArgumentType, reportCallIssue]
            if isinstance(layer, PolicyLayer):
                spec = layer.store.spec
                if spec.needs_call and not torch.compiler.is_compiling() and not cache.forward.is_step:
                    kwargs["policy_call"] = _module_call(cache, module, args, kwargs)
                elif spec.input_scorer is not None:
                    kwargs["policy_call"] = _module_input(module, args, kwargs)
                kwargs["policy_cache"] = (
                    LatentAttention(cache, layer, module) if isinstance(layer, TakesLatents) else cache
                )
            elif isinstance(layer, ReadingLayer) and not layer.is_sliding:
                kwargs["policy_cache"] = cache
        elif isinstance(cache, PassingCache) and cache.manages(module.layer_idx):  # pyright: ignore[reportArgumentType]
            if cache.wants_inputs:
                kwargs["policy_call"] = _module_input(module, args, kwargs)
            layer = cache.layers[module.layer_idx]  # pyright: ignore[reportArgumentType, reportCallIssue]
            kwargs["policy_cache"] = LatentAttention(cache, layer, module) if isinstance(layer, TakesLatents) else cache
    return args, kwargs


def _module_input(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Forward:
    """The input of an attention module, and nothing else."""
    return Forward(module, args[0] if args else kwargs["hidden_states"], {})


def _module_call(cache: PolicyCache, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Forward:
    """The arguments of a prompt's attention; a decode step scores nothing by them."""
    hidden: Tensor = args[0] if args else kwargs["hidden_states"]
    own = ("hidden_states", "attention_mask", *LAYER_NAMES)
    others = {name: value for name, value in kwargs.items() if name not in own}
    return Forward(module, hidden.detach(), others, cache.attachment.rotary)


def caches(module: nn.Module, kwargs: dict[str, Any]) -> bool:
    """Whether a forward without a cache would make one."""
    wanted = kwargs.get("use_cache")
    return not module.training and bool(getattr(module.config, "use_cache", False) if wanted is None else wanted)


def check_step(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse to compile what is not a decode step on a cache under the policy; raised, it breaks the graph."""
    cache: Cache | None = passed_cache(kwargs)
    if not isinstance(cache, PolicyCache) and (cache is not None or caches(module, kwargs)):
        raise KVPolicyError(
            f"A compiled step must be given a kvpolicy.PolicyCache as {CACHE}, got "
            f"{'none' if cache is None else type(cache).__name__}; try kvpolicy.PolicyCache(model), and the prompt "
            "through the model itself."
        )
    # What a compiled step would change on the host must be the same in every step: prompts, marks, rows that share.
    if isinstance(cache, PolicyCache) and cache.policy_layers[0].pending is not None:
        raise KVPolicyError(
            "A step must not be compiled before the announced prompt is complete, got one that every layer still "
            "holds for its replay; try to pass all of the announced tokens first."
        )
    if isinstance(cache, PolicyCache):
        cache.journal.refuse_shared("A compiled step")
        if cache.journal.mark is not None and cache.attachment.model_shape.states:
            raise KVPolicyError(
                "A step must not be compiled under a mark if layers have states, which are copied before each step, "
                "got a compiled one; try it uncompiled."
            )
        valid = newest_valid(kwargs.get("attention_mask"), 1)
        if cache.attachment.model_shape.states and valid is not None:
            assert_async(valid.all(), "every row must have a token in a compiled step if layers have states")
        windows = cache.attachment.model_shape.unmanaged
        mask = kwargs.get("attention_mask")
        if windows and isinstance(mask, Tensor) and mask.dim() == 2 and mask.shape[1] == 1:
            raise KVPolicyError(
                "The attention mask of a compiled step must have a column for every token so far where layers have "
                "sliding windows, whose mask counts columns, got 1; try the earlier mask with a column behind it, or "
                "none where no row is padded."
            )
        if cache.journal.mark is not None and windows:
            raise KVPolicyStateError(
                "A step must not be compiled under a mark if layers have sliding windows, which are logged on the "
                f"host, got one in layer {min(windows)}; try it uncompiled."
            )
        if cache.policy_layers[0].awaits_prompt:
            raise KVPolicyError(
                "A compiled step must not be the first forward after a shared prefix, which allocates slots, got the "
                "first one; try the uncompiled model for it, and compile the steps after it."
            )
    if isinstance(cache, PolicyCache) and cache.holds_next:
        raise KVPolicyError(
            "The forward after hold_next() must not be compiled, since it allocates slots, got a compiled one; try "
            "the uncompiled model, and compile the steps after it."
        )
    check_prompt(module, args, kwargs)


def check_prompt(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse to compile a prompt that is cached; raised, it breaks the graph."""
    tokens = tokens_of(args, kwargs)
    if not isinstance(tokens, Tensor) or tokens.shape[1] == 1:
        return
    if passed_cache(kwargs) is not None or caches(module, kwargs):
        raise KVPolicyError(
            "A compiled step must have one token under a policy, which computes the budgets of prompts on the host, "
            f"got {tokens.shape[1]}; try the prompt through the model itself, and compile the steps."
        )


def runs_compiled(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call of a module around the decoder is compiled; a prompt that is cached leaves the compiler."""
    if torch.compiler.is_compiling():
        check_prompt(module, args, kwargs)
        return True
    LEAVE_COMPILER(None)
    return False


def tokens_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The token ids of a forward [B, P], or its embeddings [B, P, hidden]; None if it is given neither."""
    ids = kwargs.get("input_ids", args[0] if args else None)
    return kwargs.get("inputs_embeds") if ids is None else ids


def with_positions(
    cache: Cache | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a forward on a cache, with the positions of the new tokens where rows come and go."""
    if isinstance(cache, PolicyCache) and cache.rows is not None:
        # Copied, since the first layer counts the new token before the last one may look at its position.
        kwargs["position_ids"] = cache.policy_layers[0].store.tensors.length[:, None].clone()
    return args, kwargs


def makes_both_caches(decoder: nn.Module) -> bool:
    """Whether the model around a decoder makes an EncoderDecoderCache itself, of which the decoder needs one part.

    BERT and its kin do so although they are decoders alone; in any other model such a cache is a mistake.
    """
    return hasattr(sys.modules[home(decoder).__module__], "EncoderDecoderCache")


def check_stock(cache: object) -> None:
    """Raise KVPolicyError unless a stock cache can `become` one under a policy: the ordinary one, if it is empty."""
    is_offloading = getattr(cache, "offloading", False)
    if type(cache) is not DynamicCache or is_offloading:
        kind = ("offloaded " if is_offloading else "") + type(cache).__name__
        raise KVPolicyError(
            f"The cache must be a kvpolicy.PolicyCache or an ordinary DynamicCache under a policy, got the {kind}; try "
            f"to leave {CACHE} and cache_implementation out, of model.generation_config too."
        )
    if cache.get_seq_length() > 0:
        raise KVPolicyError(
            f"A DynamicCache must be empty under a policy, got one that was filled without it by "
            f"{cache.get_seq_length()} tokens; try an empty one, or a kvpolicy.PolicyCache."
        )


def become(stock: Cache, cache: PolicyCache) -> None:
    """Make a stock cache that a call was given the cache under the policy, as a stock model would have filled it.

    A loop may pass the same object in each turn, and read its length. Both are one cache from now on.

    Args:
        stock: A cache that `check_stock` takes.
        cache: A new cache.
    """
    stock.__class__ = PolicyCache  # pyright: ignore[reportAttributeAccessIssue]
    stock.__dict__ = cache.__dict__


def check_asked(policy: Policy, generation_config: Any, mode: Any) -> None:
    """Raise KVPolicyError where `generate` would ask to install a cache's packages, or run drafts, before we see it.

    Args:
        policy: The policy of the cache that would be used.
        generation_config: The generation config.
        mode: The mode of generation of transformers.
    """
    assisted = mode == "assisted_generation"
    if assisted and any(getattr(generation_config, name, None) for name in _OWN_LAYERS):
        # An early exit changes the model's config, and an error leaves it changed.
        raise KVPolicyError(
            "Assisted decoding must not draft with the model's own layers under a policy, got "
            f"{', '.join(name for name in _OWN_LAYERS if getattr(generation_config, name, None))}; try an "
            "assistant_model, or kvpolicy.speculate(model, policy, input_ids)."
        )
    drafts = getattr(generation_config, "is_assistant", False)
    if (assisted or drafts) and (obstacle_of(policy) or not all(_keeps_all(own) for own in policy.distinct)):
        role = "of the assistant model " if drafts else ""
        raise KVPolicyError(
            f"Assisted decoding must have a policy {role}that neither evicts nor encodes, since a draft may be "
            f"rejected, got {policy}; try the policy full, or kvpolicy.speculate(model, policy, input_ids)."
        )
    if getattr(generation_config, "cache_implementation", None) == "quantized":
        raise KVPolicyError(
            "The cache must be a kvpolicy.PolicyCache or an ordinary DynamicCache under a policy, got "
            "cache_implementation='quantized'; try a codec in the policy, such as kivi, in its place."
        )


def _keeps_all(policy: Policy) -> bool:
    return isinstance(policy.selector, KeepAll)


def prompt_columns(model_kwargs: dict[str, Any], generation_config: Any) -> int:
    """Columns of the prompt that `generate` is about to run, 0 where it does not say."""
    mask = model_kwargs.get("attention_mask")
    if mask is not None:
        return int(mask.shape[1])
    return int(getattr(generation_config, "_mask_length", 0) or 0)


def check_conversation(seen: int, columns: int) -> None:
    """Raise KVPolicyError if `generate` is not given more than a cache has seen.

    transformers counts the new tokens from there, and would run none of them, or others.
    """
    if columns and columns <= seen:
        raise KVPolicyError(
            f"generate must be given the whole conversation, of which the cache has seen {seen} tokens, got input_ids "
            f"or an attention mask of {columns}; try torch.cat([output, new_ids], 1), with a mask of that length, or a "
            "new cache."
        )


def check_text(cache: PolicyCache, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise KVPolicyError if `generate` is given a text that does not begin with the tokens of its cache's file.

    Args:
        cache: The cache.
        args: The positional arguments of `generate`.
        kwargs: The others.
    """
    known = cache.journal.known
    given = (args[0] if args else None, kwargs.get("inputs"), kwargs.get("input_ids"))
    ids = next((each for each in given if isinstance(each, Tensor)), None)
    if known is None or ids is None or ids.dim() != 2 or ids.is_floating_point():
        return
    mask = kwargs.get("attention_mask")
    is_whole = ids.shape[1] > cache.get_seq_length() and (mask is None or mask.shape == ids.shape)
    if is_whole:  # else they are only the new ones, or are refused
        known.check(ids, mask)


def check_ends(model_kwargs: dict[str, Any]) -> None:
    """Raise KVPolicyError if `generate` is given rows that end with padding, whose queries have no output."""
    mask = model_kwargs.get("attention_mask")
    if isinstance(mask, Tensor) and mask.dim() == 2 and not bool(mask[:, -1:].all()):
        raise KVPolicyError(
            "Every row must end with a token for generate, which continues its last column, got padding in "
            f"{int((mask[:, -1] == 0).sum())} of {len(mask)} row(s); try tokenizer.padding_side = 'left'."
        )


def row_lengths(model_kwargs: dict[str, Any], columns: int) -> Tensor | int | None:
    """Tokens of each row's prompt; `generate` drops a mask without padding."""
    mask = model_kwargs.get("attention_mask")
    return (columns or None) if mask is None else mask.bool().sum(-1).cpu()


def is_compiled(module: nn.Module) -> bool:
    """Whether a module's call or forward was compiled in place."""
    held = vars(module)
    return bool(held.get("_compiled_call_impl")) or hasattr(held.get("forward"), "_torchdynamo_orig_callable")
