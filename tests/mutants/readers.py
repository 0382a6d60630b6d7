"""Defects in readers."""

from __future__ import annotations

from tests.mutants import Mutation

MUTATIONS = (
    Mutation(
        name="slots that are read are rounded down to whole pages",
        file="kvpolicy/readers/_common.py",
        old="max(1, -(-wanted // page)) * page",
        new="max(1, wanted // page) * page",
        tests=("tests/readers/test_readers.py",),
    ),
    Mutation(
        name="the smallest numbers of a page are those of its empty slots too",
        file="kvpolicy/readers/quest.py",
        old="smallest = keys.masked_fill(empty, torch.inf).amin(3)",
        new="smallest = keys.amin(3)",
        tests=("tests/readers/test_readers.py", "tests/engine/test_index_reader.py"),
    ),
    Mutation(
        name="a layer of exactly the long size has short pages",
        file="kvpolicy/readers/quest.py",
        old="return 4 if slots < _LONG else 16",
        new="return 4 if slots <= _LONG else 16",
        tests=("tests/readers/test_readers.py",),
    ),
    Mutation(
        name="channels are chosen again for every row",
        file="kvpolicy/readers/labels.py",
        old="index.channels.copy_(torch.where(rows[:, None, None], best, index.channels))",
        new="index.channels.copy_(best)",
        tests=("tests/readers/test_readers.py", "tests/engine/test_index_reader.py"),
    ),
    Mutation(
        name="a shard has the salience of the first heads",
        file="kvpolicy/readers/labels.py",
        old="return found.float()[heads]",
        new="return found.float()[: len(found[heads])]",
        tests=("tests/readers/test_readers.py",),
    ),
    Mutation(
        name="coordinates hold what stands in empty slots",
        file="kvpolicy/readers/loki.py",
        old="keys = keys.squeeze(3).masked_fill(~occupied, 0)",
        new="keys = keys.squeeze(3)",
        tests=("tests/readers/test_readers.py::test_coordinates_of_empty_slots_are_zero",),
    ),
    Mutation(
        name="a shard has the bases of the first heads",
        file="kvpolicy/readers/loki.py",
        old="rank, layer_idx, device, heads).encode[0]",
        new="rank, layer_idx, device).encode[0]",
        tests=("tests/readers/test_readers.py::test_a_shard_has_the_basis_of_its_heads",),
    ),
    Mutation(
        name="queries stay outside of the basis of an index",
        file="kvpolicy/engine/index_reader.py",
        old="self._indexed(self._queries(q)), products)",
        new="self._queries(q)[..., : self._indexed(self._queries(q)).shape[-1]], products)",
        tests=("tests/readers/test_readers.py",),
    ),
    Mutation(
        name="the basis of an index is not among the tensors of the model",
        file="kvpolicy/engine/layer_contents.py",
        old="return (*self.calibrations, self.gate, self.basis)",
        new="return (*self.calibrations, self.gate)",
        tests=("tests/engine/test_index_reader.py::test_a_basis_belongs_to_the_model",),
    ),
    Mutation(
        name="the first choosing layer must be behind one more layer",
        file="kvpolicy/readers/reuse.py",
        old="self._choosing[0] < least:",
        new="self._choosing[0] <= least:",
        tests=("tests/readers/test_reuse.py",),
    ),
    Mutation(
        name="the layers that the base reads whole are not read whole",
        file="kvpolicy/readers/reuse.py",
        old='dense = max(_DENSE if self.dense == "auto" else self.dense, traits.dense)',
        new='dense = _DENSE if self.dense == "auto" else self.dense',
        tests=("tests/readers/test_reuse.py",),
    ),
    Mutation(
        name="a fraction of the slots is rounded up by its floating-point error",
        file="kvpolicy/readers/_common.py",
        old="math.ceil(read * slots - _EPSILON)",
        new="math.ceil(read * slots)",
        tests=("tests/readers/test_readers.py",),
    ),
    Mutation(
        name="labels hold what stands in empty slots",
        file="kvpolicy/readers/labels.py",
        old="keys = keys.squeeze(3).masked_fill(~occupied, 0)",
        new="keys = keys.squeeze(3)",
        tests=("tests/readers/test_readers.py::test_labels_of_empty_slots_are_zero",),
    ),
)
