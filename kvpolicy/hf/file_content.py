"""Checks that the content of a cache file fits the model, before tensors are allocated for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kvpolicy.engine.snapshot import below
from kvpolicy.hf.attachment import Attachment
from kvpolicy.hf.cache_file import TOKENS, CacheFile
from kvpolicy.hf.rope_owner import ATTRIBUTE
from kvpolicy.hf.states import is_state
from kvpolicy.text.errors import KVPolicyError


def check_content(content: CacheFile, attachment: Attachment, what: str) -> None:
    """Check that a file has the layers of a model, and tensors of as many rows as its header says.

    Args:
        content: The content of the file, with a header that passed its checks.
        attachment: The attachment of the model.
        what: The name of the file, for messages.

    Raises:
        KVPolicyError: Naming what does not fit.
    """
    found = _layer_difference(content.header, attachment) or _tensor_difference(content, attachment)
    if found:
        raise KVPolicyError(f"The content of the cache file {what!r} must have {found}; save the cache again.")


def _layer_difference(header: Mapping[str, Any], attachment: Attachment) -> str:
    """How the layers of a header differ from those of the model; empty if they do not."""
    model = attachment.model_shape
    for name, indices in (("layers", model.evictable), ("windows", model.unmanaged)):
        if header[name].keys() != {*map(str, indices)}:
            return f"the layers of the model in {name}, got others"
    whole = [header["rows"], model.shape.heads, model.shape.head_dim]
    for index, layer in header["layers"].items():
        # How many heads a rank has is in its tensors too, and `snapshot.put` compares them.
        expected = whole if header["ranks"]["size"] == 1 else [whole[0], layer["shape"][1], whole[2]]
        if layer["shape"] != expected or layer["shape"][1] > model.heads:
            return f"{expected} in layers.{index}.shape, got {layer['shape']}"
        if layer["group"] != model.shape.group and header["ranks"]["size"] == 1:
            return f"{model.shape.group} in layers.{index}.group, got {layer['group']}"
    wrong = [index for index, columns in header["windows"].items() if columns != header["columns"]]
    if wrong:
        return f"{header['columns']} columns in windows.{wrong[0]}, got {header['windows'][wrong[0]]}"
    return ""


def _tensor_difference(content: CacheFile, attachment: Attachment) -> str:
    """How the tensors besides those of policies differ from what the header says; empty if they do not."""
    header, held = content
    rows = header["rows"]
    columns = header["columns"]
    expected: dict[str, tuple[torch.dtype, list[int]]] = {"digest": (torch.int64, [rows])}
    if header["has_tokens"]:
        expected[TOKENS] = torch.int64, [rows, columns]
    if header.get("has_rope_deltas"):
        expected[ATTRIBUTE] = torch.int64, [rows]
    for index in attachment.model_shape.evictable:
        expected[f"layers.{index}.length"] = torch.int64, [rows]
        expected[f"layers.{index}.columns"] = torch.int64, []
    for name, (dtype, size) in expected.items():
        tensor = held.get(name)
        if tensor is None or tensor.dtype != dtype or list(tensor.shape) != size:
            return f"the tensor {name} as {dtype} {size}, got {_described(tensor)}"
        if name.endswith(".columns") and int(tensor) != columns:
            return f"{columns} in the tensor {name}, got {int(tensor)}"
    if not header["has_tokens"] and TOKENS in held:
        return "no token ids if has_tokens is false, got some"
    return _state_difference(content, attachment) or _window_difference(content, attachment)


def _state_difference(content: CacheFile, attachment: Attachment) -> str:
    """How the states of layers differ from those of the model; empty if they do not."""
    header, held = content
    states = attachment.model_shape.states
    for index in range(attachment.model_shape.depth):
        found = {name: t for name, t in below(held, f"layers.{index}.").items() if is_state(name)}
        if any(not t.dim() or t.shape[0] != header["rows"] for t in found.values()):
            return f"{header['rows']} row(s) in each state of layer {index}, got others"
        expected = header["rows"] * states[index].nbytes if index in states else 0
        if sum(t.nbytes for t in found.values()) != expected:
            return f"states of {expected} bytes in layer {index}, got {sum(t.nbytes for t in found.values())}"
    return ""


def _window_difference(content: CacheFile, attachment: Attachment) -> str:
    """How the tensors of layers that no policy manages differ from those of the model; empty if they do not."""
    header, held = content
    dtype = getattr(torch, header["dtype"])
    # Under autocast, a stock layer holds keys as their rotation leaves them: in the dtype of the model.
    dtypes = {dtype, attachment.model_shape.shape.dtype}
    for index, window in attachment.model_shape.unmanaged.items():
        shape = attachment.model_shape.unmanaged_shapes[index]
        least = min(header["columns"], window - 1)  # more are held while the past is recorded
        for name in (f"layers.{index}.keys", f"layers.{index}.values"):
            tensor = held.get(name)
            if tensor is None or tensor.dtype not in dtypes or tensor.dim() != 4:
                return f"the tensor {name} as {dtype} of 4 dimensions, got {_described(tensor)}"
            rows, heads, tokens, dim = tensor.shape
            sized = (rows, dim) == (header["rows"], shape.head_dim) and least <= tokens <= header["columns"]
            # A rank may have fewer heads than others.
            if not sized or heads > shape.heads or (heads < shape.heads and header["ranks"]["size"] == 1):
                return (
                    f"the tensor {name} as [{header['rows']}, {shape.heads}, {least}, {shape.head_dim}], got "
                    f"{_described(tensor)}"
                )
    return ""


def _described(tensor: Tensor | None) -> str:
    return "none" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
