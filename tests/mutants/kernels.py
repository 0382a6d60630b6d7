"""Defects in the kernels."""

from __future__ import annotations

from tests.mutants import Mutation

MUTATIONS = (
    Mutation(
        name="fp16 queries are not scaled down",
        file="kvpolicy/kernels/products.py",
        old="QUERY_SCALE = 2.0**-4",
        new="QUERY_SCALE = 1.0",
        tests=("tests/kernels/test_products.py",),
    ),
    Mutation(
        name="products of fp16 are scaled back before they are fp32",
        file="kvpolicy/kernels/products.py",
        old="keys.transpose(-1, -2)).float().div_(QUERY_SCALE)",
        new="keys.transpose(-1, -2)).div_(QUERY_SCALE).float()",
        tests=("tests/kernels/test_products.py",),
    ),
    Mutation(
        name="thin products are rounded to the dtype of the index",
        file="kvpolicy/kernels/products.py",
        old="return queries.float() @ keys.float().transpose(-1, -2)",
        new="return (queries.to(keys.dtype) @ keys.transpose(-1, -2)).float()",
        tests=("tests/kernels/test_products.py",),
    ),
    Mutation(
        name="compiled products of one row mix heads and rows",
        file="kvpolicy/kernels/products.py",
        old="return product.unflatten(0, rows.shape[:2])",
        new="return product.unflatten(0, rows.shape[:2][::-1]).transpose(0, 1)",
        tests=("tests/kernels/test_products.py", "tests/engine/test_compile.py"),
    ),
    Mutation(
        name="slots are counted from the first head of each row",
        file="kvpolicy/kernels/slot_writes.py",
        old="first = torch.arange(0, heads * size, size, device=slots.device)",
        new="first = torch.arange(0, heads * size, size, device=slots.device) % (slots.shape[1] * size)",
        tests=("tests/engine/test_slot_writer.py",),
    ),
    Mutation(
        name="a head without a token to write overwrites a slot",
        file="kvpolicy/kernels/slot_writes.py",
        old="is_written = write_mask.any(-1).reshape(",
        new="is_written = write_mask.any(-1).fill_(True).reshape(",
        tests=("tests/engine/test_pages.py", "tests/engine/test_coded_pages.py"),
    ),
    Mutation(
        name="masked tokens write their own data to the slot of another",
        file="kvpolicy/kernels/slot_writes.py",
        old="torch.where(is_written, gather_slots(data, token), gather_slots(target, slots))",
        new="torch.where(is_written, data, gather_slots(target, slots))",
        tests=("tests/engine/test_pages.py", "tests/engine/test_coded_pages.py"),
    ),
    Mutation(
        name="data is gathered for the slots of the first head",
        file="kvpolicy/kernels/slot_writes.py",
        old="return t.gather(2, index.expand(*slots.shape, *t.shape[3:]))",
        new="return t.gather(2, index[:, :1].expand(*slots.shape, *t.shape[3:]))",
        tests=("tests/kernels/test_slot_writes.py",),
    ),
    Mutation(
        name="zeros are left out of scores of codes",
        file="kvpolicy/kernels/fused_read.py",
        old="total = total + (zero * query.unflatten(-1, (groups, size)).sum(-1)).sum(-1)",
        new="pass",
        tests=("tests/kernels/test_fused_read.py::test_groups_of_channels",),
    ),
    Mutation(
        name="a place of the bytes takes the scale of the place before",
        file="kvpolicy/kernels/fused_read.py",
        old="term = sums[..., number] * scale[..., each]",
        new="term = sums[..., number] * scale[..., number]",
        tests=("tests/kernels/test_fused_read.py::test_groups_of_channels",),
    ),
    Mutation(
        name="groups of tokens have the scale of their first channels",
        file="kvpolicy/kernels/fused_read.py",
        old="part * scaled[..., n * width : (n + 1) * width]",
        new="part * scaled[..., :width]",
        tests=("tests/kernels/test_fused_read.py::test_groups_of_tokens",),
    ),
    Mutation(
        name="the high bits of codes of 3 bits are lost",
        file="kvpolicy/kernels/packing.py",
        old="[low | (high << shift) for low, high in zip(codes, split, strict=True)] if codes else split",
        new="codes or split",
        tests=("tests/kernels/test_fused_read.py::test_places_are_what_is_unpacked",),
    ),
    Mutation(
        name="outliers of later channels are not replaced",
        file="kvpolicy/kernels/fused_elements.py",
        old="torch.arange(first, first + part.shape[-1], device=part.device)",
        new="torch.arange(part.shape[-1], device=part.device)",
        tests=("tests/codecs/test_fused.py",),
    ),
    Mutation(
        name="the error of later channels is that of the first ones",
        file="kvpolicy/codecs/_gear_read.py",
        old="part = _add_error(part, left, right[..., at])",
        new="part = _add_error(part, left, right[..., : code.shape[-1]])",
        tests=("tests/codecs/test_fused.py",),
    ),
    Mutation(
        name="functions with other options are taken for one",
        file="kvpolicy/kernels/compiled.py",
        old="key = (function, tuple(options.items()), shapes)",
        new="key = (function, shapes)",
        tests=("tests/kernels/test_compiled.py",),
    ),
    Mutation(
        name="compiled functions share a code object",
        file="kvpolicy/kernels/compiled.py",
        old="kernel.__code__.replace(co_name=code.co_name)",
        new="kernel.__code__",
        tests=("tests/kernels/test_compiled.py::test_many_shapes_are_compiled_each_and_none_falls_back",),
    ),
    Mutation(
        name="the mean of a channel is left out of scores",
        file="kvpolicy/codecs/tokenwise.py",
        old="return scores + (queries * widen(codes.channel_zero)).sum(-1, keepdim=True) if self.normalize else scores",
        new="return scores",
        tests=("tests/codecs/test_fused.py",),
    ),
)
