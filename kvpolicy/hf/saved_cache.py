"""Header and tensors that describe a cache in a file, and the cache that is made from them."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicSlidingWindowLayer

from kvpolicy.engine import snapshot
from kvpolicy.engine.snapshot import Snapshot, below
from kvpolicy.hf.attachment import Attachment, attachment_of
from kvpolicy.hf.cache_file import TOKENS, CacheFile, check_content, found_path, read
from kvpolicy.hf.cache_forward import CacheForward
from kvpolicy.hf.cache_header import read_header
from kvpolicy.hf.calibration_hash import check_calibrations, hash_calibrations
from kvpolicy.hf.discovery import ROPE_DELTAS, device_of, find_sites, rope_owner
from kvpolicy.hf.file_forms import decoded
from kvpolicy.hf.layer import PolicyLayer
from kvpolicy.hf.rank_file import cut_for_rank
from kvpolicy.hf.seen_text import KnownTokens
from kvpolicy.hf.states import States, is_state
from kvpolicy.planning.result import plan_from_dict, plan_to_dict
from kvpolicy.policy import Policy
from kvpolicy.protocols import SINGLE_RANK, Ranks
from kvpolicy.text.errors import KVPolicyError, KVPolicyTypeError
from kvpolicy.text.formats import expanded
from kvpolicy.text.model_identity import check_same_model
from kvpolicy.text.tables import shorten
from kvpolicy.text.validation import has_integers

AnyCache = TypeVar("AnyCache", bound=CacheForward)


def describe_cache(
    cache: CacheForward, tokens: Tensor | Sequence[Sequence[int]] | None, nbytes: Mapping[str, int]
) -> CacheFile:
    """Everything that a cache holds, of this rank.

    Args:
        cache: A `PolicyCache` that has seen a prompt.
        tokens: The token ids that it has seen, [B, N] int64, padding included; None if they are not to be stored.
        nbytes: Bytes of the cache by their names in the header.

    Raises:
        KVPolicyError: If the cache is empty or in the middle of a prompt, its policy has a part that cannot be written
            down, or the tokens are not those of all its columns.
    """
    # Refuse before anything is copied.
    policy = cache.policy.to_dict()
    _check_complete(cache)
    columns = cache.get_seq_length()
    first = cache.policy_layers[0]
    assert first.mask_digest is not None
    held: dict[str, Tensor] = {"digest": first.mask_digest}
    if tokens is not None:
        held[TOKENS] = _checked_tokens(tokens, cache.batch_size, columns)
    # Each layer by what it has: states, a window, slots, or several of these.
    layers: dict[str, Any] = {}
    kept: dict[str, list[int]] = {}
    windows: dict[str, int] = {}
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, States):
            held |= {f"layers.{index}.{name}": state for name, state in layer.named_states().items()}
        if isinstance(layer, DynamicSlidingWindowLayer):
            assert layer.keys is not None and layer.values is not None
            held |= {f"layers.{index}.keys": layer.keys, f"layers.{index}.values": layer.values}
            windows[str(index)] = layer.cumulative_length
        if not isinstance(layer, PolicyLayer):
            continue
        taken = snapshot.take(layer.store)
        held |= {f"layers.{index}.{name}": tensor for name, tensor in taken.tensors.items()}
        layers[str(index)] = taken.numbers
        by_head = layer.store.geometry.tokens_by_head()
        kept[str(index)] = [int(by_head.min()), int(by_head.max())]
    # What all layers share is in the first one.
    if first.rope_deltas is not None:
        held[ROPE_DELTAS] = torch.tensor(first.rope_deltas, device="cpu")
    ranks: Ranks = first.store.ranks
    header = {
        "policy": policy,
        "spec": str(cache.policy),
        "model": cache.attachment.identity,
        "dtype": _name(first.keys.dtype),
        "ranks": {"rank": ranks.rank, "size": ranks.size, "queries": list(ranks.queries), "heads": list(ranks.heads)},
        "rows": cache.batch_size,
        "columns": columns,
        "has_tokens": tokens is not None,
        "has_rope_deltas": first.rope_deltas is not None,
        **nbytes,
        "calibrations": hash_calibrations(cache),
        "cache": cache.numbers(),
        "plan": None if cache.plan is None else plan_to_dict(cache.plan),
        "layers": layers,
        "windows": windows,
        "held": kept,
    }
    return CacheFile(header, held)


def restore_cache(cache: CacheForward, model: nn.Module, content: CacheFile, what: str) -> None:
    """Fill an empty cache with what a file says.

    Args:
        cache: A `PolicyCache` of the same policy.
        model: Its model.
        content: The file of this rank.
        what: The name of the file, for messages.

    Raises:
        KVPolicyError: If the content is of another model, dtype or number of ranks, or does not fit the policy.
    """
    header, held = content
    attachment = cache.attachment
    found = find_sites(model)
    sites = {site.layer_idx: site for site in found.layers}
    first = sites[cache.policy_layers[0].layer_idx]
    _check_model(header, attachment, what, device_of(first.attention))
    _check_positions(header, rope_owner(model, found.decoder) is not None, what)
    check_content(content, attachment, what)
    dtype: torch.dtype = getattr(torch, header["dtype"])
    for index, layer in enumerate(cache.layers):
        own = below(held, f"layers.{index}.")
        states = {name: own.pop(name) for name in list(own) if is_state(name)}
        if isinstance(layer, States):
            layer.load_states(states, _device(model, index))
        if not isinstance(layer, DynamicSlidingWindowLayer | PolicyLayer):
            continue  # it has a state alone, or reads the keys of another layer
        device = device_of(sites[index].attention)
        if isinstance(layer, DynamicSlidingWindowLayer):
            keys, values = (own[name].to(device, copy=True) for name in ("keys", "values"))
            layer.lazy_initialization(keys, values)
            layer.keys = keys
            layer.values = values
            layer.cumulative_length = header["windows"][str(index)]
            continue
        ranks = _ranks(header["ranks"], attachment, index, device)
        snapshot.put(layer.store, Snapshot(own, header["layers"][str(index)]), ranks, dtype, device)
    # Not earlier, since a store loads its calibration when it is filled.
    if header["calibrations"] is not None:
        check_calibrations(header, cache, what)
    cache.set_numbers(header["cache"])
    own = cache.policy_layers[0]
    own.hold_digest(held["digest"].to(own.length.device, copy=True))
    own.rope_deltas = held[ROPE_DELTAS].tolist() if header.get("has_rope_deltas") else None
    cache.journal.known = KnownTokens.of(held[TOKENS]) if header["has_tokens"] else None
    plan = header["plan"]
    prefill = attachment.model_shape.prefill
    cache.plan = None if plan is None else plan_from_dict(cache.policy, plan, prefill)


def read_for(model: nn.Module, path: str) -> tuple[CacheFile, Policy]:
    """The file of this rank of a model, or that of the whole model without one, and the policy of the cache in it.

    Raises:
        KVPolicyError: If no policy is attached, the file cannot be read, or it is of another number of ranks.
    """
    rank, size = attachment_of(model).place
    own = found_path(path, rank, size)
    _check_size(own, path, size)
    content = read(own)
    saved = content.header["ranks"]["size"]
    if saved != 1:
        _check_ranks(saved, str(own), size)
    return content, Policy.from_dict(content.header["policy"])


def load_cache(
    kind: Callable[[nn.Module, Policy], AnyCache], model: nn.Module, path: str
) -> tuple[AnyCache, Tensor | None]:
    """Read a file once: the cache in it, and its token ids, [B, N] int64, or None.

    Args:
        kind: `PolicyCache`.
        model: The model, with a policy attached.
        path: The path that was given when it was saved.

    Raises:
        KVPolicyError: As `read_for` and `restore_cache`.
    """
    content, policy = read_for(model, path)
    content = decoded(content, attachment_of(model), device_of(model), path)
    if content.header["ranks"]["size"] != attachment_of(model).place[1]:
        content = cut_for_rank(content, kind(model, policy), path)
    cache = kind(model, policy)
    restore_cache(cache, model, content, path)
    return cache, content.tensors.get(TOKENS)


def _device(model: nn.Module, layer_idx: int) -> torch.device:
    """The device of the layer's modules that count layers; of the model without any."""
    found = (part for part in model.modules() if getattr(part, "layer_idx", None) == layer_idx)
    return device_of(next((part for part in found if any(True for _ in part.parameters())), model))


