"""Defects in mergers."""

from __future__ import annotations

from tests.mutants import Mutation

MUTATIONS = (
    Mutation(
        name="every tile has the counts of the first",
        file="kvpolicy/mergers/_common.py",
        old="mass = mass * candidates.counts.gather(-1, at).exp()",
        new="mass = mass * candidates.counts[..., : mass.shape[-1]].exp()",
        tests=("tests/mergers/test_tiles.py",),
    ),
    Mutation(
        name="a target is looked for in the first block",
        file="kvpolicy/mergers/_common.py",
        old="(block * BLOCK + first)",
        new="(block * 0 + first)",
        tests=("tests/mergers/test_blocks.py",),
    ),
    Mutation(
        name="all heads add to the targets of the first",
        file="kvpolicy/mergers/_common.py",
        old="index_add_(0, flat_slots(index, targets),",
        new="index_add_(0, index.flatten(),",
        tests=("tests/mergers/test_blocks.py",),
    ),
    Mutation(
        name="the cosine of a victim is not divided by its length",
        file="kvpolicy/mergers/_common.py",
        old=" / _lengths(slots.keys) / _lengths(own)",
        new=" / _lengths(slots.keys)",
        tests=("tests/mergers/test_merge.py", "tests/mergers/test_d2o.py"),
    ),
    Mutation(
        name="the length of a key is computed in its own dtype",
        file="kvpolicy/mergers/_common.py",
        old="torch.linalg.vector_norm(keys, dim=-1, dtype=torch.float32).clamp_min(_TINY)",
        new="torch.linalg.vector_norm(keys, dim=-1).float().clamp_min(_TINY)",
        tests=("tests/mergers/test_targets.py",),
    ),
    Mutation(
        name="a victim at the smallest cosine exactly is dropped",
        file="kvpolicy/mergers/merge.py",
        old="write_mask=(cosine >= self.least)",
        new="write_mask=(cosine > self.least)",
        tests=("tests/mergers/test_targets.py",),
    ),
    Mutation(
        name="the newest token may take the evicted ones in",
        file="kvpolicy/mergers/compensate.py",
        old="positions < (candidates.length - 1)[:, None, None]",
        new="positions < candidates.length[:, None, None]",
        tests=("tests/mergers/test_compensate.py", "tests/conformance/test_mergers.py"),
    ),
    Mutation(
        name="a head without evicted tokens forgets its compensation slot",
        file="kvpolicy/mergers/compensate.py",
        old="state.host.copy_(torch.where(there.squeeze(-1), host, state.host))",
        new="state.host.copy_(host)",
        tests=("tests/mergers/test_compensate.py", "tests/conformance/test_mergers.py"),
    ),
    Mutation(
        name="the threshold of a head moves to zero where nothing is evicted",
        file="kvpolicy/mergers/d2o.py",
        old="self._move(state, average, count > 0)",
        new="self._move(state, average, count >= 0)",
        tests=("tests/mergers/test_d2o.py", "tests/conformance/test_mergers.py"),
    ),
    Mutation(
        name="the mean of equal cosines may be above them",
        file="kvpolicy/mergers/d2o.py",
        old="average = (total / count.clamp_min(1)).minimum(largest)",
        new="average = total / count.clamp_min(1)",
        tests=("tests/mergers/test_d2o.py",),
    ),
    Mutation(
        name="the oldest of the recent tokens changes",
        file="kvpolicy/mergers/regress.py",
        old="newest = positions >= (candidates.length - self.recent)[:, None, None]",
        new="newest = positions > (candidates.length - self.recent)[:, None, None]",
        tests=("tests/mergers/test_regress.py", "tests/conformance/test_mergers.py"),
    ),
    Mutation(
        name="queries that only the selector asked for are regressed on",
        file="kvpolicy/mergers/regress.py",
        old="rows = group_rows(attention[:, :, -self.window :], candidates)",
        new="rows = group_rows(attention, candidates)",
        tests=("tests/mergers/test_regress.py", "tests/conformance/test_mergers.py"),
    ),
    Mutation(
        name="replayed queries are counted from the start of the text and not of the chunk",
        file="kvpolicy/engine/replayed_queries.py",
        old="column = own + columns - chunk.columns.shape[1] - start",
        new="column = own - start",
        tests=("tests/engine/test_replayed_queries.py",),
    ),
    Mutation(
        name="a tile of a replay forgets the queries of those before",
        file="kvpolicy/engine/replayed_queries.py",
        old="torch.where(here[:, None, :, None], q.gather(2, index), self.queries)",
        new="q.gather(2, index) * here[:, None, :, None]",
        tests=("tests/engine/test_replayed_queries.py",),
    ),
    Mutation(
        name="the later of two nearest positions is taken",
        file="kvpolicy/mergers/_common.py",
        old="index = (distance == best).to(torch.uint8).argmax(-1)",
        new="index = distance.shape[-1] - 1 - (distance == best).to(torch.uint8).flip(-1).argmax(-1)",
        tests=("tests/mergers/test_merge.py",),
    ),
    Mutation(
        name="of equal slots the first one takes a victim in, and not the earliest position",
        file="kvpolicy/mergers/_common.py",
        old="index = torch.where(best & slots.there, slots.positions, _FAR).argmin(-1, keepdim=True)",
        new="index = (best & slots.there).to(torch.uint8).argmax(-1, keepdim=True)",
        tests=("tests/mergers/test_merge.py", "tests/mergers/test_targets.py", "tests/conformance/test_mergers.py"),
    ),
    Mutation(
        name="values that are not kept weigh in the regression",
        file="kvpolicy/mergers/regress.py",
        old="free = free.masked_fill(~self._changeable(candidates)[:, :, None], 0)",
        new="free = free * 1",
        tests=("tests/mergers/test_regress.py",),
    ),
    Mutation(
        name="products of fp16 keys overflow",
        file="kvpolicy/mergers/_common.py",
        old="own = unit(victim.keys) if slots.keys.dtype == torch.float16 else victim.keys",
        new="own = victim.keys",
        tests=("tests/mergers/test_targets.py",),
    ),
)
