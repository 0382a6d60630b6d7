"""Keys and values of a saved cache as plain tensors, without its model: what other engines load.

An engine that numbers the tokens of a request by their slots believes that a question begins behind the kept tokens,
and not behind the whole text. Rotary embeddings depend on distances alone, `R(p - d) = R(-d) R(p)`, so that all keys
are rotated by one constant, and every later query meets them at the distances of the whole text.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvpolicy.engine import snapshot
from kvpolicy.engine.layer_group import places
from kvpolicy.engine.snapshot import Snapshot, below
from kvpolicy.hf.attachment import Attachment
from kvpolicy.hf.cache_file import CacheFile, check_content
from kvpolicy.hf.discovery import Site, Sites, find_sites
from kvpolicy.hf.layer import make_store
from kvpolicy.hf.meta_model import meta_model
from kvpolicy.hf.model_spec import describe, resolve_for
from kvpolicy.hf.rotary_lookup import first_not_undone, is_rotary, ropes_of
from kvpolicy.kernels.rotary import Rope
from kvpolicy.policy import Policy
from kvpolicy.protocols import SINGLE_RANK
from kvpolicy.readers.all import ReadAll
from kvpolicy.text.errors import KVPolicyError


class DenseLayer(NamedTuple):
    """Keys and values of one layer of a saved cache.

    Attributes:
        layer_idx: Index of the layer in the model.
        keys: [H, n, D], in the dtype of the cache.
        values: [H, n, D].
    """

    layer_idx: int
    keys: Tensor
    values: Tensor


class Skeleton(NamedTuple):
    """A model without weights, of which only its rotary embedding can compute.

    Attributes:
        config: Its config.
        sites: Its modules, on the device meta.
        rotations: The rotary embedding of each layer, on the CPU.
        first_weight: Name of the matrix that identifies the model: the first one of its first attention module.
    """

    config: Any
    sites: Sites
    rotations: dict[int, Rope]
    first_weight: str | None


def skeleton(config: Any) -> Skeleton:
    """The model of a config without weights.

    Args:
        config: A config of transformers.

    Raises:
        KVPolicyError: If a policy does not support the model, or its layers have no rotary embedding of which a
            constant rotation can be applied to stored keys.
    """
    from transformers import AutoModelForCausalLM

    if describe(config).shape.latent:
        raise KVPolicyError(
            "A model must cache keys and values for its saved caches to be loaded as such, got "
            f"{config.get_text_config(decoder=True).model_type} with latent attention (MLA); try it in transformers."
        )
    # An engine may have set another default dtype for its own weights.
    model: Any = meta_model(AutoModelForCausalLM, copy.deepcopy(config), dtype=torch.float32)
    sites = find_sites(model)
    tables = next((name for name, part in sites.decoder.named_children() if is_rotary(part)), None)
    if tables is not None:
        kind: Any = type(sites.decoder.get_submodule(tables))
        with torch.device("cpu"):
            sites.decoder.set_submodule(tables, kind(model.config.get_text_config()))
    rotations = ropes_of(sites.decoder, sites.layers, "engine")
    if not any(rope.rotates for rope in rotations.values()):
        raise KVPolicyError(
            "The positions of a model must be rotary embeddings for its saved caches to be moved, got "
            f"{model.config.get_text_config().model_type}, whose positions are of another kind."
        )
    _check_keys(sites, rotations)
    return Skeleton(model.config, sites, rotations, _first_weight(model, sites.layers[0]))


def _check_keys(sites: Sites, rotations: dict[int, Rope]) -> None:
    """Raise KVPolicyError if rotating stored keys does not move them, as the first layer shows with random weights."""
    first = sites.layers[0]
    attention = copy.deepcopy(first.attention).to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in attention.parameters():
            weight.normal_(generator=generator)
    if first_not_undone(sites.decoder, [Site(first.layer_idx, attention, attention)], rotations) is not None:
        raise KVPolicyError(
            "Keys must be the same at every position once the rotary embedding is undone for saved caches to be moved, "
            f"got others of {type(attention).__name__}."
        )


def check_dense(header: Mapping[str, Any], what: str) -> int:
    """Refuse a cache that no plain tensors of one size for all layers and heads can stand for.

    Args:
        header: The header of its file.
        what: The name of the file, for messages.

    Returns:
        The tokens that every head holds.

    Raises:
        KVPolicyError: Naming what the file has.
    """
    # An engine has the tokens of one row, of all heads, in every layer.
    name = f"The cache file {what!r}"
    if header.get("form") is not None:
        raise KVPolicyError(
            f"{name} must have plain keys and values, got {header['form']['spec']}; try saving the cache with "
            "compress='zlib'."
        )
    if header["ranks"]["size"] > 1:
        raise KVPolicyError(
            f"{name} must be of one process, got rank {header['ranks']['rank'] + 1} of {header['ranks']['size']}; try "
            "saving it without tensor parallelism."
        )
    if header["rows"] != 1:
        raise KVPolicyError(f"{name} must have one row, got {header['rows']}; try saving one text.")
    if header["windows"]:
        raise KVPolicyError(
            f"{name} must be of a model with full attention in all layers, got layers with a sliding window, which an "
            "engine masks by slots; serve it with kvpolicy serve --prefix."
        )
    # It attends to all of them: a reader's index has no place there.
    policy = Policy.from_dict(header["policy"])
    reader = next((own.reader for own in policy.distinct if not isinstance(own.reader, ReadAll)), None)
    if reader is not None:
        raise KVPolicyError(
            f"{name} must be read whole in a step, got the reader {reader}, which an engine does not have; try the "
            "policy without it."
        )
    # Its blocks hold equally many tokens of every layer and head.
    held: dict[str, list[int]] | None = header.get("held")
    if held is None:
        raise KVPolicyError(f"{name} must say how many tokens it holds, got one of an earlier version; save it again.")
    counts = {count for pair in held.values() for count in pair}
    if len(counts) != 1:
        raise KVPolicyError(
            f"{name} must hold equally many tokens in all layers and heads, got {min(counts)} to {max(counts)} under "
            f"{header['spec']}; try uniform budgets, such as kvzip@0.2."
        )
    return counts.pop()


def dense_layers(content: CacheFile, model: Skeleton, what: str) -> Iterator[DenseLayer]:
    """Decode a saved cache, layer by layer, with keys as if the text behind began at the number of kept tokens.

    Args:
        content: The content of its file, which `check_dense` accepts.
        model: Its model.
        what: The name of the file, for messages.

    Raises:
        KVPolicyError: If the content does not fit the model, has padding, or slots that stand for several tokens.
    """
    header, held = content
    kept = check_dense(header, what)
    attachment = _attachment(header, model)
    check_content(content, attachment, what)
    dtype: torch.dtype = getattr(torch, header["dtype"])
    cpu = torch.device("cpu")
    in_groups = places(attachment.policy.layer_groups)
    for layer_idx in attachment.model_shape.evictable:
        rope = model.rotations[layer_idx]
        own = attachment.policy.at(layer_idx)
        store = make_store(own, layer_idx, attachment.ropes.get(layer_idx), shape=attachment.model_shape.shape)
        group = in_groups.pop(layer_idx, None)  # a group is held until its last layer was read
        if group is not None:
            store.contents.join(*group)
        taken = Snapshot(below(held, f"layers.{layer_idx}."), header["layers"][str(layer_idx)])
        with torch.device("cpu"):
            snapshot.put(store, taken, SINGLE_RANK, dtype, cpu)
            past = store.past()
        total = int(store.tensors.length)
        if total != header["columns"]:
            raise KVPolicyError(
                f"The cache file {what!r} must be without padding, got {header['columns']} columns of {total} tokens; "
                "try saving the text alone."
            )
        found = 0 if past is None else past.occupied[0].sum(-1)
        if past is None or not bool((torch.as_tensor(found) == kept).all()):
            raise KVPolicyError(
                f"The cache file {what!r} must hold the {kept} tokens of its header in every head, got others in layer "
                f"{layer_idx}; save it again."
            )
        counts = None if past.counts is None else past.counts[past.occupied]
        if counts is not None and bool(counts.any()):
            raise KVPolicyError(
                f"The cache file {what!r} must have one token in each slot, got merged ones under {header['spec']}; "
                "try the policy without its merger."
            )
        keys, values = (t[0][past.occupied[0]].unflatten(0, (-1, kept)) for t in (past.keys, past.values))
        yield DenseLayer(layer_idx, moved(keys, total - kept, rope), values)


def moved(keys: Tensor, by: int, rope: Rope) -> Tensor:
    """Keys [H, n, D] as if every token stood `by` positions earlier, in front of position 0 where necessary."""
    if not by or not rope.rotates:
        return keys
    at = torch.full(keys.shape[:2], by, device="cpu")[None]
    # Undoing the rotation of a token at position `by` divides by the factor that the embedding has besides, once.
    return (rope.unrotate(keys[None], at)[0] * rope.scaling).to(keys.dtype)


def _attachment(header: Mapping[str, Any], model: Skeleton) -> Attachment:
    shape = describe(model.config, getattr(torch, header["dtype"]))
    weights = header["model"]["weights"]
    info = shape.info(None if weights is None else torch.tensor(weights, dtype=torch.float32, device="cpu"))
    policy = resolve_for(Policy.from_dict(header["policy"]), shape, info)
    policy.check(info)
    identity = dict(header["model"])
    return Attachment(policy=policy, model_shape=shape, info=info, identity=identity, rotations=model.rotations)


def _first_weight(model: torch.nn.Module, first: Site) -> str | None:
    """The name of the parameter that `discovery.sample_weights` samples."""
    matrix = next((each for each in first.attention.parameters() if each.dim() == 2), None)
    return next((name for name, each in model.named_parameters() if each is matrix), None)
