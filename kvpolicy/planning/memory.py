"""The bytes of a layer and of calibration tensors, and the slots and bytes of each layer of a divided budget."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from kvpolicy.codecs.apart import sized_for
from kvpolicy.engine.geometry import step_bytes
from kvpolicy.engine.layer_contents import LayerContents
from kvpolicy.engine.layer_group import LayerGroup
from kvpolicy.engine.layer_spec import LayerSpec
from kvpolicy.engine.layer_tensors import LayerTensors
from kvpolicy.engine.link import StepBytes
from kvpolicy.engine.page_geometry import PageGeometry
from kvpolicy.engine.pages import Pages, paged_layout, row_pages
from kvpolicy.engine.reading import Board, load_basis
from kvpolicy.engine.row_limits import buffer_slots
from kvpolicy.engine.slot_geometry import SlotGeometry
from kvpolicy.engine.state import tensors
from kvpolicy.kernels.rotary import Rope
from kvpolicy.planning.result import LayerPlan
from kvpolicy.planning.tokens import Tokens
from kvpolicy.policy import Policy
from kvpolicy.protocols import Codec, GroupStage, LayerShape, Layout, Reader, attention_of, traits_for
from kvpolicy.statistics import InputScorer, InputScores, ReplayedRows
from kvpolicy.statistics.statistic import Projection, first_of
from kvpolicy.text.model_file import versions_in

ID_NBYTES = 8
"""Bytes of a token id."""

DIGEST_NBYTES = 8
"""Bytes of each row's mask digest, which the first layer of a cache holds."""


def layer_spec(
    policy: Policy,
    layer_idx: int,
    rope: Rope | None = None,
    projection: Projection | None = None,
    shape: LayerShape | None = None,
) -> LayerSpec:
    """The parts of a policy in a layer, with what they need of the model's layer; see `LayerSpec`.

    The `shape` of a layer is needed where its values have another size than its keys, or are not held.
    """
    return LayerSpec(
        layer_idx=layer_idx,
        selector=policy.selector,
        codec=policy.codec if shape is None else sized_for(policy.codec, shape),
        decode=policy.decode,
        merger=policy.merger,
        reader=policy.reader,
        heads=policy.heads,
        rope=rope,
        projection=projection,
        allocator_statistics=attention_of(policy.allocator),
        latent=0 if shape is None else shape.latent,
    )


class LayerBytes(NamedTuple):
    """Bytes of a layer, counted on its tensors on the device meta.

    Attributes:
        held: What it holds, by kind.
        step: What a decode step moves of it.
    """

    held: dict[str, int]
    step: StepBytes


@lru_cache(maxsize=4096)
def layer_bytes(
    policy: Policy, batch: int, shape: LayerShape, layout: Layout, layer_idx: int = 0, source: Layout | None = None
) -> LayerBytes:
    """Bytes of a layer with equally many slots in all heads.

    Args:
        policy: The policy.
        batch: Number of rows.
        shape: Shape of the layer.
        layout: Layout of the layer.
        layer_idx: Index of the layer.
        source: Layout of the layer that chooses for this one; None if it chooses for itself.
    """
    slots = _slots_on_meta(policy, batch, shape, layout, layer_idx)
    stages = policy.codec.stages
    if stages and isinstance(stages[0], GroupStage):  # a step reads what the first layer of the group stores
        first = replace(policy, codec=stages[0].first)
        group = LayerGroup(1 + (first != policy))
        group.join(0, _slots_on_meta(first, batch, shape, layout, layer_idx).layer)
        slots.layer.join(group, int(first != policy))
    chooser = policy.reader.traits.source(layer_idx)
    if source is not None and chooser is not None:
        board = Board()
        slots.index.board = board
        choosing = _slots_on_meta(policy, batch, shape, source, chooser)
        choosing.index.board = board
        choosing.index.show()
    return LayerBytes(slots.layer.tensors.nbytes_by_kind(), step_bytes(slots, slots.layer.spec.host))


def _slots_on_meta(policy: Policy, batch: int, shape: LayerShape, layout: Layout, layer_idx: int) -> SlotGeometry:
    layer = LayerContents(layer_spec(policy, layer_idx, shape=shape))
    layer.layout = layout
    slots = SlotGeometry(layer)
    layer.tensors = slots.alloc(batch, shape, "meta")
    slots.index.fit_layout()
    return slots


