"""Checks of a forward's arguments before the cache is changed: an error of one sentence, not a wrong answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from kvpolicy.engine.decode import assert_async
from kvpolicy.hf.attention_interface import PREFIX, no_padding
from kvpolicy.hf.discovery import lacks_weights
from kvpolicy.hf.masks import DeferredMask
from kvpolicy.hf.replay import TABLES
from kvpolicy.hf.rotary_lookup import changing_kind, depends_on_length
from kvpolicy.hf.seen_text import mask_digest
from kvpolicy.hf.text_angles import check_angles
from kvpolicy.text.errors import KVPolicyError

if TYPE_CHECKING:
    from kvpolicy.hf.cache import PolicyCache


def by_name(names: list[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments behind the first by their names, however a cache or a mask was passed."""
    named = dict(zip(names[1:], args[1:], strict=False))
    if len(args) > len(names) or named.keys() & kwargs.keys():
        return args, kwargs  # nothing to name, or an error that Python words better
    return args[:1], {**named, **kwargs}


def own_mask(decoder: nn.Module, mask: Any) -> Any:
    """The mask of the full layers, where a model around the decoder made one for each kind of layer (Gemma-3).

    Raises:
        KVPolicyError: If a caller made one of pairs of tokens: later tokens would not know what it hides.
    """
    if isinstance(mask, Tensor) and mask.dim() == 4:
        raise no_padding(4)
    return mask.get("full_attention", mask) if isinstance(mask, dict) and takes_masks_by_kind(decoder) else mask


def takes_masks_by_kind(decoder: nn.Module) -> bool:
    """Whether a decoder may be given a mask for each kind of its layers; any other one checks the caller's mask."""
    return bool(getattr(decoder.config, "layer_types", None))


def check_adapters(model: Any) -> None:
    """Refuse adapters of PEFT that hand over keys and values of their own, such as prefix tuning.

    Raises:
        KVPolicyError: If an active adapter is one.
    """
    configs: Any = getattr(model, "peft_config", None)
    for config in configs.values() if isinstance(configs, dict) else ():
        kind: Any = getattr(config, "peft_type", "")
        name = str(getattr(kind, "value", kind))
        if name in ("PREFIX_TUNING", "CARTRIDGE"):
            raise KVPolicyError(
                "The model's adapter must not pass its own keys and values as a cache, got "
                f"{name.lower().replace('_', ' ')}; try an adapter that changes weights, such as LoRA."
            )


class Positions(NamedTuple):
    """How a decoder numbers tokens that come without positions.

    Attributes:
        learned: How many positions it has learned embeddings of, or None.
        by_mask: Whether tokens are counted by the attention mask, and not columns.
        of_mask: Whether the decoder does this itself, and needs a column for each token so far.
    """

    learned: int | None
    by_mask: bool
    of_mask: bool = False


COUNT_BY_MASK = ("opt",)
"""Types of models with learned positions that number tokens by the mask; in others, padding takes positions."""


def numbering_of(decoder: nn.Module, *, by_mask: bool) -> Positions:
    """How a decoder numbers tokens.

    Args:
        decoder: The decoder.
        by_mask: Whether the model around it numbers tokens by the mask, as models with pictures do.
    """
    if not any(isinstance(getattr(decoder, name, None), nn.Embedding) for name in TABLES):
        return Positions(None, by_mask)
    config: Any = decoder.config  # of a model of several parts, the whole config has no such number
    counts = config.model_type in COUNT_BY_MASK
    return Positions(int(config.max_position_embeddings), by_mask or counts, counts)


