"""A cache that begins again with the whole text, where a model drops it in the middle of a generation.

The angles of a rotary embedding change at some length (`longrope`), so that keys of before are of no use behind it.
transformers then runs the whole text without the cache, and would make another one.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kvpolicy.hf.cache import PolicyCache
from kvpolicy.hf.forward_calls import row_lengths
from kvpolicy.text.errors import KVPolicyError, KVPolicyStateError
from kvpolicy.text.validation import expected


def restart(cache: PolicyCache, inputs: dict[str, Any], end: int | None) -> None:
    """Empty a cache for a forward of the whole text; its policy, and what is announced, stay.

    Args:
        cache: The cache that the model has dropped.
        inputs: The arguments of the forward.
        end: Columns at which the generation ends; None if unknown.

    Raises:
        KVPolicyError: If the forward has only a part of the text.
        KVPolicyStateError: If the cache holds what no forward of the text brings back.
    """
    if not cache.is_initialized:
        return
    tokens: Tensor = inputs["input_ids"] if inputs.get("input_ids") is not None else inputs["inputs_embeds"]
    columns = tokens.shape[1]
    _check_whole(cache, inputs, columns)
    _check_state(cache)
    known = cache.history.known
    cache.reset()
    cache.history.known = known
    new = None if end is None else max(end - columns, 0)
    cache.prompt, cache.new = expected(row_lengths(inputs, columns), new)


def _check_whole(cache: PolicyCache, inputs: dict[str, Any], columns: int) -> None:
    mask, places = inputs.get("attention_mask"), inputs.get("position_ids")
    is_part = columns <= cache.get_seq_length() or (mask is not None and mask.shape[-1] != columns)
    if is_part or (places is not None and bool((places[..., 0] != 0).any())):
        raise KVPolicyError(
            "The whole text must be run again where the angles of the rotary embedding change, since the model drops "
            f"the cache there, got {columns} of its tokens; try generate without prefill_chunk_size, or a new cache."
        )


def _check_state(cache: PolicyCache) -> None:
    what = "A forward that runs the whole text again, since the angles of the rotary embedding have changed,"
    cache.history.refuse_changes(what)
    held = "a shared prefix" if cache.policy_layers[0].prefix_columns else ""
    if cache.holds_next or cache.history.is_whole:
        held = "a prompt after hold_next()"
    if held:
        raise KVPolicyStateError(
            f"{what} must be on a cache that holds its text under one policy, got one with {held}; try a new cache, or "
            "a text that stays below that length."
        )
