"""DeepSpeed AutoTP: its layers, made from a model without weights, and filled with this rank's parts."""

from __future__ import annotations

import copy
import sys
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from kvpolicy.parallel.sharding import SUMMED, Family, Heads, Slot, kinds, slots
from kvpolicy.spec.errors import KVPolicyStateError
from kvpolicy_deepspeed.launch import World

_HEADS = {
    "num_heads": "queries",
    "num_attention_heads": "queries",
    "num_key_value_heads": "keys",
    "num_kv_heads": "keys",
}


def engine() -> ModuleType:
    """Import DeepSpeed, without its shared-memory op on CPU.

    That op is compiled for a minute, crashes where `LOCAL_SIZE` is not set and takes all processes of a machine for
    one group; without it DeepSpeed reduces by gloo, to the same numbers.
    """
    import deepspeed

    if not torch.cuda.is_available():
        sys.modules["deepspeed.comm.torch"].build_shm_op = _no_op  # pyright: ignore[reportAttributeAccessIssue]
    deepspeed.init_distributed(verbose=False)
    return deepspeed


def _no_op() -> None:
    return None


def divide(model: Any, family: Family, heads: Heads, dtype: torch.dtype, place: World) -> dict[str, Slot]:
    """Let AutoTP divide a model of meta tensors; its parameters are empty ones on the rank's device afterwards.

    Returns:
        What each parameter is to be filled with.
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
    for name, buffer in buffers.items():  # DeepSpeed leaves noise in them, and casts what must stay fp32
        owner, leaf = _owner(model, name)
        setattr(owner, leaf, buffer.to(place.device))
    _tell_heads(model, heads)
    return own


def _tail(name: str) -> str:
    """What AutoTP calls a linear layer: by its own name and its parent's, if that is no layer."""
    parent, own = name.split(".")[-2:]
    return f".{own}" if parent.isdigit() else f"{parent}.{own}"


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    owner, _, leaf = name.rpartition(".")
    return model.get_submodule(owner), leaf


def _shrink_experts(model: nn.Module, own: dict[str, Slot]) -> None:
    """Divide experts' matrices, which AutoTP leaves whole; each rank's output is summed over the ranks."""
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
    """Whether AutoTP divided what the family's table says, and the way it says."""
    modules = dict(model.named_modules())
    for name, kind in kinds(model, family).items():
        module = modules.get(name)
        if module is None:  # experts' matrices, which are ours
            continue
        if ("Allreduce" in type(module).__name__) is not (kind in SUMMED) or getattr(module, "mp_group", None) is None:
            raise KVPolicyStateError(
                f"DeepSpeed made {type(module).__name__} of {name}, which would give wrong numbers: use another "
                'version of DeepSpeed, or backend="hf".'
            )


def _resize(model: nn.Module, own: dict[str, Slot], dtype: torch.dtype, device: torch.device) -> None:
    """Give every parameter its shape and dtype, where AutoTP divides otherwise: fused and replicated heads."""
    for name, slot in own.items():
        owner, leaf = _owner(model, name)
        now = getattr(owner, leaf)
        if now.shape != slot.shape or now.dtype != dtype or now.device != device:
            empty = torch.empty(slot.shape, dtype=dtype, device=device)
            setattr(owner, leaf, nn.Parameter(empty, requires_grad=False))


def _tell_heads(model: Any, heads: Heads) -> None:
    """Let attention modules know their own number of heads, where they keep one."""
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
        if hasattr(attention, "qkv_proj"):  # Phi-3 cuts its queries off by the config's number of heads
            config = configs.setdefault(id(attention.config), copy.copy(attention.config))
            config.num_attention_heads, config.num_key_value_heads = own["queries"], own["keys"]
            attention.config = config