def check_call(
    model: nn.Module,
    cache: PolicyCache,
    tokens: Tensor,
    call: dict[str, Any],
    positions: Positions,
    *,
    is_made: bool = False,
) -> None:
    """Refuse a forward that would fail deep inside, or succeed with a wrong answer.

    Args:
        model: The attached model.
        cache: The call's cache.
        tokens: Ids or embeddings, [B, P(, D)].
        call: The call's other arguments.
        positions: How the model numbers tokens.
        is_made: Whether a model around the decoder made its mask, of one that was checked.

    Raises:
        KVPolicyError: Naming what is wrong and how to go on.
    """
    config: Any = model.config
    if not str(config._attn_implementation).startswith(PREFIX):
        raise KVPolicyError(
            f"The model's attention must not be set while a policy is attached, got {config._attn_implementation!r}, "
            "which disables the policy; try to detach, set it, and attach again."
        )
    asked = call.get("output_attentions")
    if config.output_attentions if asked is None else asked:
        raise KVPolicyError(
            "output_attentions must be False where a policy keeps a cache, since no attention matrix is computed, got "
            "True; try use_cache=False, and a model with eager attention."
        )
    if call.get("return_shared_kv_states"):
        raise KVPolicyError(
            "return_shared_kv_states must be False where a policy keeps a cache, since layers pass on the keys of new "
            "tokens alone, got True; try use_cache=False, or the model without a policy."
        )
    if tokens.device.type == "meta":
        raise KVPolicyError(
            "The model and its tokens must be on a device that holds numbers, got tokens on the meta device; try "
            "from_pretrained, or kvpolicy.plan(model, policy), which needs no weights."
        )
    first = cache.policy_layers[0]
    if not first.is_initialized and lacks_weights(model):
        raise KVPolicyError(
            "The model must have its weights for a forward, got some on the device meta; try from_pretrained, or "
            "kvpolicy.plan(model, policy), which needs none."
        )
    rows, new = tokens.shape[:2]
    if not rows or not new:
        raise KVPolicyError(
            f"The prompt must have at least one token, got {rows} row(s) of {new}; try more, or, with a cache that has "
            "seen some, the whole conversation for generate and the new tokens alone for the model."
        )
    held = len(first.store.tensors.length) if first.is_initialized else rows
    if held != rows:
        raise KVPolicyError(
            f"The call must have the {held} row(s) of its cache, got {rows}; try a new cache, or "
            "cache.batch_select_indices to choose rows."
        )
    mask = call.get("attention_mask")
    counts = positions.of_mask and call.get("position_ids") is None
    if isinstance(mask, DeferredMask):
        raise no_padding(4)
    if not is_made and (mask is not None or counts or cache.attachment.model_shape.unmanaged):
        check_mask(cache, mask, rows, new, counts=counts)
    # A lookup behind the last one fails on a CPU, and breaks a CUDA device.
    learned = positions.learned
    if learned is not None and (end := _end(cache, new, call, positions)) > learned:
        raise KVPolicyError(
            f"Positions must be below {learned}, the number that the model has learned, got {end - 1}; try a shorter "
            "text, since kept tokens keep their positions."
        )
    if new > 1 and depends_on_length(config):
        check_angles(config, cache, _end(cache, new, call, positions))


def check_mask(cache: PolicyCache, mask: Any, rows: int, new: int, *, counts: bool = False) -> None:
    """Refuse a mask that is not that of the cache's tokens and new ones.

    Args:
        cache: The cache.
        mask: Which tokens are not padding, [B, N] or [B, P], or None.
        rows: B.
        new: P.
        counts: Whether the decoder numbers the new tokens by the mask.

    Raises:
        KVPolicyError: Naming what is wrong and how to go on.
    """
    if mask is None:
        _check_no_mask(cache, new, counts=counts)
        return
    if not isinstance(mask, Tensor):
        raise KVPolicyError(
            f"The attention mask must be a 2-D tensor, got {type(mask).__name__}; try a tensor with 1 for a token and "
            "0 for padding."
        )
    if mask.dim() == 4:
        return  # attention says so itself, where it is not a sliding layer's
    if mask.dim() != 2 or mask.shape[0] != rows:
        raise KVPolicyError(
            f"The attention mask must be 2-D with {rows} row(s), as the call has, got the shape {list(mask.shape)}; "
            "try one line per row, 1 for a token and 0 for padding."
        )
    # Not in a step, where reading values would wait for the device.
    if mask.is_floating_point() and new > 1 and bool(((mask != 0) & (mask != 1)).any()):
        raise KVPolicyError(
            "The attention mask must have no other numbers than 0 and 1, got "
            f"{float(mask[(mask != 0) & (mask != 1)][0]):g}; try 1 for a token and 0 for padding."
        )
    first = cache.policy_layers[0]
    _check_columns(cache, mask, new, counts=counts)
    if new > 1 and cache.attachment.model_shape.states:
        begun = mask.new_zeros(rows, dtype=torch.bool)
        if first.is_initialized:
            begun = first.length.to(mask.device) > 0
        if first.prefix_columns:  # the rows of a fork have the states behind the text that they share
            begun = mask.new_ones(rows, dtype=torch.bool)
        _check_gaps(mask[:, -new:].bool(), begun)
    if not first.is_initialized and not bool(mask.any()):
        raise KVPolicyError(
            f"The attention mask must show at least one token, got only padding in all {rows} row(s); try 1 for each "
            "token and 0 for padding."
        )
    # A mask of the new columns alone says nothing of earlier ones.
    if first.is_initialized and mask.shape[1] > new:
        seen = cache.mask_digest
        assert seen is not None
        same = mask_digest(mask[:, :-new]).to(seen.device) == seen
        said = (
            "The attention mask must show the same earlier tokens that the cache has seen, got others; try a new cache"
        )
        if new > 1 and not bool(same.all()):
            raise KVPolicyError(f"{said}, or the earlier mask with the new columns after it.")
        if new == 1:  # without waiting for the device
            assert_async(same.all(), f"{said}.")


