"""Defects of layers that read the keys of earlier ones."""

from __future__ import annotations

from tests.mutants import Mutation

MUTATIONS = (
    Mutation(
        name="a layer reads the keys of the first layer of its kind",
        file="kvpolicy/hf/shared_keys.py",
        old="    owners = {kind: index for index, kind in enumerate(kinds[:first])}",
        new="    owners = {kind: first - 1 - index for index, kind in enumerate(kinds[first - 1 :: -1])}",
        tests=("tests/engine/test_shared_keys.py::test_layers_that_read_see_what_their_owner_holds",),
    ),
    Mutation(
        name="a prompt is compressed before later layers read it",
        file="kvpolicy/hf/cache_forward.py",
        old="                forward.shown[layer_idx] = show(pending, layer.pending)",
        new="                self.compress(layer, store.end_prompt(pending, layer.pending))",
        tests=("tests/engine/test_shared_keys.py::test_layers_that_read_see_what_their_owner_holds",),
    ),
    Mutation(
        name="queries of reading layers do not count in prompts",
        file="kvpolicy/engine/shown_prompt.py",
        old="        self.pending = self.pending.beside(prompt)",
        new="        self.pending.beside(prompt)",
        tests=("tests/engine/test_shown_prompt.py",),
    ),
    Mutation(
        name="queries of reading layers do not count in steps",
        file="kvpolicy/engine/layer_store.py",
        old="        return out, step.beside(weights)",
        new="        return out, step",
        tests=("tests/engine/test_step.py",),
    ),
    Mutation(
        name="heads of two layers stand one layer behind the other",
        file="kvpolicy/statistics/windows.py",
        old="    groups = (t.unflatten(1, (heads, -1)) for t in (first, second))",
        new="    groups = (t.unflatten(1, (1, -1)) for t in (first, second))",
        tests=("tests/statistics/test_joint_heads.py",),
    ),
    Mutation(
        name="Gemma 4 cuts the tokens whose queries count",
        file="kvpolicy/hf/attach.py",
        old=" and not ranks_by_queries(policy)",
        new="",
        tests=(
            "tests/engine/test_shared_keys.py::test_the_last_token_alone_goes_through_reading_layers_if_no_other_query_counts",
        ),
    ),
    Mutation(
        name="padding is cut with the tokens of reading layers",
        file="kvpolicy/hf/shared_keys.py",
        old="kept != 1 or padded or not may_cut",
        new="kept != 1 or not may_cut",
        tests=("tests/engine/test_shared_keys.py::test_full_is_stock_however_many_logits_are_asked_for",),
    ),
    Mutation(
        name="a tile reads the keys of the first tile",
        file="kvpolicy/hf/tiles.py",
        old="        self._tiles += 1",
        new="        self._tiles += 0",
        tests=("tests/engine/test_shared_keys.py::test_tiles_keep_what_one_piece_keeps",),
    ),
    Mutation(
        name="a reading layer may be left out of a forward",
        file="kvpolicy/hf/cache_forward.py",
        old="isinstance(self.layers[owners.get(index, index)], PolicyLayer)",
        new="isinstance(self.layers[index], PolicyLayer)",
        tests=("tests/engine/test_shared_keys.py::test_a_reading_layer_that_is_left_out_is_noticed",),
    ),
    Mutation(
        name="layers that read the same keys do not score a replay",
        file="kvpolicy/hf/replay.py",
        old="        add_scores(self.scores[owner], chunk, scores)",
        new="        add_scores(self.scores[owner], chunk, scores * (owner == layer_idx))",
        tests=("tests/engine/test_shared_keys.py::test_layers_that_read_count_where_tokens_are_ranked",),
    ),
    Mutation(
        name="a projection is that of its own layer alone",
        file="kvpolicy/hf/attach.py",
        old="        projections |= joint_projections(projections, shape.owners, shape.shape.heads)\n",
        new="",
        tests=("tests/engine/test_shared_keys.py::test_layers_that_read_count_where_tokens_are_ranked",),
    ),
)