def _check_complete(cache: CacheForward) -> None:
    if not cache.is_initialized:
        raise KVPolicyError("A cache must have seen a prompt to be saved, got an empty one.")
    if cache.forward.runs or not cache.has_prompt:
        raise KVPolicyError(
            "A cache must have compressed its prompt to be saved, got one with an incomplete prompt; try after the "
            "last chunk."
        )


def _checked_tokens(tokens: Tensor | Sequence[Sequence[int]], rows: int, columns: int) -> Tensor:
    try:
        ids = torch.as_tensor(tokens)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise KVPolicyTypeError(
            f"tokens must be integers in rows of equal length, [{rows}, {columns}], got "
            f"{shorten(repr(tokens))}; try tokenizer(text, return_tensors='pt').input_ids."
        ) from error
    if not has_integers(ids):
        raise KVPolicyTypeError(
            f"tokens must be integers, [{rows}, {columns}], got {ids.dtype}; try "
            "tokenizer(text, return_tensors='pt').input_ids."
        )
    if ids.shape != (rows, columns):
        raise KVPolicyError(
            f"tokens must be the ids that the cache has seen, padding included, [{rows}, {columns}], got "
            f"{list(ids.shape)}; the newest token of a generation is in no cache yet."
        )
    return ids.to(torch.int64)


