"""Sharding of a model without weights by DeepSpeed's AutoTP."""

from __future__ import annotations

import copy
import sys
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from kvpolicy.parallel.launch import World
from kvpolicy.parallel.sharding import SUMMED, Family, Heads, Slot, kinds, slots
from kvpolicy.text.errors import KVPolicyStateError

_HEADS = {
    "num_heads": "queries",
    "num_attention_heads": "queries",
    "num_key_value_heads": "keys",
    "num_kv_heads": "keys",
}
"""Attributes in which attention modules store a number of heads, and of which heads."""


def engine() -> ModuleType:
    """Import DeepSpeed, and disable its shared-memory operator on CPU.

    The operator takes a minute to compile, crashes if `LOCAL_SIZE` is not set, and treats all processes of a machine as
    one group. Without it, DeepSpeed uses gloo, which gives the same results.
    """
    import deepspeed

    if not torch.cuda.is_available():
        sys.modules["deepspeed.comm.torch"].build_shm_op = _no_op  # pyright: ignore[reportAttributeAccessIssue]
    deepspeed.init_distributed(verbose=False)
    return deepspeed


def _no_op() -> None:
    return None


def shard(model: Any, family: Family, heads: Heads, dtype: torch.dtype, place: World) -> dict[str, Slot]:
    """Shard a model on the meta device with AutoTP.

    Afterwards its parameters are uninitialized tensors on the device of this rank.

    Returns:
        The slot of each parameter: the part of the checkpoint's tensor that it is to be filled with.
    """
    from kvpolicy.hf.discovery import find_sites

    deepspeed = engine()
    block = type(find_sites(model).layers[0].block)
    own = slots(model, family, heads, place.rank, place.size)
    _shrink_experts(model, own)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    linear = {_tail(name) for name, kind in kinds(model, family).items() if kind in SUMMED and name not in own}
    deepspeed.init_inference(
        model,
        dtype=dtype,
        replace_with_kernel_inject=False,
        injection_policy={block: tuple(sorted(linear))},
        tensor_parallel={"tp_size": place.size, "tp_grain_size": 1},
        max_out_tokens=1 << 20,
    )
    _check(model, family)
    _resize(model, own, dtype, place.device)
    # DeepSpeed leaves buffers uninitialized, and casts those that must stay in fp32.
    for name, buffer in buffers.items():
        owner, leaf = _owner(model, name)
        setattr(owner, leaf, buffer.to(place.device))
    _tell_heads(model, heads)
    return own


def _tail(name: str) -> str:
    """Return AutoTP's name of a linear layer: that of its parent and its own, or only its own directly in a block."""
    parent, own = name.split(".")[-2:]
    return f".{own}" if parent.isdigit() else f"{parent}.{own}"


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    owner, _, leaf = name.rpartition(".")
    return model.get_submodule(owner), leaf


def _shrink_experts(model: nn.Module, own: dict[str, Slot]) -> None:
    """Shard the matrices of experts, which AutoTP does not; a hook sums their output over the ranks."""
    for name, slot in own.items():
        owner, leaf = _owner(model, name)
        if len(slot.whole) != 3 or slot.part is None:
            continue
        empty = torch.empty(slot.shape, dtype=getattr(owner, leaf).dtype, device="meta")
        setattr(owner, leaf, nn.Parameter(empty, requires_grad=False))
        if leaf == "down_proj":
            vars(owner)["intermediate_dim"] = slot.shape[2]
            owner.register_forward_hook(_sum_over_ranks)


def _sum_over_ranks(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
    dist.all_reduce(output)
    return output


def _check(model: nn.Module, family: Family) -> None:
    """Raise KVPolicyStateError unless AutoTP sharded each module as the table of the family says."""
    modules = dict(model.named_modules())
    for name, kind in kinds(model, family).items():
        module = modules.get(name)
        if module is None:  # matrices of experts, which `_shrink_experts` shards
            continue
        if ("Allreduce" in type(module).__name__) is not (kind in SUMMED) or getattr(module, "mp_group", None) is None:
            expected = "summed over" if kind in SUMMED else "split among"
            raise KVPolicyStateError(
                f"DeepSpeed must shard {name} so that its output is {expected} the ranks, got "
                f'{type(module).__name__}; try another version of DeepSpeed, or backend="hf".'
            )


def _resize(model: nn.Module, own: dict[str, Slot], dtype: torch.dtype, device: torch.device) -> None:
    """Replace each parameter whose shape or dtype is not that of its slot, such as fused or replicated heads."""
    for name, slot in own.items():
        owner, leaf = _owner(model, name)
        parameter = getattr(owner, leaf)
        if parameter.shape != slot.shape or parameter.dtype != dtype or parameter.device != device:
            empty = torch.empty(slot.shape, dtype=dtype, device=device)
            setattr(owner, leaf, nn.Parameter(empty, requires_grad=False))


def _tell_heads(model: Any, heads: Heads) -> None:
    """Set the numbers of heads of this rank in attention modules that store them."""
    from kvpolicy.hf.discovery import find_sites

    own = {"queries": len(heads.queries), "keys": len(heads.keys)}
    configs: dict[int, Any] = {}
    for site in find_sites(model).layers:
        attention: Any = site.attention
        for name, whose in _HEADS.items():
            if name in vars(attention):
                setattr(attention, name, own[whose])
        if "num_key_value_groups" in vars(attention) and own["keys"]:
            attention.num_key_value_groups = own["queries"] // own["keys"]
        if hasattr(attention, "qkv_proj"):  # Phi-3 splits its fused projection by the head numbers of the config
            config = configs.setdefault(id(attention.config), copy.copy(attention.config))
            config.num_attention_heads = own["queries"]
            config.num_key_value_heads = own["keys"]
            attention.config = config
