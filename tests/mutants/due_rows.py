"""Defects in block work of some rows: which rows take part in it, and what of them is written back."""

from __future__ import annotations

from tests.mutants import Mutation

MUTATIONS = (
    Mutation(
        name="recoding leaves the index of a reader as it was",
        file="kvpolicy/engine/slot_demoter.py",
        old="        self._index.fill()\n",
        new="",
        tests=("tests/engine/test_due_rows.py::test_so_does_the_index_of_a_reader",),
    ),
    Mutation(
        name="one due row makes the work of all",
        file="kvpolicy/engine/due_rows.py",
        old="[number for number, is_due in enumerate(due.tolist()) if is_due]",
        new="[*range(len(due))] if bool(due.any()) else []",
        tests=("tests/engine/test_due_rows.py::test_only_due_rows_are_encoded",),
    ),
    Mutation(
        name="rows that lie apart are not written back",
        file="kvpolicy/engine/due_rows.py",
        old="tensors.put_rows(rows.at, member.tensors, written)",
        new="pass",
        tests=("tests/engine/test_due_rows.py::test_what_is_written_to_some_rows_is_written_to_the_layer",),
    ),
    Mutation(
        name="the other layers of a group keep all their rows",
        file="kvpolicy/engine/due_rows.py",
        old="members = [layer] if layer.group is None else [*layer.group.layers.values()]",
        new="members = [layer]",
        tests=("tests/engine/test_due_rows.py::test_what_is_held_is_what_work_on_all_rows_would_leave",),
    ),
    Mutation(
        name="a copy may be as large as the layer",
        file="kvpolicy/engine/due_rows.py",
        old="size = -(-len(due) // MOST_COPIED)",
        new="size = len(due)",
        tests=("tests/engine/test_due_rows.py::test_due_rows_come_in_ranges_or_in_small_parts",),
    ),
    Mutation(
        name="all rows are ranked again when one is due",
        file="kvpolicy/engine/layer_store.py",
        old='            with only_rows(layer, rows, written=("state",)):\n                self._rank_again()',
        new="            self._rank_again()",
        tests=("tests/engine/test_due_rows.py::test_only_due_rows_are_ranked_again",),
    ),
)