def _check_model(header: Mapping[str, Any], attachment: Attachment, what: str, device: torch.device) -> None:
    name = f"The cache file {what!r}"
    remedy = "compute the cache again"
    check_same_model(header["model"], name, attachment.info, exact=True, remedy=remedy)
    theirs = header["model"]["rope"]
    ours = attachment.identity["rope"]
    if theirs != ours:
        raise KVPolicyError(f"{name} must be for the rotary embedding {ours}, got one for {theirs}; {remedy}.")
    wanted = {_name(attachment.model_shape.shape.dtype)}
    if torch.is_autocast_enabled(device.type):
        wanted.add(_name(torch.get_autocast_dtype(device.type)))
    if header["dtype"] not in wanted:
        raise KVPolicyError(
            f"{name} must be for keys and values in {' or '.join(sorted(wanted))}, got {header['dtype']}; try loading "
            f"the model with dtype={header['dtype']}."
        )


def _check_positions(header: Mapping[str, Any], counts: bool, what: str) -> None:
    """Refuse a file that does not say where its text goes on, for a model that counts positions behind pictures."""
    said = header.get("has_rope_deltas")
    if said is None and counts:
        raise KVPolicyError(
            f"The cache file {what!r} must say at which positions the text behind its pictures goes on, got one of an "
            "earlier version, which does not; compute the cache again."
        )
    if said and not counts:
        raise KVPolicyError(
            f"The cache file {what!r} must be loaded with the whole model that it was made with, got only the part "
            "that reads text; compute the cache again, or load the model with its pictures."
        )


def _check_size(own: Path, path: str, size: int) -> None:
    """Tell from the names of files that a cache was saved by another number of ranks."""
    if os.path.isfile(own):
        return
    whole = expanded(path)
    shards = sorted(whole.parent.glob(f"{glob.escape(whole.stem)}-00001-of-*{glob.escape(whole.suffix)}"))
    if shards:
        _check_ranks(read_header(shards[0])["ranks"]["size"], path, size)


def _check_ranks(saved: int, what: str, size: int) -> None:
    if saved != size:
        raise KVPolicyError(
            f"The cache file {what!r} must be loaded on as many ranks as it was saved on, got {size} instead of "
            f"{saved}; try the same tensor parallel size."
        )


def _ranks(saved: Mapping[str, Any], attachment: Attachment, layer_idx: int, device: torch.device) -> Ranks:
    if saved["size"] == 1:
        return SINGLE_RANK
    rank = saved["rank"]
    # `resolve_ranks` counts the heads in tensors of a prompt, for which empty ones stand in. It gathers the counts, so
    # that all ranks must load.
    queries, keys = (
        torch.empty(1, saved[name][rank], 0, 1, device=device, dtype=torch.float32) for name in ("queries", "heads")
    )
    return attachment.resolve_ranks(layer_idx, queries, keys)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
