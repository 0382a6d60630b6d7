"""How many bytes of weights each rank of tensor parallelism holds, from a config alone."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

BACKENDS = ("deepspeed", "hf")
"""Who may divide a model: DeepSpeed's AutoTP as `kvpolicy_deepspeed` loads it, or transformers' own plan."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Weights:
    """Bytes of weights on the fullest rank.

    Attributes:
        backend: Who divides the model.
        tp: Over how many ranks.
        replicated: Bytes that every rank holds.
        sharded: This rank's part of the bytes that are divided.

    Example:
        >>> from transformers import LlamaConfig
        >>> config = LlamaConfig(num_hidden_layers=2, num_attention_heads=4, hidden_size=64, intermediate_size=128)
        >>> weights_per_rank(config, tp=2, backend="hf", dtype=torch.bfloat16)
        Weights(backend='hf', tp=2, replicated=640, sharded=4177920)
    """

    backend: str
    tp: int
    replicated: int
    sharded: int

    @property
    def nbytes(self) -> int:
        """Bytes on this rank."""
        return self.replicated + self.sharded


class Part(NamedTuple):
    """One parameter: how many numbers each rank holds of it, and whether that is all of it."""

    held: tuple[int, ...]
    whole: bool


def weights_per_rank(
    config: Any, *, tp: int = 1, backend: str = "deepspeed", dtype: torch.dtype | None = None
) -> Weights:
    """Count the weights that a rank holds, without loading or allocating any.

    The model is built from its config on the meta device, and its parameters are divided as the backend would.

    - `deepspeed`: linears of the layers, the head and fused experts are divided; embeddings, norms and routers are
      whole on every rank, a head that is tied to the embedding is a copy, and KV heads fewer than ranks are repeated.
    - `hf`: what the model's own plan (`model.tp_plan`) divides, which is embedding and head too.

    Buffers, such as rotary frequencies, are not counted.

    Args:
        config: A transformers config.
        tp: Ranks.
        backend: Who divides the model, `deepspeed` or `hf`.
        dtype: Of the weights; the config's own by default.

    Raises:
        ValueError: Where the backend is unknown, or cannot divide this model over so many ranks.
    """
    if backend not in BACKENDS:
        raise ValueError(f"The backend {backend!r} is not known: use {' or '.join(BACKENDS)}.")
    if tp < 1:
        raise ValueError(f"A model cannot be divided over {tp} ranks: give at least 1.")
    if dtype is None:
        from kvpolicy.families import describe

        dtype = describe(config).shape.dtype
    model = _skeleton(config)
    rule = _whole if tp == 1 else {"deepspeed": _autotp, "hf": _own_plan}[backend]
    parts = list(rule(model, tp))
    fullest = max(range(tp), key=lambda rank: sum(part.held[rank] for part in parts))
    size = {
        whole: sum(part.held[fullest] for part in parts if part.whole is whole) * dtype.itemsize
        for whole in (True, False)
    }
    return Weights(backend=backend, tp=tp, replicated=size[True], sharded=size[False])


def _skeleton(config: Any) -> Any:
    """The model without storage."""
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except ValueError as error:
        raise ValueError(
            f"transformers has no causal language model of the kind {config.model_type}, so its weights cannot be "
            "counted: give the config of one."
        ) from error


def _whole(model: nn.Module, tp: int) -> Iterator[Part]:
    for parameter in model.parameters():
        yield Part((parameter.numel(),) * tp, True)


