"""The bytes that a layer holds or will hold, and those of calibration tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from kvpolicy.engine.accounting import bytes_by_kind
from kvpolicy.engine.link import Link
from kvpolicy.engine.merging import merges_in_steps
from kvpolicy.engine.page_codes import alloc_codes
from kvpolicy.engine.pages import Pages, buffer_pages
from kvpolicy.engine.reading import ReadShape, alloc_reads, choice_size, chooses, count_step, read_shape, reads_part
from kvpolicy.engine.row_limits import alloc_limits
from kvpolicy.engine.state import alloc_paged_state, tensors
from kvpolicy.policy import Policy
from kvpolicy.protocols import Codec, LayerShape, Layout, alloc_state

DIGEST_NBYTES = 8
"""Bytes of each row's mask digest, which the first layer of a cache holds."""


class _Tensors(NamedTuple):
    """The tensors of a layer on the device meta, allocated as the cache does.

    A difference would make plans wrong; the tests of bytes detect it.
    """

    buffer: tuple[torch.Tensor, torch.Tensor]
    codes: tuple[Any, ...]
    positions: torch.Tensor
    state: Any
    counters: tuple[torch.Tensor, ...]
    counts: Any
    merged: Any
    read_shape: ReadShape | None
    reads: Any


def _tensors(policy: Policy, batch: int, shape: LayerShape, layout: Layout, layer_idx: int) -> _Tensors:
    slots = layout.slots
    heads = shape.heads
    dim = shape.head_dim
    exact = torch.empty(batch, heads, layout.exact, dim, dtype=shape.dtype, device="meta")
    stages = zip(policy.codec.stages, layout.coded, strict=False)
    codes = tuple(stage.alloc(batch, heads, size, dim, "meta") for stage, size in stages)
    rows = alloc_limits(policy.codec, batch, heads, dim, "meta")
    positions = torch.empty(batch, heads, slots, dtype=torch.int32, device="meta")
    state = alloc_state(policy.selector, batch, heads, slots, "meta", shape.head)
    traits = policy.merger.traits
    counts = torch.empty(batch, heads, slots, device="meta") if traits.counted else ()
    merged = policy.merger.alloc(batch, heads, "meta")
    # The length and the budget of each row, and the columns seen.
    counters = torch.empty(2 * batch + 1, dtype=torch.int64, device="meta")
    what = read_shape(policy.reader, policy.codec, layout, layer_idx)
    reads: Any = ()
    if reads_part(policy.reader, layer_idx):
        shown = choice_size(policy.reader, policy.codec, layout, layer_idx)
        reads = alloc_reads(policy.reader, what, batch, heads, dim, shape.dtype, "meta", layer_idx, shown)
    return _Tensors((exact, exact), codes, positions, state, (counters, *(rows or ())), counts, merged, what, reads)


@lru_cache(maxsize=4096)
def layer_bytes(policy: Policy, batch: int, shape: LayerShape, layout: Layout, layer_idx: int = 0) -> dict[str, int]:
    """Bytes by kind that a layer will hold; no memory is needed to find out."""
    layer = _tensors(policy, batch, shape, layout, layer_idx)
    merged = (layer.counts, layer.merged)
    return bytes_by_kind(layer.buffer, layer.codes, layer.positions, layer.state, layer.counters, merged, layer.reads)


@lru_cache(maxsize=4096)
def step_bytes(
    policy: Policy, batch: int, shape: LayerShape, layout: Layout, layer_idx: int = 0, source: Layout | None = None
) -> int:
    """Bytes that a decode step will read of a layer: keys, values, codes, positions, counts and a reader's index.

    Args:
        policy: The policy.
        batch: Number of rows.
        shape: Shape of the layer.
        layout: Layout of the layer.
        layer_idx: Index of the layer.
        source: Layout of the layer that chooses for this one; None if it chooses for itself.
    """
    layer = _tensors(policy, batch, shape, layout, layer_idx)
    chooser = policy.reader.traits.source(layer_idx)
    choice: Any = ()
    if source is not None and chooser is not None:
        choice = _tensors(policy, batch, shape, source, chooser).reads.choice
    link = Link()
    link.start()
    count_step(
        link,
        policy.reader,
        layer.read_shape,
        layer.reads,
        layer.buffer,
        (layer.positions, layer.counts),
        layer.codes,
        layout.coded,
        policy.codec.traits.group_size,
        choice,
        reads_all=policy.reader.traits.choosers_read_all and chooses(policy.reader, layer_idx),
        merges=merges_in_steps(policy.merger, policy.decode == "grow"),
    )
    return link.moved


