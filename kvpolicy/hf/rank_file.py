"""A rank's part of the saved cache of a whole model: its KV heads, and what all heads have in common."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvpolicy.engine import head_cut
from kvpolicy.engine.head_cut import Heads
from kvpolicy.engine.snapshot import Snapshot, begin, below
from kvpolicy.hf.attachment import Attachment
from kvpolicy.hf.cache_file import CacheFile, check_layers
from kvpolicy.hf.cache_forward import CacheForward
from kvpolicy.hf.calibration_hash import check_calibrations
from kvpolicy.protocols import SINGLE_RANK
from kvpolicy.text.errors import KVPolicyError
from kvpolicy.text.tables import count


def cut_for_rank(content: CacheFile, cache: CacheForward, what: str) -> CacheFile:
    """The file that this rank would have written, if its cache had the content of a whole model's.

    It has no plan, which nobody has made for these ranks.

    Args:
        content: The file of the whole model.
        cache: An empty `PolicyCache` of the policy in the file, which is used up.
        what: The name of the file, for messages.

    Raises:
        KVPolicyError: If the heads cannot be divided evenly, a tensor mixes them, or the content does not fit the
            policy or its calibration.
    """
    header, held = content
    attachment = cache.attachment
    model = attachment.model_shape
    rank, size = attachment.place
    check_layers(header, attachment, what)
    heads = Heads(_first(model.whole.heads, model.shape.heads, attachment), model.shape.heads, model.shape.group)
    tensors = dict(held)
    layers: dict[str, Any] = {}
    dtype: torch.dtype = getattr(torch, header["dtype"])
    for layer in cache.policy_layers:
        index = str(layer.layer_idx)
        whole = Snapshot(below(held, f"layers.{index}."), header["layers"][index])
        begin(layer.store, whole, SINGLE_RANK, dtype, torch.device("cpu"))
        part = head_cut.cut(layer.store, whole, heads)
        tensors |= {f"layers.{index}.{name}": tensor for name, tensor in part.tensors.items()}
        layers[index] = part.numbers
    # Only now, since a store loads its calibration when it begins; that of this rank is a part of the same one.
    check_calibrations(header, cache, what)
    for index in model.unmanaged:
        for name in (f"layers.{index}.keys", f"layers.{index}.values"):
            if name in held:
                tensors[name] = _window(held[name], model.unmanaged_shapes[index].heads, attachment)
    ranks = {"rank": rank, "size": size, "queries": [heads.number * heads.group] * size, "heads": [heads.number] * size}
    return CacheFile(header | {"ranks": ranks, "layers": layers, "calibrations": None, "plan": None}, tensors)


def _window(t: Tensor, own: int, attachment: Attachment) -> Tensor:
    """This rank's heads of a sliding window, [B, H, N, D]."""
    if t.dim() != 4 or t.shape[1] == own:
        return t
    return t.narrow(1, _first(t.shape[1], own, attachment), own).clone(memory_format=torch.contiguous_format)


def _first(whole: int, own: int, attachment: Attachment) -> int:
    """The first of this rank's KV heads, of which each rank has `own`.

    Raises:
        KVPolicyError: If the ranks do not have equally many.
    """
    rank, size = attachment.place
    replicas = 1 if attachment.sharing is None else attachment.sharing.replicas
    if own * size != whole * replicas:
        raise KVPolicyError(
            f"The {count(whole, 'KV head')} of a saved cache must be divided evenly among ranks, got {size} ranks; try "
            "saving the cache on these ranks."
        )
    return rank // replicas * own