def _own_plan(model: Any, tp: int) -> Iterator[Part]:
    """As transformers divides it: the styles of the model's own plan, the first ranks having more where it is odd."""
    _check_plan(model, tp)
    for name, parameter in model.named_parameters():
        style = _style(name, model.tp_plan)
        dim = _dim(style, name, parameter.dim())
        if dim is None:
            yield Part((parameter.numel(),) * tp, True)
            continue
        pieces = 2 if style.startswith("packed") and parameter.dim() > 1 else 1  # gate and up are cut one by one
        size = parameter.shape[dim] // pieces
        each = -(-size // tp)
        yield _cut(parameter, dim, [pieces * max(min(each, size - each * rank), 0) for rank in range(tp)])


def _check_plan(model: Any, tp: int) -> None:
    """Raise where the model's plan leaves the KV heads whole, or cannot divide them."""
    from kvpolicy.families import describe

    heads, kind = describe(model.config).shape.heads, model.config.model_type
    projections = ("k_proj", "qkv_proj", "query_key_value")
    if not any(name.endswith(projections) and style == "colwise" for name, style in model.tp_plan.items()):
        raise ValueError(f"transformers has no plan that divides the KV heads of a {kind}: use the backend deepspeed.")
    if heads % tp:
        raise ValueError(
            f"transformers cannot divide {heads} KV heads over {tp} ranks: use the backend deepspeed, or ranks that "
            f"divide {heads}."
        )


def _style(name: str, plan: dict[str, str]) -> str:
    """The style of a parameter: its own, or its module's."""
    generic = re.sub(r"\.\d+(?=\.)", ".*", name)
    return plan.get(generic) or plan.get(generic.rpartition(".")[0]) or ""


def _dim(style: str, name: str, dims: int) -> int | None:
    """Which dimension a style of transformers cuts, or None where every rank holds all."""
    if style.startswith(("colwise", "packed_colwise")):
        return max(dims - 2, 0)
    if style.startswith(("rowwise", "packed_rowwise")):
        return None if name.endswith(".bias") else dims - 1
    return {"embedding_rowwise": 0, "embedding_colwise": 1}.get(style)


def _autotp(model: Any, tp: int) -> Iterator[Part]:
    """As `kvpolicy_deepspeed` lets AutoTP divide it: linears of the layers, the head, and experts that are fused."""
    from kvpolicy.families import find_sites

    heads = _Heads.of(model.config, tp)
    inside = [module for site in find_sites(model).layers for module in site.attention.modules()]
    attending = {id(module) for module in inside if isinstance(module, nn.Linear)}
    if not attending:
        raise ValueError(f"AutoTP divides linear layers, and the attention of a {model.config.model_type} has none.")
    summed, head = _summed(model), model.get_output_embeddings()
    for path, module in model.named_modules():
        own, name = dict(module.named_parameters(recurse=False)), _inside(path)
        fused = {"gate_up_proj", "down_proj"} <= own.keys()
        linear = isinstance(module, nn.Linear) and (module is head or (name and name not in _ROUTERS))
        sums = module is head or name in summed  # so its inputs are divided, and its bias is added behind the sum
        for key, parameter in own.items():
            if fused:
                yield _evenly(parameter, *((2, 1) if key == "down_proj" else (1, 2)), tp)
            elif not linear or (sums and key == "bias"):
                yield Part((parameter.numel(),) * tp, True)
            elif id(module) in attending:
                dim = 1 if sums else 0
                yield _cut(parameter, dim, heads.held(parameter.shape[dim]))
            else:
                yield _evenly(parameter, 1 if sums else 0, 2 if "gate_up" in name else 1, tp)


_ROUTERS = ("mlp.gate", "mlp.shared_expert_gate")
"""Linears that stay whole."""


class _Heads(NamedTuple):
    """Query and KV heads of a model, and of each rank."""

    queries: int
    keys: int
    dim: int
    own_queries: list[int]
    own_keys: list[int]

    @classmethod
    def of(cls, config: Any, tp: int) -> _Heads:
        from kvpolicy.families import describe

        shape, queries = describe(config).shape, int(config.get_text_config(decoder=True).num_attention_heads)
        keys = shape.heads
        if queries < tp:
            raise ValueError(f"{queries} query heads cannot be divided over {tp} ranks: give at most {queries}.")
        if keys < tp and not tp % keys and not queries % tp:  # each KV head is held by several ranks
            return cls(queries, keys, shape.head_dim, _share(queries, tp), [1] * tp)
        own = _share(keys, tp)
        return cls(queries, keys, shape.head_dim, [count * (queries // keys) for count in own], own)

    def held(self, size: int) -> list[int]:
        """Rows or columns of each rank, of as many as all queries, all keys, or queries with keys and values have."""
        units = size // self.dim
        if units == self.queries:
            own = self.own_queries
        elif units == self.keys:
            own = self.own_keys
        else:
            own = [queries + 2 * keys for queries, keys in zip(self.own_queries, self.own_keys, strict=True)]
        return [self.dim * count for count in own]


def _evenly(parameter: nn.Parameter, dim: int, pieces: int, tp: int) -> Part:
    """Cut a dimension, or each of its pieces, into parts as equal as they can be."""
    return _cut(parameter, dim, [pieces * size for size in _share(parameter.shape[dim] // pieces, tp)])


def _share(count: int, tp: int) -> list[int]:
    return [count // tp + (rank < count % tp) for rank in range(tp)]


def _cut(parameter: nn.Parameter, dim: int, sizes: list[int]) -> Part:
    line = parameter.numel() // parameter.shape[dim]
    return Part(tuple(line * size for size in sizes), False)


def _inside(path: str) -> str:
    """A module's name with its parent's below its layer, as AutoTP calls it; nothing outside of the layers."""
    below = re.split(r"\.\d+\.", path)[1:]
    return ".".join(["", *below[-1].split(".")][-2:]) if below else ""


def _summed(model: nn.Module) -> set[str]:
    """Linears behind which ranks are summed, which AutoTP knows by name or by the norm that follows."""
    known = ("out_proj", "o_proj", "down_proj", "attention.dense", "attn.dense")
    found: set[str] = set()
    for stack in model.modules():
        for layer in stack if isinstance(stack, nn.ModuleList) else ():
            names = list(_names(layer))
            found.update(name for name in names if any(part in name for part in known))
            found.update(names[at - 1] for at, name in enumerate(names) if name == "norm")
    return found - {"norm"}


def _names(module: nn.Module, parent: str = "") -> Iterator[str]:
    for key, child in module.named_children():
        if isinstance(child, nn.Linear):
            yield f"{parent}.{key}"
        elif isinstance(child, nn.LayerNorm):
            yield "norm"
        else:
            yield from _names(child, key)
