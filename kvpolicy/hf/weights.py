"""Heads and bytes of weights on each rank of tensor parallelism, from a config alone."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from kvpolicy.hf.division import Divided, divided
from kvpolicy.hf.embedded import ShippedConfig, ShippedModel, as_config
from kvpolicy.hf.meta_model import meta_model
from kvpolicy.hf.model_spec import describe
from kvpolicy.parallel.runtime import Weights
from kvpolicy.parallel.sharding import FAMILIES, Heads, check_family, check_heads, slots
from kvpolicy.text.arguments import named_arguments
from kvpolicy.text.errors import KVPolicyError
from kvpolicy.text.validation import check_size


def heads_of(config: Any, rank: int, size: int) -> Heads:
    """The heads of a model that one rank holds.

    Args:
        config: A transformers config.
        rank: Which rank.
        size: The tensor parallel size.

    Examples:
        >>> from transformers import LlamaConfig
        >>> config = LlamaConfig(num_attention_heads=8, num_key_value_heads=2, hidden_size=512)
        >>> heads_of(config, 0, 2).queries
        range(0, 4)
    """
    shape = describe(config).shape
    queries = int(config.get_text_config(decoder=True).num_attention_heads)
    return Heads.shard(queries, shape.heads, shape.head_dim, rank=rank, size=size)


def check_shardable(config: Any, backend: str, size: int) -> None:
    """Check that a backend is tested with a model, and can shard its heads.

    Args:
        config: A transformers config.
        backend: `deepspeed` or `hf`.
        size: The tensor parallel size.

    Raises:
        KVPolicyError: If it is not, or cannot.
    """
    text = config.get_text_config(decoder=True)
    check_family(config.model_type if backend == "deepspeed" else text.model_type, backend)
    if getattr(config, "quantization_config", None):
        raise KVPolicyError(
            f"Weights must not be quantized to be sharded, got a {config.model_type} with a quantization_config; try a "
            "checkpoint in bfloat16, float16 or float32."
        )
    heads = _divided_heads(config, divided(config) if backend == "hf" else "heads")
    if heads is not None:
        queries = int(text.num_attention_heads)
        check_heads(text.model_type, backend, queries=queries, keys=heads.number, size=size)


class _Heads(NamedTuple):
    """Heads that ranks divide among them: how many, and what messages call them."""

    number: int
    name: str


def _divided_heads(config: Any, parts: Divided) -> _Heads | None:
    """The heads that ranks divide among them; None if every rank computes the attention of all."""
    if parts == "nothing":
        return None
    if parts == "queries":
        return _Heads(int(config.get_text_config(decoder=True).num_attention_heads), "query heads")
    return _Heads(describe(config).shape.heads, "KV heads")


BACKENDS = ("deepspeed", "hf")
"""Backends that may shard a model: DeepSpeed AutoTP, as in `kvpolicy_deepspeed`, or the plan of transformers."""


class Held(NamedTuple):
    """One parameter: how many elements each rank holds of it, and whether it is replicated."""

    held: tuple[int, ...]
    whole: bool


@named_arguments
def weights_per_rank(
    config: Any, *, tp: int = 1, backend: str = "deepspeed", dtype: torch.dtype | None = None
) -> Weights:
    """Count the weights that a rank holds, without loading or allocating any.

    The model is created from its config on the meta device, and its parameters are sharded as the backend would.

    - `deepspeed`: the linear layers, the head and fused experts are sharded. Embeddings, norms and routers are
      replicated, a head that is tied to the embedding is a copy, and KV heads are replicated if there are fewer than
      ranks.
    - `hf`: the plan of the model (`model.tp_plan`), which also shards the embedding and the head.

    Buffers, such as rotary frequencies, are not counted.

    Args:
        config: A transformers config.
        tp: The tensor parallel size.
        backend: Backend that shards the model, `deepspeed` or `hf`.
        dtype: Dtype of the weights; the config's own by default.

    Raises:
        KVPolicyError: If the backend is unknown, or cannot shard this model over so many ranks.

    Examples:
        >>> from transformers import LlamaConfig
        >>> config = LlamaConfig(num_hidden_layers=2, num_attention_heads=4, hidden_size=64, intermediate_size=128)
        >>> weights_per_rank(config, tp=2, backend="hf", dtype=torch.bfloat16)
        Weights(backend='hf', tp=2, replicated=640, sharded=4177920)
    """
    if backend not in BACKENDS:
        raise KVPolicyError(f"backend must be {' or '.join(BACKENDS)}, got {backend!r}.")
    tp = check_size("tp", tp, 1)
    config = as_config(config)
    if dtype is None:
        dtype = describe(config).shape.dtype
    model = _skeleton(config)
    rule = _whole if tp == 1 else {"deepspeed": _autotp, "hf": _own_plan}[backend]
    parts = list(rule(model, tp))
    # Which rank holds the most depends on all parameters together, so each is counted for every rank first.
    fullest = max(range(tp), key=lambda rank: sum(part.held[rank] for part in parts))
    size = {
        whole: sum(part.held[fullest] for part in parts if part.whole is whole) * dtype.itemsize
        for whole in (True, False)
    }
    return Weights(backend=backend, tp=tp, replicated=size[True], sharded=size[False])


def _skeleton(config: Any) -> Any:
    """The model on the meta device."""
    if isinstance(config, ShippedConfig):
        return ShippedModel(config)
    from transformers import AutoModelForCausalLM

    return meta_model(AutoModelForCausalLM, config, trust_remote_code=False)


def _whole(model: nn.Module, tp: int) -> Iterator[Held]:
    for parameter in model.parameters():
        yield Held((parameter.numel(),) * tp, True)


def _own_plan(model: Any, tp: int) -> Iterator[Held]:
    """As transformers shards it: by the styles of the model's plan, with more on the first ranks if it is uneven."""
    _check_plan(model, tp)
    for name, parameter in model.named_parameters():
        style = _style(name, model.tp_plan)
        dim = _dim(style, name, parameter.dim())
        if dim is None:
            yield Held((parameter.numel(),) * tp, True)
            continue
        pieces = 2 if style.startswith("packed") and parameter.dim() > 1 else 1  # gate and up are sharded separately
        size = parameter.shape[dim] // pieces
        each = -(-size // tp)  # rounded up: the last ranks hold less, or nothing
        yield _cut(parameter, dim, [pieces * max(min(each, size - each * rank), 0) for rank in range(tp)])


def _check_plan(model: Any, tp: int) -> None:
    """Raise KVPolicyError if the model has no plan, or it cannot divide the heads of its attention."""
    alternative = "try backend='deepspeed'" if _autotp_can(model.config, tp) else "deepspeed cannot shard it either"
    if not model.tp_plan:
        raise KVPolicyError(
            f"transformers must have a plan to shard the model, got none for {model.config.model_type}; {alternative}."
        )
    heads = _divided_heads(model.config, divided(model.config))
    if heads is not None and heads.number % tp:
        raise KVPolicyError(
            f"tp must divide the {heads.number} {heads.name} with backend='hf', got {tp}; {alternative}."
        )


def _autotp_can(config: Any, tp: int) -> bool:
    try:
        check_shardable(config, "deepspeed", tp)
    except ValueError:
        return False
    return True


def _style(name: str, plan: dict[str, str]) -> str:
    """The style of a parameter in a plan: its own, or that of its module."""
    # Plans name layers by a wildcard: "model.layers.*.self_attn.q_proj".
    generic = re.sub(r"\.\d+(?=\.)", ".*", name)
    return plan.get(generic) or plan.get(generic.rpartition(".")[0]) or ""


def _dim(style: str, name: str, dims: int) -> int | None:
    """The dimension that a style of transformers shards; None if it replicates."""
    if style.startswith(("colwise", "packed_colwise")):
        return max(dims - 2, 0)
    if style.startswith(("rowwise", "packed_rowwise")):
        return None if name.endswith(".bias") else dims - 1
    return {"embedding_rowwise": 0, "embedding_colwise": 1}.get(style)


def _autotp(model: Any, tp: int) -> Iterator[Held]:
    """As AutoTP shards it for `kvpolicy_deepspeed`: linear layers, the head, and fused experts."""
    check_shardable(model.config, "deepspeed", tp)
    family = FAMILIES[model.config.model_type]
    ranks = [slots(model, family, heads_of(model.config, rank, tp), rank, tp) for rank in range(tp)]
    for name, slot in ranks[0].items():
        yield Held(tuple(math.prod(own[name].shape) for own in ranks), slot.part is None)


def _cut(parameter: nn.Parameter, dim: int, sizes: list[int]) -> Held:
    line = parameter.numel() // parameter.shape[dim]
    return Held(tuple(line * size for size in sizes), False)
