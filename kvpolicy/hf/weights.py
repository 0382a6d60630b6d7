"""How many bytes of weights each rank of tensor parallelism holds, from a config alone."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from kvpolicy.hf.heads import check_shardable, heads_of
from kvpolicy.hf.model_spec import describe
from kvpolicy.parallel.sharding import FAMILIES, slots
from kvpolicy.parallel.weights import Weights
from kvpolicy.spec.errors import KVPolicyError

BACKENDS = ("deepspeed", "hf")
"""Who may divide a model: DeepSpeed's AutoTP as `kvpolicy_deepspeed` loads it, or transformers' own plan."""


class Held(NamedTuple):
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
        KVPolicyError: Where the backend is unknown, or cannot divide this model over so many ranks.

    Examples:
        >>> from transformers import LlamaConfig
        >>> config = LlamaConfig(num_hidden_layers=2, num_attention_heads=4, hidden_size=64, intermediate_size=128)
        >>> weights_per_rank(config, tp=2, backend="hf", dtype=torch.bfloat16)
        Weights(backend='hf', tp=2, replicated=640, sharded=4177920)
    """
    if backend not in BACKENDS:
        raise KVPolicyError(f"The backend {backend!r} is not known: use {' or '.join(BACKENDS)}.")
    if tp < 1:
        raise KVPolicyError(f"A model cannot be divided over {tp} ranks: give at least 1.")
    if dtype is None:
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
        raise KVPolicyError(
            f"transformers has no causal language model of the kind {config.model_type}, so its weights cannot be "
            "counted: give the config of one."
        ) from error


def _whole(model: nn.Module, tp: int) -> Iterator[Held]:
    for parameter in model.parameters():
        yield Held((parameter.numel(),) * tp, True)


def _own_plan(model: Any, tp: int) -> Iterator[Held]:
    """As transformers divides it: the styles of the model's own plan, the first ranks having more where it is odd."""
    _check_plan(model, tp)
    for name, parameter in model.named_parameters():
        style = _style(name, model.tp_plan)
        dim = _dim(style, name, parameter.dim())
        if dim is None:
            yield Held((parameter.numel(),) * tp, True)
            continue
        pieces = 2 if style.startswith("packed") and parameter.dim() > 1 else 1  # gate and up are cut one by one
        size = parameter.shape[dim] // pieces
        each = -(-size // tp)
        yield _cut(parameter, dim, [pieces * max(min(each, size - each * rank), 0) for rank in range(tp)])


def _check_plan(model: Any, tp: int) -> None:
    """Raise where the model's plan leaves the KV heads whole, or cannot divide them."""
    heads, kind = describe(model.config).shape.heads, model.config.model_type
    projections = ("k_proj", "qkv_proj", "query_key_value")
    if not any(name.endswith(projections) and style == "colwise" for name, style in model.tp_plan.items()):
        other = ": use the backend deepspeed" if _autotp_can(model.config, tp) else "; deepspeed cannot either"
        raise KVPolicyError(f"transformers has no plan that divides the KV heads of a {kind} over {tp} ranks{other}.")
    if heads % tp:
        other = "the backend deepspeed, or " if _autotp_can(model.config, tp) else ""
        raise KVPolicyError(
            f"transformers cannot divide {heads} KV heads over {tp} ranks: use {other}ranks that divide {heads}."
        )


def _autotp_can(config: Any, tp: int) -> bool:
    try:
        check_shardable(config, "deepspeed", tp)
    except ValueError:
        return False
    return True


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


def _autotp(model: Any, tp: int) -> Iterator[Held]:
    """As `kvpolicy_deepspeed` lets AutoTP divide it: linears of the layers, the head, and experts that are fused."""
    check_shardable(model.config, "deepspeed", tp)
    family = FAMILIES[model.config.model_type]
    ranks = [slots(model, family, heads_of(model.config, rank, tp), rank, tp) for rank in range(tp)]
    for name, slot in ranks[0].items():
        yield Held(tuple(math.prod(own[name].shape) for own in ranks), slot.part is None)


def _cut(parameter: nn.Parameter, dim: int, sizes: list[int]) -> Held:
    line = parameter.numel() // parameter.shape[dim]
    return Held(tuple(line * size for size in sizes), False)
