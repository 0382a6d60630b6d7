"""How a model is sharded over ranks: one table, from which plans count bytes and loaders fill parameters."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from torch import nn

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
        renames: Names that differ in its checkpoints: patterns and replacements.
        experts: Names of the gate, up and down matrix of an expert in its checkpoints.
    """

    matrices: dict[str, Kind]
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
    ),
    "falcon": Family(
        matrices=_FALCON | _WIDE,
    ),
}
"""The families that DeepSpeed shards as tested, by the `model_type` of their configs."""

_BY_PLAN = (
    "afmoe cohere cohere2 deepseek_v2 deepseek_v3 exaone4 falcon_h1 flint gemma2 gemma3_text gemma3n_text gemma4_text "
    "glm4 gpt_neox gpt_oss granite granite_swa granitemoe_swa granitemoehybrid hyperclovax kimi_linear lfm2 llama "
    "mimo_v2_flash minicpm3 mistral mixtral nemotron_h olmo2 phi phi3 qwen2 qwen2_moe qwen3 qwen3_5_text qwen3_moe "
    "qwen3_next starcoder2"
)
BY_PLAN = frozenset(_BY_PLAN.split())
"""The families that transformers shards as tested, by the `model_type` of the configs of their text decoders."""


def check_family(model_type: str, backend: str) -> None:
    """Raise KVPolicyError if a backend is not tested with a model family.

    Examples:
        >>> check_family("llama", "hf")
    """
    tables = {"deepspeed": FAMILIES.keys(), "hf": BY_PLAN}
    if model_type not in tables[backend]:
        other = next((name for name, types in tables.items() if model_type in types), None)
        advice = "no other backend shards it" if other is None else f'try backend="{other}"'
        known = ", ".join(sorted(tables[backend]))
        raise KVPolicyError(
            f'The model type must be one of {known} with backend="{backend}", got {model_type}; {advice}.'
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
        advice = 'try backend="deepspeed", which replicates heads' if model_type in FAMILIES else "try fewer ranks"
        raise KVPolicyError(
            f'The number of ranks must divide the {keys} KV heads with backend="hf", got {size}; {advice}.'
        )
    if model_type == "falcon" and keys < size and (size % keys or queries % size):
        raise KVPolicyError(
            f"The number of ranks must divide the {queries} query heads of this Falcon and be a multiple of its {keys} "
            f"KV head(s), got {size}."
        )
    if queries < size:
        raise KVPolicyError(f"The number of ranks must be at most {queries}, the number of query heads, got {size}.")


def even(total: int, rank: int, size: int) -> range:
    """A rank's shard of `total` items; the first ranks hold one more where `size` does not divide `total`.

    Examples:
        >>> [even(5, rank, 2) for rank in range(2)]
        [range(0, 3), range(3, 5)]
    """
    each, more = divmod(total, size)
    first = rank * each + min(rank, more)
    return range(first, first + each + (rank < more))


def aligned(total: int, rank: int, size: int) -> range:
    """A rank's shard of an expert's intermediate size, in multiples of 8 or 4.

    Grouped matrix products require rows that are aligned to 16 bytes.
    """
    unit = next((unit for unit in (8, 4) if total % unit == 0 and total // unit >= size), 1)
    units = even(total // unit, rank, size)
    return range(units.start * unit, units.stop * unit)


class Heads(NamedTuple):
    """A model's attention heads, and which of them one rank holds.

    Attributes:
        all_queries: Query heads of the model.
        all_keys: KV heads of the model.
        dim: Head dimension.
        queries: The query heads of this rank.
        keys: The KV heads of this rank.
        replicas: How many ranks hold each KV head.
    """

    all_queries: int
    all_keys: int
    dim: int
    queries: range
    keys: range
    replicas: int

    @classmethod
    def shard(cls, queries: int, keys: int, dim: int, *, rank: int, size: int) -> Heads:
        """Shard a model's heads: every KV head stays with its query heads.

        A model with fewer KV heads than ranks has each of them replicated on several ranks.

        Args:
            queries: Query heads of the model.
            keys: KV heads of the model.
            dim: Head dimension.
            rank: Which rank.
            size: The tensor parallel size.

        Examples:
            >>> Heads.shard(8, 2, 64, rank=1, size=2)[3:]
            (range(4, 8), range(1, 2), 1)
            >>> Heads.shard(8, 2, 64, rank=1, size=4)[3:]
            (range(2, 4), range(0, 1), 2)
        """
        if keys < size and size % keys == 0 and queries % size == 0:
            replicas = size // keys
            first = rank // replicas
            return cls(queries, keys, dim, even(queries, rank, size), range(first, first + 1), replicas)
        # A KV head is never split: with fewer heads than ranks that do not replicate evenly, some ranks hold none.
        own = even(keys, rank, size)
        group = queries // keys
        return cls(queries, keys, dim, range(own.start * group, own.stop * group), own, 1)

    @property
    def group(self) -> int:
        """Query heads per KV head, in the whole model."""
        return self.all_queries // self.all_keys


class ShardedPart(NamedTuple):
    """A shard of a tensor: ranges of one of its dimensions, concatenated."""

    dim: int
    ranges: list[range]

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the shard of a tensor with the shape `whole`."""
        return (*whole[: self.dim], sum(map(len, self.ranges)), *whole[self.dim + 1 :])


def part(kind: Kind, whole: tuple[int, ...], heads: Heads, rank: int, size: int) -> ShardedPart:
    """The shard of a matrix, a bias, or a fused tensor of all experts, that a rank holds."""
    fused_experts = len(whole) == 3  # [experts, outputs, inputs]
    outputs = 1 if fused_experts else 0
    divided = aligned if fused_experts else even
    if kind == "from_queries":
        return ShardedPart(1, [_rows(heads.queries, heads.dim)])
    if kind == "from_even":
        return ShardedPart(outputs + 1, [divided(whole[outputs + 1], rank, size)])
    if kind == "even":
        return ShardedPart(outputs, [divided(whole[outputs], rank, size)])
    if kind == "halves":
        half = whole[outputs] // 2  # gate and up, each sharded for itself
        own = divided(half, rank, size)
        return ShardedPart(outputs, [own, range(own.start + half, own.stop + half)])
    return ShardedPart(outputs, [_rows(units, heads.dim) for units in _units(kind, heads)])


def _rows(units: range, dim: int) -> range:
    return range(units.start * dim, units.stop * dim)


def _units(kind: Kind, heads: Heads) -> list[range]:
    """The heads of a fused or plain projection that a rank holds, in the order of the projection."""
    if kind == "queries":
        return [heads.queries]
    if kind == "keys":
        return [heads.keys]
    if kind == "stacked":
        first_key = heads.all_queries
        first_value = heads.all_queries + heads.all_keys
        keys = [range(first + heads.keys.start, first + heads.keys.stop) for first in (first_key, first_value)]
        return [heads.queries, *keys]
    found: list[range] = []
    for key in heads.keys:  # by_group: each KV head has its queries, then its key, then its value
        first = key * heads.group
        base = key * (heads.group + 2)
        # If KV heads are replicated, a rank has only some of the queries of its group.
        own = range(max(heads.queries.start, first) - first, min(heads.queries.stop, first + heads.group) - first)
        found += [range(base + own.start, base + own.stop), range(base + heads.group, base + heads.group + 2)]
    return found


class Slot(NamedTuple):
    """Shape of a parameter of the sharded model, and its shard on this rank.

    Attributes:
        whole: Shape of the whole tensor.
        part: The shard that this rank holds; None if it holds the whole tensor.
    """

    whole: tuple[int, ...]
    part: ShardedPart | None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the parameter on this rank."""
        return self.part.shape(self.whole) if self.part else self.whole


def kinds(model: nn.Module, family: Family) -> dict[str, Kind]:
    """How each sharded matrix of the model is sharded, by its full name."""
    found: dict[str, Kind] = {}
    for name, _ in model.named_modules():
        inner = re.fullmatch(r".+?\.\d+\.(.+)", name)
        if inner and inner[1] in family.matrices:
            found[name] = family.matrices[inner[1]]
    for name, kind in family.matrices.items():  # fused experts are parameters, and not modules
        if "experts." in name:
            ends = f".{name}"
            found |= {full: kind for full, _ in model.named_parameters() if full.endswith(ends)}
    return found


def slots(model: Any, family: Family, heads: Heads, rank: int, size: int) -> dict[str, Slot]:
    """The shard of every parameter on a rank; a head that is tied to the embedding is a separate parameter.

    Args:
        model: The whole model; its parameters may be on the meta device.
        family: How its layers are sharded.
        heads: The heads of the rank.
        rank: Which rank.
        size: The tensor parallel size.
    """
    divided = kinds(model, family)
    head = model.get_output_embeddings()
    head_name = next(name for name, module in model.named_modules() if module is head)
    found: dict[str, Slot] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        whole = tuple(parameter.shape)
        owner, _, leaf = name.rpartition(".")
        kind = divided.get(name) or divided.get(owner)
        if name == f"{head_name}.weight":  # AutoTP shards the head over its inputs
            found[name] = Slot(whole, ShardedPart(1, [even(whole[1], rank, size)]))
        elif kind is None or (leaf == "bias" and kind in SUMMED):
            found[name] = Slot(whole, None)
        else:
            found[name] = Slot(whole, part(kind, whole, heads, rank, size))
    return found