@lru_cache(maxsize=4096)
def paged_bytes(policy: Policy, batch: int, shape: LayerShape, pages: Pages, buffer: int = 0) -> LayerBytes:
    """Bytes of a layer with a budget for each head.

    Args:
        policy: The policy.
        batch: Number of rows.
        shape: The layer's shape.
        pages: The pages that its heads share.
        buffer: Slots of each head's full-precision buffer, if the pages hold codes.
    """
    layer = LayerContents(layer_spec(policy, 0, shape=shape))
    layer.tensors = LayerTensors.of_pages(layer.spec, batch, shape, pages, buffer, "meta")
    return LayerBytes(layer.tensors.nbytes_by_kind(), step_bytes(PageGeometry(layer)))


@lru_cache(maxsize=4096)
def held_codes_bytes(policy: Policy, batch: int, shape: LayerShape, columns: int) -> int:
    """Bytes of a layer's prompt that waits in codes; see `kvpolicy.engine.page_codes`."""
    codes = policy.codec.stages[0].alloc(batch, shape.heads, columns, shape.head_dim, "meta")
    return sum(t.nbytes for t in tensors(codes))


def resident_bytes(calibrations: Iterable[Any]) -> int:
    """Bytes of calibration tensors; tensors that layers share are counted once."""
    return sum({t.data_ptr(): t.nbytes for calibration in calibrations for t in tensors(calibration)}.values())


def planned_resident(policy: Policy, layers: tuple[int, ...], heads: slice) -> int:
    """Bytes of the calibration tensors of some layers and heads; they belong to the model and count in no budget."""
    codecs = tuple(policy.at(index).codec for index in layers)
    selectors = tuple(policy.at(index).selector for index in layers)
    asked = (first_of(InputScores, selector.statistics) for selector in selectors)
    scorers = tuple(None if each is None else each.scorer for each in asked)
    readers = tuple(policy.at(index).reader for index in layers)
    return _resident(versions_in([codecs, scorers, readers]), codecs, scorers, readers, layers, heads.start, heads.stop)


