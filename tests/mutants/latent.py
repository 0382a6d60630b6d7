"""Defects in layers whose values are a part of their keys or of another size, and in prompts with pictures."""

from __future__ import annotations

from tests.mutants import Mutation

LATENT = "tests/engine/test_latent.py"
SIZES = "tests/kernels/test_mixed_values.py"

MUTATIONS = (
    Mutation(
        name="the rotated part of a query is folded too far",
        file="kvpolicy/hf/latent_attention.py",
        old="q[..., plain:]], -1)",
        new="q[..., -plain:]], -1)[..., : latent.shape[3] + rotated.shape[3]]",
        tests=(LATENT,),
    ),
    Mutation(
        name="the rotated key stands before the latent vector",
        file="kvpolicy/hf/latent_attention.py",
        old="torch.cat([latent, rotated], -1)",
        new="torch.cat([rotated, latent], -1)",
        tests=(LATENT,),
    ),
    Mutation(
        name="a prompt behind slots attends to itself alone",
        file="kvpolicy/hf/latent_attention.py",
        old="isinstance(self.layer, LatentSlots) and not self.layer.holds_tokens",
        new="q.shape[2] > 1",
        tests=(LATENT,),
    ),
    Mutation(
        name="a tile attends to itself alone",
        file="kvpolicy/hf/latent_attention.py",
        old=" and self.cache.tile is None:",
        new=":",
        tests=(f"{LATENT}::test_tiles_keep_the_same_tokens",),
    ),
    Mutation(
        name="a layer keeps the prompt that it was given",
        file="kvpolicy/hf/latent.py",
        old="given, self._given = self._given, None",
        new="given = self._given",
        tests=(LATENT,),
    ),
    Mutation(
        name="the norms of latent values leave out the expansion of the heads behind the first",
        file="kvpolicy/hf/latent.py",
        old="[..., -module.v_head_dim :, :]",
        new="[:1, -module.v_head_dim :, :]",
        tests=(f"{LATENT}::test_norms_of_values_are_those_behind_both_weights",),
    ),
    Mutation(
        name="the weight of an fp8 module is taken for its matrix",
        file="kvpolicy/hf/projection.py",
        old=" or weight.element_size() == 1",
        new="",
        tests=(f"{LATENT}::test_the_matrix_of_a_weight_in_fp8_is_read_off",),
    ),
    Mutation(
        name="values are held where they are a part of keys",
        file="kvpolicy/engine/layer_tensors.py",
        old="layout.exact, shape.held_value_dim,",
        new="layout.exact, dim,",
        tests=(SIZES,),
    ),
    Mutation(
        name="a snapshot forgets the size of values",
        file="kvpolicy/engine/snapshot.py",
        old='snapshot.numbers["group"], snapshot.tensors["values"].shape[-1])',
        new='snapshot.numbers["group"])',
        tests=(SIZES,),
    ),
    Mutation(
        name="selectors see whole keys as values",
        file="kvpolicy/statistics/statistic.py",
        old="        return read_values(self.all_keys, values, self.latent)",
        new="        return values if values.shape[-1] else self.all_keys",
        tests=("tests/conformance/test_models.py", LATENT),
    ),
    Mutation(
        name="values of another size are encoded in that of keys",
        file="kvpolicy/codecs/apart.py",
        old="values = self.inner.alloc(batch, heads, slots, self.value_dim, device)",
        new="values = self.inner.alloc(batch, heads, slots, head_dim, device)",
        tests=(SIZES,),
    ),
    Mutation(
        name="codes of values are allocated where there are none",
        file="kvpolicy/codecs/apart.py",
        old="return keys_only(self.inner.alloc(batch, heads, slots, head_dim, device))",
        new="return self.inner.alloc(batch, heads, slots, head_dim, device)",
        tests=(f"{LATENT}::test_codes_hold_no_values",),
    ),
    Mutation(
        name="a reader sums values that are not held",
        file="kvpolicy/engine/layer_index.py",
        old="held = mixed_values(tensors.keys, held)",
        new="held = tensors.values",
        tests=(SIZES,),
    ),
    Mutation(
        name="a plan forgets the vectors that latent ones are expanded to",
        file="kvpolicy/planning/activations.py",
        old="expanded = piece.tokens * widths.expanded * size",
        new="expanded = 0",
        tests=("tests/planning/test_activations.py",),
    ),
    Mutation(
        name="a merger of values alone is let in",
        file="kvpolicy/hf/model_spec.py",
        old="return found.keys is not None",
        new="return True",
        tests=(LATENT,),
    ),
    Mutation(
        name="the windows of MiMo-V2-Flash have as many heads as its other layers",
        file="kvpolicy/hf/layer_sizes.py",
        old="        heads *= 2\n",
        new="        heads *= 1\n",
        tests=(LATENT,),
    ),
    Mutation(
        name="padding beside a picture is kept",
        file="kvpolicy/hf/masks.py",
        old="return diagonal if diagonal.dtype == torch.bool else diagonal == 0",
        new="return torch.ones_like(diagonal, dtype=torch.bool)",
        tests=("tests/engine/test_block_masks.py",),
    ),
    Mutation(
        name="layers without keys of their own let pictures see earlier tokens alone",
        file="kvpolicy/hf/attention_interface.py",
        old="    if stands or mask.dim() != 4",
        new="    if mask.dim() != 4",
        tests=("tests/engine/test_block_masks.py", "tests/robust/test_families.py"),
    ),
    Mutation(
        name="tokens of a picture see earlier ones alone",
        file="kvpolicy/hf/attention_interface.py",
        old="attention = under_mask(lambda q, k, v: own(query=q, key=k, value=v, **how)[0])",
        new="attention = attend",
        tests=("tests/engine/test_block_masks.py",),
    ),
    Mutation(
        name="parts of positions that differ count as equal",
        file="kvpolicy/kernels/rotary.py",
        old="or not bool((position_ids == position_ids[:1]).all())",
        new="",
        tests=("tests/engine/test_equal_parts.py", "tests/kernels/test_rotary.py"),
    ),
)
