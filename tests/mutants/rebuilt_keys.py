"""Defects in keys that a step rebuilds from an index."""

from __future__ import annotations

from tests.mutants import Mutation

REBUILT = ("tests/readers/test_shadowkv.py", "tests/readers/test_rebuilt_keys.py")

MUTATIONS = (
    Mutation(
        name="a short row has stored keys alone, and rebuilt ones in a batch",
        file="kvpolicy/engine/reading.py",
        old="if wanted == slots and not rebuilds:",
        new="if wanted == slots:",
        tests=REBUILT,
    ),
    Mutation(
        name="the basis is of the directions in which keys vary least",
        file="kvpolicy/readers/shadowkv.py",
        old="eigenvectors[..., -rank:]",
        new="eigenvectors[..., :rank]",
        tests=REBUILT,
    ),
    Mutation(
        name="every row gets the basis of a new prompt",
        file="kvpolicy/readers/shadowkv.py",
        old="torch.where(rows[:, None, None, None], found.to(index.vectors.dtype), index.vectors)",
        new="found",
        tests=REBUILT,
    ),
    Mutation(
        name="coefficients are of what stands in empty slots too",
        file="kvpolicy/readers/shadowkv.py",
        old="plain = keys.masked_fill(~occupied[..., None], 0).flatten(2, 3)",
        new="plain = keys.flatten(2, 3)",
        tests=REBUILT,
    ),
    Mutation(
        name="a landmark is the mean over empty slots too",
        file="kvpolicy/readers/common.py",
        old="return total / occupied.sum(-1).clamp_min(1)[..., None]",
        new="return total / vectors.shape[3]",
        tests=REBUILT,
    ),
    Mutation(
        name="the newest tokens have rebuilt keys",
        file="kvpolicy/readers/shadowkv.py",
        old="(positions > last - self.recent)",
        new="(positions > last)",
        tests=REBUILT,
    ),
    Mutation(
        name="one token more has its own key",
        file="kvpolicy/readers/shadowkv.py",
        old="(positions > last - self.recent)",
        new="(positions >= last - self.recent)",
        tests=REBUILT,
    ),
    Mutation(
        name="the first tokens have rebuilt keys",
        file="kvpolicy/readers/shadowkv.py",
        old=" | (positions < self.sinks)",
        new="",
        tests=REBUILT,
    ),
    Mutation(
        name="slots that are named twice count as stored keys twice",
        file="kvpolicy/readers/shadowkv.py",
        old=" & read.chosen & (positions >= 0)",
        new=" & (positions >= 0)",
        tests=REBUILT,
    ),
    Mutation(
        name="rebuilt keys stay without their rotation",
        file="kvpolicy/readers/shadowkv.py",
        old="keys = slots.rotated(self.rebuild_keys(index, read.slots), positions).to(",
        new="keys = self.rebuild_keys(index, read.slots).to(",
        tests=REBUILT,
    ),
    Mutation(
        name="keys are projected with their rotation",
        file="kvpolicy/readers/shadowkv.py",
        old="plain = slots.unrotated(keys, slots.positions.gather(-1, at))",
        new="plain = keys.float()",
        tests=REBUILT,
    ),
    Mutation(
        name="the basis is of keys with their rotation",
        file="kvpolicy/readers/shadowkv.py",
        old="keys = slots.unrotated(slots.keys(at), positions).double()",
        new="keys = slots.keys(at).double()",
        tests=REBUILT,
    ),
    Mutation(
        name="empty slots take part in the basis",
        file="kvpolicy/readers/shadowkv.py",
        old=".double().masked_fill((positions < 0)[..., None], 0)",
        new=".double()",
        tests=REBUILT,
    ),
    Mutation(
        name="padding does not count in the rotation of keys",
        file="kvpolicy/engine/layer_store.py",
        old="            known.copy_(rope_offset)",
        new="            known.zero_()",
        tests=REBUILT,
    ),
    Mutation(
        name="a row that begins in a step has no basis",
        file="kvpolicy/engine/layer_index.py",
        old="or self._is_missing(self.shape, steps)",
        new="or False",
        tests=REBUILT,
    ),
    Mutation(
        name="a row that begins gives every row a new basis",
        file="kvpolicy/engine/layer_index.py",
        old="if not any(due):",
        new="if False:",
        tests=REBUILT,
    ),
    Mutation(
        name="the basis is found once",
        file="kvpolicy/readers/shadowkv.py",
        old="resort=self.rebuild",
        new="resort=2**30",
        tests=REBUILT,
    ),
    Mutation(
        name="a step counts all coefficients",
        file="kvpolicy/readers/shadowkv.py",
        old="slots.rows(held, slots.slots_read * (index.landmarks.shape[1] // held.shape[1]))",
        new="slots.whole(held)",
        tests=REBUILT,
    ),
    Mutation(
        name="shared coefficients are counted for one head",
        file="kvpolicy/readers/shadowkv.py",
        old="slots.slots_read * (index.landmarks.shape[1] // held.shape[1])",
        new="slots.slots_read",
        tests=REBUILT,
    ),
    Mutation(
        name="heads with different tokens share a basis",
        file="kvpolicy/policy/combination.py",
        old="if rebuilds is not None and rebuilds.joint_heads and not same_in_heads(policy.selector):",
        new="if False:",
        tests=REBUILT,
    ),
)