@lru_cache(maxsize=64)
def _resident(
    _versions: object,
    codecs: tuple[Codec, ...],
    scorers: tuple[InputScorer | None, ...],
    readers: tuple[Reader, ...],
    layers: tuple[int, ...],
    first: int | None,
    last: int | None,
) -> int:
    held = slice(first, last)  # slices are hashable only since Python 3.12, so the cache has its ends as keys
    # A list of all layers, not a generator: tensors are told apart by address, so they must be alive together.
    return resident_bytes(
        [
            part
            for index, codec, scorer, reader in zip(layers, codecs, scorers, readers, strict=True)
            for part in (
                *(stage.load_calibration(index, "cpu", held) for stage in codec.stages),
                () if scorer is None else scorer.load_gate(index, "cpu", held),
                load_basis(reader, index, "cpu", held),
            )
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
    trimmed: int | None = None,
    waiting: Callable[[int], Sequence[int]] | None = None,
    given: int = ID_NBYTES,
) -> int:
    """The most bytes that a cache holds while a prompt is prefilled, in one piece or in chunks.

    A layer's prompt is compressed as soon as its budget is known. With an allocator that measures layers, and with a
    part that replays the context, every layer holds its prompt until the last has run, or what may be kept of it.

    Args:
        policy: The policy.
        batch: Number of rows.
        shape: Shape of the keys of a layer.
        layers: Bytes of each layer on the device once it is compressed.
        columns: Tokens of the longest prompt, padding of other rows included.
        unmanaged_nbytes: Bytes of the layers that are not under the policy, while the prompt is prefilled.
        chunk: Tokens that are prefilled at a time; None for all.
        holds: Whether chunks are held until the last one.
        held: Bytes of prompts of so many tokens that wait in all layers; those of keys and values by default.
        trimmed: The most bytes of what waits of measured prompts; None if they wait whole.
        waiting: Of prompts of so many tokens, the bytes of earlier layers that wait to be encoded while each layer has
            its prompt; none by default.
        given: Bytes of a token as the decoder is given it, which a replay needs again.
    """
    prompt = batch * columns * shape.token_nbytes
    new = min(chunk or columns, columns)
    piece = batch * new * shape.token_nbytes
    # Of codes, those of one layer are decoded, and the newest keys of another one are not encoded yet.
    plain = 0 if held is None else prompt
    held = held or (lambda tokens: len(layers) * batch * tokens * shape.token_nbytes)
    replay = policy.replay
    if replay is not None:
        # A score of each token and head, the queries that a merger observes, and the tokens, validity and next position
        # of the replayed text; one chunk of keys and values is alive besides.
        scores = batch * columns * shape.heads * 4
        asked = [first_of(ReplayedRows, own.merger.statistics) for own in policy.distinct]
        observed = max(0 if each is None else each.width for each in asked)
        scores += batch * observed * (shape.heads * shape.group * shape.head_dim * shape.dtype.itemsize + 8)
        text = batch * (columns * (given + 1) + 8)
        chunk = batch * min(replay.chunk, columns) * shape.token_nbytes
        return held(columns) + len(layers) * scores + plain + text + chunk + unmanaged_nbytes
    if holds and piece < prompt:
        return held(columns) + plain + piece + unmanaged_nbytes
    if policy.layer_metric:  # layers are measured in the first chunk
        measured = held(new) + min(plain, piece)
        if trimmed is not None:  # beside the newest layer's prompt, or the first one's slots
            measured = min(measured, trimmed + max(piece, *layers))
        return max(measured, sum(layers) + piece * (piece < prompt)) + unmanaged_nbytes
    beside = [0] * len(layers) if waiting is None else waiting(new)
    if piece < prompt:  # all layers hold what was kept of the chunks before
        return sum(layers) + piece + max(beside) + unmanaged_nbytes
    # The last layer's prompt is alive when all others are compressed, and so is an earlier one's that is larger.
    return max(sum(layers[:number]) + prompt + beside[number] for number in range(len(layers))) + unmanaged_nbytes


def pages_of(policy: Policy, tokens: Tokens, layer: int, shape: LayerShape) -> Pages | None:
    """The pages of a layer with a budget for each head; None without head budgets.

    With several ranks these are the most that a rank may hold: all but one page for each head of the other ranks.

    Args:
        policy: The policy of the layer.
        tokens: The division of the budget.
        layer: Number of the layer under the policy.
        shape: Its shape.
    """
    if policy.heads is None:
        return None
    heads = shape.all_heads or shape.heads
    rows = row_pages(tokens.keep[:, layer], tokens.extra, tokens.last, heads)
    if heads > shape.heads:
        most = torch.maximum(-(-tokens.last // rows.size), rows.body // heads + 1) * shape.heads
        rows = rows._replace(body=torch.minimum(rows.body - (heads - shape.heads), most))
    return rows.allocated(shape.heads)


def plan_layers(
    policy: Policy, tokens: Tokens, shapes: list[LayerShape], indices: list[int], batch: int
) -> tuple[LayerPlan, ...]:
    """The plan of each layer.

    Args:
        policy: The policy.
        tokens: The division of its budget.
        shapes: The layers under the policy.
        indices: Their indices in the model.
        batch: Number of rows.
    """
    plans: list[LayerPlan] = []
    layouts = {index: policy.at(index).codec.layout(most) for index, most in zip(indices, tokens.most, strict=True)}
    for number, (index, most, shape) in enumerate(zip(indices, tokens.most, shapes, strict=True)):
        own = policy.at(index)
        layout = layouts[index]
        pages = pages_of(own, tokens, number, shape)
        if pages is not None:
            buffer = buffer_slots(own.codec, most) if own.codec.stages else 0
            if buffer:
                layout = paged_layout(buffer, *pages, shape.heads)
            counted = paged_bytes(own, batch, shape, pages, buffer)
        else:
            chooser = own.reader.traits.source(index)
            source = None if chooser in (None, index) else layouts.get(chooser)
            counted = layer_bytes(own, batch, shape, layout, index, source)
        sizes = dict(counted.held)
        if not plans:
            # The first layer holds the mask digest of the whole cache.
            sizes["counters"] += DIGEST_NBYTES * batch
        plans.append(
            LayerPlan(layer_idx=index, tokens=most, layout=layout, nbytes=sizes, pages=pages, **counted.step._asdict())
        )
    return tuple(plans)


def waiting_bytes(policy: Policy, layers: Sequence[LayerPlan], token_nbytes: int, columns: int) -> list[int]:
    """Bytes of earlier layers that wait to be encoded while each layer has its prompt; see `LayerGroup`.

    Args:
        policy: The policy.
        layers: The plan of each layer.
        token_nbytes: Bytes of the keys and values of one token of every row in one layer.
        columns: Tokens of the prompt.
    """
    before = {index: group[:number] for group in policy.layer_groups for number, index in enumerate(group)}
    encoded = {
        layer.layer_idx: min(
            sum(layer.layout.coded), columns - traits_for(policy.at(layer.layer_idx).codec, layer.tokens).residual
        )
        for layer in layers
        if layer.layer_idx in before
    }
    waiting = [[encoded[other] for other in before.get(layer.layer_idx, ())] for layer in layers]
    return [token_nbytes * max(sum(tokens), 0) for tokens in waiting]
