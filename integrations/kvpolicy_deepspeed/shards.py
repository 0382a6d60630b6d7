"""Which part of every matrix a rank holds, family by family."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

Kind = Literal["queries", "keys", "stacked", "by_group", "even", "halves", "from_queries", "from_even"]
"""How a matrix is divided. Its outputs: by query heads, by KV heads, queries then keys then values, per KV head its
queries with key and value, evenly, or evenly in each half. Its inputs, the outputs being summed over the ranks:
by query heads, or evenly."""

SUMMED = ("from_queries", "from_even")


def even(total: int, rank: int, size: int) -> range:
    """A rank's part of `total` things, the first ranks having one more where they do not divide."""
    each, more = divmod(total, size)
    first = rank * each + min(rank, more)
    return range(first, first + each + (rank < more))


def aligned(total: int, rank: int, size: int) -> range:
    """A rank's part of an expert's inner size, in units of 8 or 4: a grouped product wants rows of 16 bytes."""
    unit = next((unit for unit in (8, 4) if total % unit == 0 and total // unit >= size), 1)
    units = even(total // unit, rank, size)
    return range(units.start * unit, units.stop * unit)


class Heads(NamedTuple):
    """A model's attention heads, and which of them one rank holds.

    Attributes:
        all_queries: Query heads of the model.
        all_keys: KV heads of the model.
        dim: Size of a head.
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
    def of(cls, config: Any, rank: int, size: int) -> Heads:
        """Divide a model's heads: each KV head goes with its queries, or to several ranks where there are fewer."""
        from kvpolicy.families import describe

        shape = describe(config).shape
        queries, keys = int(config.num_attention_heads), shape.heads
        if keys < size and size % keys == 0 and queries % size == 0:
            replicas = size // keys
            first = rank // replicas
            return cls(queries, keys, shape.head_dim, even(queries, rank, size), range(first, first + 1), replicas)
        own, group = even(keys, rank, size), queries // keys
        return cls(queries, keys, shape.head_dim, range(own.start * group, own.stop * group), own, 1)

    @property
    def group(self) -> int:
        """Query heads of each KV head, in the whole model."""
        return self.all_queries // self.all_keys


class Part(NamedTuple):
    """A part of a tensor: some ranges of one of its dimensions, one behind the other."""

    dim: int
    ranges: list[range]

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """What is left of a shape."""
        return (*whole[: self.dim], sum(map(len, self.ranges)), *whole[self.dim + 1 :])


def part(kind: Kind, whole: tuple[int, ...], heads: Heads, rank: int, size: int) -> Part:
    """The part of a matrix, of its bias, or of all experts' matrices, that a rank holds."""
    outputs, divided = (1, aligned) if len(whole) == 3 else (0, even)  # of all experts' matrices, experts come first
    if kind == "from_queries":
        return Part(1, [_rows(heads.queries, heads.dim)])
    if kind == "from_even":
        return Part(outputs + 1, [divided(whole[outputs + 1], rank, size)])
    if kind == "even":
        return Part(outputs, [divided(whole[outputs], rank, size)])
    if kind == "halves":
        half = whole[outputs] // 2
        own = divided(half, rank, size)
        return Part(outputs, [own, range(own.start + half, own.stop + half)])
    return Part(outputs, [_rows(units, heads.dim) for units in _units(kind, heads)])


def _rows(units: range, dim: int) -> range:
    return range(units.start * dim, units.stop * dim)


def _units(kind: Kind, heads: Heads) -> list[range]:
    """Which heads of a projection a rank holds, in the order in which the projection has them."""
    if kind == "queries":
        return [heads.queries]
    if kind == "keys":
        return [heads.keys]
    if kind == "stacked":
        keys = [range(heads.keys.start + more, heads.keys.stop + more) for more in (0, heads.all_keys)]
        return [heads.queries, *(range(k.start + heads.all_queries, k.stop + heads.all_queries) for k in keys)]
    found: list[range] = []
    for key in heads.keys:  # by_group: the queries of a KV head, its key, its value
        first, base = key * heads.group, key * (heads.group + 2)
        own = range(max(heads.queries.start, first) - first, min(heads.queries.stop, first + heads.group) - first)
        found += [range(base + own.start, base + own.stop), range(base + heads.group, base + heads.group + 2)]
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """How the layers of a kind of model are divided.

    Attributes:
        matrices: By name inside a layer.
        native: Whether transformers' own tensor parallelism divides its heads.
        renames: What its checkpoints call otherwise: pattern and replacement.
        experts: How checkpoints name one expert's matrices: gate, up, down.
    """

    matrices: dict[str, Kind]
    native: bool = True
    renames: dict[str, str] = field(default_factory=dict)
    experts: tuple[str, str, str] | None = None

    def rename(self, key: str) -> str:
        """A checkpoint's name of a tensor, as the model has it."""
        for old, new in self.renames.items():
            key = re.sub(old, new, key)
        return key

    def expert(self, key: str) -> tuple[str, int, int] | None:
        """Of one expert's matrix, the name of all experts' module, which expert, and which of its three matrices."""
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
"""Families whose division is tested, by the `model_type` of their configs."""
