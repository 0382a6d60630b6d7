"""Defects in the sharding of models over ranks."""

from __future__ import annotations

from tests.mutants import Mutation

MUTATIONS = (
    Mutation(
        name="shards of experts are not aligned",
        file="kvpolicy/parallel/sharding.py",
        old="divided = aligned if fused_experts else even",
        new="divided = even",
        tests=("tests/test_parallel.py", "tests/test_weights.py", "tests/deepspeed/test_families.py"),
    ),
    Mutation(
        name="experts that are just large enough are not aligned",
        file="kvpolicy/parallel/sharding.py",
        old="total // unit >= size",
        new="total // unit > size",
        tests=("tests/test_parallel.py", "tests/test_weights.py"),
        equivalent="Where every rank has exactly one unit, smaller units give it the same rows.",
    ),
    Mutation(
        name="KV heads are replicated although query heads do not divide",
        file="kvpolicy/parallel/sharding.py",
        old="if keys < size and size % keys == 0 and queries % size == 0:",
        new="if keys < size and size % keys == 0:",
        tests=("tests/test_parallel.py",),
    ),
    Mutation(
        name="a replicated group has the queries of the first rank",
        file="kvpolicy/parallel/sharding.py",
        old="own = range(max(heads.queries.start, first) - first, ",
        new="own = range(0, ",
        tests=("tests/test_parallel.py", "tests/test_weights.py", "tests/deepspeed/test_families.py"),
    ),
    Mutation(
        name="twins are counted from the first process of the job",
        file="kvpolicy/parallel/runtime.py",
        old="members = everyone[first : first + replicas]",
        new="members = list(range(first, first + replicas))",
        tests=("tests/test_parallel.py",),
    ),
    Mutation(
        name="the group of a mesh of several dimensions is not that of tensor parallelism",
        file="kvpolicy/parallel/runtime.py",
        old='mesh.get_group("tp") if mesh.ndim > 1 else mesh.get_group()',
        new="mesh.get_group(0)",
        tests=("tests/test_parallel.py",),
    ),
    Mutation(
        name="biases of summed matrices are sharded over their outputs",
        file="kvpolicy/parallel/sharding.py",
        old='elif kind is None or (leaf == "bias" and kind in SUMMED):',
        new="elif kind is None:",
        tests=("tests/test_weights.py", "tests/deepspeed/test_families.py"),
    ),
    Mutation(
        name="means of replicated heads are too large",
        file="kvpolicy/kernels/ranks.py",
        old="count = x.shape[2] * self.replicas",
        new="count = x.shape[2]",
        tests=("tests/test_parallel.py",),
    ),
    Mutation(
        name="the phantom head counts in sums",
        file="kvpolicy/kernels/ranks.py",
        old="gather(torch.zeros_like(x) if self.phantom else x, self.size",
        new="gather(x, self.size",
        tests=("tests/robust/test_uneven_heads.py", "tests/parallel/test_exact.py"),
    ),
)