@lru_cache(maxsize=4096)
def paged_bytes(policy: Policy, batch: int, shape: LayerShape, pages: Pages, buffer: int = 0) -> dict[str, int]:
    """Bytes by kind of a layer with a budget for each head.

    Args:
        policy: The policy.
        batch: Number of rows.
        shape: The layer's shape.
        pages: The pages that its heads share.
        buffer: Slots of each head's full-precision buffer, if the pages hold codes.
    """
    codec = policy.codec
    dim = shape.head_dim
    exact = torch.empty(batch, *pages, dim, dtype=shape.dtype, device="meta")
    codes: tuple[Any, ...] = ()
    rows: tuple[torch.Tensor, ...] = ()
    every = pages
    if codec.stages:
        exact = torch.empty(batch, shape.heads, buffer, dim, dtype=shape.dtype, device="meta")
        codes = (alloc_codes(codec, batch, shape.heads, *pages, dim, "meta"),)
        rows = alloc_limits(codec, batch, shape.heads, dim, "meta", paged=True) or ()
        every = Pages(pages.number + shape.heads * buffer_pages(buffer, pages.size), pages.size)
    positions = torch.empty(batch, *every, dtype=torch.int32, device="meta")
    owner = torch.empty(batch, every.number, dtype=torch.int64, device="meta")
    state = alloc_paged_state(policy.selector, batch, shape.heads, *every, "meta", shape.head)
    # The length, the budget and the budget of an average head of each row, and the columns seen.
    counters = torch.empty(3 * batch + 1, dtype=torch.int64, device="meta")
    complete = torch.empty(batch, dtype=torch.bool, device="meta")
    kinds = bytes_by_kind((exact, exact), codes, positions, state, (counters, complete, *rows))
    kinds["positions"] += owner.nbytes
    return kinds


@lru_cache(maxsize=4096)
def held_codes_bytes(policy: Policy, batch: int, shape: LayerShape, columns: int) -> int:
    """Bytes of a layer's prompt that waits in codes; see `kvpolicy.engine.prompt_codes`."""
    codes = policy.codec.stages[0].alloc(batch, shape.heads, columns, shape.head_dim, "meta")
    return sum(t.nbytes for t in tensors(codes))


def resident_bytes(calibrations: Iterable[Any]) -> int:
    """Bytes of calibration tensors; tensors that layers share are counted once."""
    return sum({t.data_ptr(): t.nbytes for calibration in calibrations for t in tensors(calibration)}.values())


def planned_resident(policy: Policy, layers: tuple[int, ...], heads: slice) -> int:
    """Bytes of the calibration tensors of some layers and heads; they belong to the model and count in no budget."""
    codecs = tuple(policy.at(index).codec for index in layers)
    return _resident(codecs, layers, heads.start, heads.stop)


@lru_cache(maxsize=64)
def _resident(codecs: tuple[Codec, ...], layers: tuple[int, ...], first: int | None, last: int | None) -> int:
    held = slice(first, last)  # slices are hashable only since Python 3.12, so the cache has its ends as keys
    # A list of all layers, not a generator: tensors are told apart by address, so they must be alive together.
    return resident_bytes(
        [
            stage.load_calibration(index, "cpu", held)
            for index, codec in zip(layers, codecs, strict=True)
            for stage in codec.stages
        ]
    )


def prefill_peak(
    policy: Policy,
    batch: int,
    shape: LayerShape,
    layers: Sequence[int],
    columns: int,
    unmanaged_nbytes: int,
    chunk: int | None = None,
    holds: bool = False,
    held: Callable[[int], int] | None = None,
) -> int:
    """The most bytes that a cache holds while a prompt is prefilled, in one piece or in chunks.

    A layer's prompt is compressed as soon as its budget is known. With an allocator that measures layers, and with a
    selector that replays the context, every layer holds its prompt until the last has run.

    Args:
        policy: The policy.
        batch: Number of rows.
        shape: Shape of the keys of a layer.
        layers: Bytes of each layer once it is compressed.
        columns: Tokens of the longest prompt, padding of other rows included.
        unmanaged_nbytes: Bytes of the layers that are not under the policy, while the prompt is prefilled.
        chunk: Tokens that are prefilled at a time; None for all.
        holds: Whether chunks are held until the last one.
        held: Bytes of prompts of so many tokens that wait in all layers; those of keys and values by default.
    """
    prompt = batch * columns * shape.token_nbytes
    new = min(chunk or columns, columns)
    piece = batch * new * shape.token_nbytes
    # Of codes, those of one layer are decoded, and the newest keys of another one are not encoded yet.
    plain = 0 if held is None else prompt
    held = held or (lambda tokens: len(layers) * batch * tokens * shape.token_nbytes)
    replay = policy.replay
    if replay is not None:
        # A score of each token and head, and the ids, validity and next position of the replayed text; one chunk of
        # keys and values is alive besides.
        scores = batch * columns * shape.heads * 4
        text = batch * (columns * (8 + 1) + 8)
        chunk = batch * min(replay.chunk, columns) * shape.token_nbytes
        return held(columns) + len(layers) * scores + plain + text + chunk + unmanaged_nbytes
    if holds and piece < prompt:
        return held(columns) + plain + piece + unmanaged_nbytes
    if policy.layer_metric:  # layers are measured in the first chunk
        return max(held(new) + min(plain, piece), sum(layers) + piece * (piece < prompt)) + unmanaged_nbytes
    if piece < prompt:  # all layers hold what was kept of the chunks before
        return sum(layers) + piece + unmanaged_nbytes
    # The last layer's prompt is alive when all others are compressed, and so is an earlier one's that is larger.
    return max(sum(layers[:number]) + prompt for number in range(len(layers))) + unmanaged_nbytes
