"""The rotary embedding of a model's layers as matrices, found by trying the model's own function."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.reference.coding import Rotation, as_it_is


def turns(model: Any, dim: int) -> Callable[[int], tuple[Rotation, Rotation]]:
    """How to undo and apply the embedding of a layer's keys [dim]."""
    tables: Any = next((m for m in model.modules() if type(m).__name__.endswith("RotaryEmbedding")), None)
    if tables is None:
        return lambda layer: (as_it_is, as_it_is)

    rotated = _rotated(model, sys.modules[type(tables).__module__])

    @functools.cache
    def matrix(layer: int, position: int) -> Tensor:
        """What a key is multiplied by on the right, [dim, dim] fp64."""
        if layer not in rotated:
            return torch.eye(dim, dtype=torch.float64)
        named = "layer_type" in inspect.signature(tables.forward).parameters
        more = {"layer_type": tables.config.layer_types[layer]} if named else {}
        parts = (3, 1, 1) if hasattr(tables, "mrope_section") else (1, 1)
        with torch.no_grad():
            cos, sin = tables(torch.zeros(1, 1, dim), torch.tensor(position).expand(parts), **more)
        apply = sys.modules[type(tables).__module__].apply_rotary_pos_emb
        width = rotated[layer]
        basis = torch.eye(width)[:, None, None]  # a batch of keys of one token and one head
        whole = torch.eye(dim, dtype=torch.float64)
        angles = cos.expand(width, -1, -1), sin.expand(width, -1, -1)
        one = len([x for x in inspect.signature(apply).parameters.values() if x.default is x.empty]) == 3
        turned = apply(basis, *angles) if one else apply(basis, basis, *angles)[1]
        whole[:width, :width] = turned[:, 0, 0]
        return whole

    @functools.cache
    def inverse(layer: int, position: int) -> Tensor:
        return torch.linalg.inv(matrix(layer, position))

    def of(layer: int) -> tuple[Rotation, Rotation]:
        return (
            lambda key, position: (key.double() @ inverse(layer, position)).float(),
            lambda key, position: (key.double() @ matrix(layer, position)).float(),
        )

    return of


def _rotated(model: Any, module: Any) -> dict[int, int]:
    """The layers that rotate keys, and how many channels, found by watching one forward."""
    found = dict[int, int]()
    running = list[int]()
    hooks = list[Any]()
    real: Any = module.apply_rotary_pos_emb

    def note(attention: Any, _: Any) -> None:
        running.append(attention.layer_idx)

    def spy(*args: Any, **kwargs: Any) -> Any:
        found[running[-1]] = args[0].shape[-1]
        return real(*args, **kwargs)

    for part in model.modules():
        if isinstance(getattr(part, "layer_idx", None), int):
            hooks.append(part.register_forward_pre_hook(note))
    try:
        module.apply_rotary_pos_emb = spy
        with torch.no_grad():
            model(torch.ones(1, 2, dtype=torch.int64), use_cache=False)
    finally:
        module.apply_rotary_pos_emb = real
        for hook in hooks:
            hook.remove()
    return found
