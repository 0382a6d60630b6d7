"""Defects in the codec lowrank: its directions, ranks of layers, and heads that have directions together."""

from __future__ import annotations

from tests.mutants import Mutation

MUTATIONS = (
    Mutation(
        name="latent vectors are of keys with their mean",
        file="kvpolicy/codecs/projection.py",
        old="found = (x.double() - self.mean) @ self.encode.double()",
        new="found = x.double() @ self.encode.double()",
        tests=("tests/codecs/test_lowrank.py",),
    ),
    Mutation(
        name="a rank takes the directions of least variance",
        file="kvpolicy/codecs/projection.py",
        old="components = orthonormal(directions)[..., : rank * basis.group]",
        new="components = orthonormal(directions)[..., -rank * basis.group :]",
        tests=("tests/conformance/test_codes.py::test_all_dimensions",),
    ),
    Mutation(
        name="directions for scores are weighted by the moment of queries and not by its root",
        file="kvpolicy/codecs/projection.py",
        old="root = (queries * energy.sqrt()[:, None]) @ queries.mT",
        new="root = (queries * energy[:, None]) @ queries.mT",
        tests=("tests/codecs/test_lowrank.py",),
    ),
    Mutation(
        name="a sum of latent values has the mean of values once",
        file="kvpolicy/codecs/lowrank/lowrank.py",
        old="own.sum(-1, keepdim=True) * projection.mean",
        new="projection.mean",
        tests=("tests/conformance/test_codes.py",),
    ),
    Mutation(
        name="scores of latent keys lack the mean of keys",
        file="kvpolicy/codecs/lowrank/lowrank.py",
        old="return scores + own @ projection.mean.mT",
        new="return scores",
        tests=("tests/codecs/test_lowrank.py",),
    ),
    Mutation(
        name="the energy of one head divides the ranks of all",
        file="kvpolicy/codecs/lowrank/ranks.py",
        old="along = energy.sum(0).unflatten(0, (-1, size)).sum(-1)",
        new="along = energy[0].square().unflatten(0, (-1, size)).sum(-1)",
        tests=("tests/codecs/test_lowrank_ranks.py",),
    ),
    Mutation(
        name="ranks are divided by energies that are no shares of their side",
        file="kvpolicy/codecs/lowrank/ranks.py",
        old="return along / along.sum().clamp_min(torch.finfo(along.dtype).tiny)",
        new="return along",
        tests=("tests/codecs/test_lowrank_ranks.py",),
    ),
    Mutation(
        name="ranks follow the Fisher information and not its root",
        file="kvpolicy/codecs/lowrank/ranks.py",
        old='device="cpu").flatten().sqrt()',
        new='device="cpu").flatten()',
        tests=("tests/codecs/test_lowrank_ranks.py",),
    ),
    Mutation(
        name="each layer has the mean rank",
        file="kvpolicy/codecs/lowrank/lowrank.py",
        old="index: replace(self, rank=own.keys, value_rank=own.values,",
        new="index: replace(self,",
        tests=("tests/codecs/test_lowrank_ranks.py",),
    ),
    Mutation(
        name="a direction goes to the side that keeps the most",
        file="kvpolicy/codecs/lowrank/ranks.py",
        old="heapq.heappush(least, (kept[side][found[side] - 1], side))",
        new="heapq.heappush(least, (-kept[side][found[side] - 1], side))",
        tests=("tests/codecs/test_lowrank_ranks.py",),
    ),
    Mutation(
        name="a side may have no direction by energy",
        file="kvpolicy/codecs/lowrank/ranks.py",
        old="largest = shares[:, 1:].flatten()",
        new="largest = shares[:, :-1].flatten()",
        tests=("tests/codecs/test_lowrank_ranks.py",),
    ),
    Mutation(
        name="heads of a group write the latent vector of the first of them",
        file="kvpolicy/codecs/projection.py",
        old="found.unflatten(1, (-1, group)).sum(2)",
        new="found.unflatten(1, (-1, group))[:, :, 0]",
        tests=("tests/codecs/test_lowrank_joint.py",),
    ),
    Mutation(
        name="each head decodes the part of the next head",
        file="kvpolicy/codecs/projection.py",
        old="decode = decode.unflatten(-1, (basis.group, -1)).transpose(1, 2).flatten(0, 1)",
        new="decode = decode.unflatten(-1, (basis.group, -1)).transpose(1, 2).flip(1).flatten(0, 1)",
        tests=("tests/codecs/test_lowrank_joint.py",),
    ),
    Mutation(
        name="slots that a head reads are those of another head of its group",
        file="kvpolicy/codecs/lowrank/lowrank.py",
        old="return read(store, self._by_group(at[..., None])[..., 0]).unflatten(2, (group, -1)).flatten(1, 2)",
        new="return read(store, at[:, ::group]).repeat_interleave(group, 1)",
        tests=("tests/codecs/test_lowrank_joint.py",),
    ),
    Mutation(
        name="the products of a group's queries count each head alone",
        file="kvpolicy/codecs/projection.py",
        old="blocks = [torch.block_diag(*block) for block in each.split(basis.group)]",
        new="blocks = [torch.block_diag(*block.flip(0)) for block in each.split(basis.group)]",
        tests=("tests/codecs/test_lowrank_ranks.py",),
    ),
    Mutation(
        name="a rank of a model reads the first groups of heads",
        file="kvpolicy/codecs/projection.py",
        old="return slice(heads.start // group, heads.stop // group)",
        new="return slice(0, (heads.stop - heads.start) // group)",
        tests=("tests/codecs/test_lowrank_joint.py",),
    ),
)
