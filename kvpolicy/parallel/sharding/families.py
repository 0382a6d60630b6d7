"""The model families that can be sharded, and checks of what cannot."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from kvpolicy.text.errors import KVPolicyError

Kind = Literal["queries", "keys", "stacked", "by_group", "even", "halves", "from_queries", "from_even"]
"""How a matrix is sharded.

Over its outputs: by query heads (`queries`), by KV heads (`keys`), a fused matrix of all queries, keys and values
(`stacked`), a fused matrix with the queries, key and value of each KV head (`by_group`), evenly, or evenly in each of
two halves. Over its inputs, with the outputs summed over the ranks: by query heads (`from_queries`), or evenly.
"""


SUMMED = ("from_queries", "from_even")
"""The kinds that are sharded over their inputs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """How the layers of a model family are sharded.

    Attributes:
        matrices: The kind of each matrix, by its name in a layer.
        native: Whether the tensor parallelism of transformers shards its heads.
        renames: Names that differ in its checkpoints: patterns and replacements.
        experts: Names of the gate, up and down matrix of an expert in its checkpoints.
    """

    matrices: dict[str, Kind]
    native: bool = True
    renames: dict[str, str] = field(default_factory=dict)
    experts: tuple[str, str, str] | None = None

    def rename(self, key: str) -> str:
        """The name in the model of a tensor in a checkpoint."""
        for old, new in self.renames.items():
            key = re.sub(old, new, key)
        return key

    def expert(self, key: str) -> tuple[str, int, int] | None:
        """The experts' module, the expert and the index of its matrix that a key names; None for other tensors."""
        found = re.fullmatch(r"(.+\.experts)\.(\d+)\.(\w+)\.weight", key)
        if found is None or self.experts is None or found[3] not in self.experts:
            return None
        return found[1], int(found[2]), self.experts.index(found[3])


_ATTENTION: dict[str, Kind] = {
    "self_attn.q_proj": "queries",
    "self_attn.k_proj": "keys",
    "self_attn.v_proj": "keys",
    "self_attn.o_proj": "from_queries",
}
_DENSE: dict[str, Kind] = {"mlp.gate_proj": "even", "mlp.up_proj": "even", "mlp.down_proj": "from_even"}
_EXPERTS: dict[str, Kind] = {"mlp.experts.gate_up_proj": "halves", "mlp.experts.down_proj": "from_even"}
_SHARED: dict[str, Kind] = {name.replace("mlp", "mlp.shared_expert"): kind for name, kind in _DENSE.items()}
_WIDE: dict[str, Kind] = {"mlp.dense_h_to_4h": "even", "mlp.dense_4h_to_h": "from_even"}
_NEOX: dict[str, Kind] = {"attention.query_key_value": "by_group", "attention.dense": "from_queries"}
_FALCON: dict[str, Kind] = {name.replace("attention", "self_attention"): kind for name, kind in _NEOX.items()}
_LLAMA = Family(matrices=_ATTENTION | _DENSE)
_GATES = ("gate_proj", "up_proj", "down_proj")

FAMILIES: dict[str, Family] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "mixtral": Family(
        matrices=_ATTENTION | _EXPERTS, renames={r"\.block_sparse_moe\.": ".mlp."}, experts=("w1", "w3", "w2")
    ),
    "qwen2_moe": Family(matrices=_ATTENTION | _DENSE | _SHARED | _EXPERTS, experts=_GATES),
    "qwen3_moe": Family(matrices=_ATTENTION | _DENSE | _EXPERTS, experts=_GATES),
    "phi3": Family(
        matrices={
            "self_attn.qkv_proj": "stacked",
            "self_attn.o_proj": "from_queries",
            "mlp.gate_up_proj": "halves",
            "mlp.down_proj": "from_even",
        },
        native=False,
    ),
    "gpt_neox": Family(
        matrices=_NEOX | _WIDE,
        renames={r"^embed_out\.": "lm_head."},
    ),
    "opt": Family(
        matrices={
            "self_attn.q_proj": "queries",
            "self_attn.k_proj": "keys",
            "self_attn.v_proj": "keys",
            "self_attn.out_proj": "from_queries",
            "fc1": "even",
            "fc2": "from_even",
        },
        native=False,
    ),
    "falcon": Family(
        matrices=_FALCON | _WIDE,
        native=False,
    ),
}
"""The families whose sharding is tested, by the `model_type` of their configs."""


def check_family(model_type: str, backend: str) -> None:
    """Raise KVPolicyError if a backend is not tested with a model family.

    Examples:
        >>> check_family("llama", "hf")
    """
    known = sorted(name for name, family in FAMILIES.items() if backend == "deepspeed" or family.native)
    if model_type not in known:
        advice = 'try backend="deepspeed"' if model_type in FAMILIES else "no other backend shards it"
        raise KVPolicyError(
            f'The model type must be one of {", ".join(known)} with backend="{backend}", got {model_type}; {advice}.'
        )


def check_heads(model_type: str, backend: str, *, queries: int, keys: int, size: int) -> None:
    """Raise KVPolicyError if a backend cannot shard the heads of a model over the ranks.

    Args:
        model_type: The family.
        backend: `deepspeed` or `hf`.
        queries: Query heads of the model.
        keys: KV heads of the model.
        size: The tensor parallel size.

    Examples:
        >>> check_heads("llama", "deepspeed", queries=8, keys=2, size=4)
    """
    if backend == "hf" and keys % size:
        raise KVPolicyError(
            f'The number of ranks must divide the {keys} KV heads with backend="hf", got {size}; try '
            'backend="deepspeed", which replicates heads.'
        )
    if model_type == "falcon" and keys < size and (size % keys or queries % size):
        raise KVPolicyError(
            f"The number of ranks must divide the {queries} query heads of this Falcon and be a multiple of its {keys} "
            f"KV head(s), got {size}."
        )
    if queries < size:
        raise KVPolicyError(f"The number of ranks must be at most {queries}, the number of query heads, got {size}.")