def _check_no_mask(cache: PolicyCache, new: int, *, counts: bool) -> None:
    """Refuse to go on behind padding without a mask where something counts it: only layers with slots remember it."""
    first = cache.policy_layers[0]
    windows = cache.attachment.model_shape.unmanaged
    if not first.is_initialized or cache.rows is not None or not (windows or counts):
        return
    same = (first.length == first.get_seq_length() - first.prefix_columns).all()
    said = (
        "The attention mask must be given behind a padded prompt where layers have sliding windows, or positions are "
        "counted by it, got none; try the earlier mask with a column for each new token behind it."
    )
    if new == 1:  # without waiting for the device
        assert_async(same, said)
    elif not bool(same):
        raise KVPolicyError(said)


def _check_columns(cache: PolicyCache, mask: Tensor, new: int, *, counts: bool) -> None:
    """Refuse a mask of neither all columns nor the new ones, or of the new ones where columns are counted by it."""
    seen = cache.policy_layers[0].get_seq_length()
    whole = f"{seen + new} columns for all tokens so far"
    windows = cache.attachment.model_shape.unmanaged
    if mask.shape[1] == new and seen and (windows or counts):
        why = "layers have sliding windows, whose mask counts columns" if windows else "it numbers the tokens"
        raise KVPolicyError(
            f"The attention mask must have {whole} where {why}, got {new} for the new ones; try the earlier mask with "
            "a column for each new token behind it."
        )
    if mask.shape[1] not in (new, seen + new):
        raise KVPolicyError(
            f"The attention mask must have {whole}, or {new} for the new ones, got {mask.shape[1]}; try the earlier "
            "mask with a column for each new token behind it."
        )


def _check_gaps(valid: Tensor, begun: Tensor) -> None:
    """Refuse padding between the tokens of a row, which moves the states of layers.

    Args:
        valid: Which of the new tokens are not padding, [B, P] bool.
        begun: Which rows have tokens before, [B] bool.
    """
    follows = valid.cummax(-1).values | begun[:, None]
    precedes = valid.flip(-1).cummax(-1).values.flip(-1)
    gaps = (follows & precedes & ~valid).any(-1)
    if bool(gaps.any()):
        raise KVPolicyError(
            "Padding must not stand between the tokens of a row if layers have states, which it would move, got some "
            f"in row {int(gaps.long().argmax())}; try rows with equally many new tokens, or each in a cache of its own."
        )


def check_rows(model: nn.Module, cache: PolicyCache, names: list[str], learned: int | None) -> None:
    """Refuse a model in which a row of a batch depends on the positions of the others, or whose positions are fewer.

    Args:
        model: The attached model.
        cache: A cache whose rows come and go.
        names: The arguments of its decoder.
        learned: How many positions the model has learned embeddings of, or None.

    Raises:
        KVPolicyError: Naming what stands against it.
    """
    assert cache.rows is not None, "the rows of the cache come and go"
    length = cache.rows.length
    if "position_ids" not in names:
        raise KVPolicyError(
            f"The model must take positions where rows come and go, got {type(model).__name__}, which counts columns; "
            "try a padded batch."
        )
    if learned is not None and length > learned:
        raise KVPolicyError(f"length must be at most {learned}, as many as the model has positions, got {length}.")
    kind = changing_kind(model.config, 1, length)
    if kind:
        raise KVPolicyError(
            f"The angles of the rotary embedding must not depend on other rows where rows come and go, got {kind} with "
            f"other angles at {length} tokens; try a smaller length."
        )


def exceeds(cache: PolicyCache, limit: int, new: int, call: dict[str, Any], positions: Positions) -> bool:
    """Whether a call of `new` columns needs a position of at least `limit`."""
    if cache.policy_layers[0].get_seq_length() + new <= limit:  # without waiting for the device
        return False
    return _end(cache, new, call, positions) > limit


def _end(cache: PolicyCache, new: int, call: dict[str, Any], positions: Positions) -> int:
    """The position behind the last one of a call."""
    end = cache.policy_layers[0].get_seq_length() + new
    places = call.get("position_ids")
    mask = call.get("attention_mask")
    if places is not None:
        return int(places.max()) + 1
    if positions.by_mask and isinstance(mask, Tensor) and mask.dim() == 2 and mask.shape[1] == end:
        return int(mask.bool().sum(-1).max())
    return end
