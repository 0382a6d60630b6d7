"""Distortion of a codec: the error and the size of the tokens that it encodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvpolicy.engine.layer_group import LayerGroup
from kvpolicy.engine.layer_spec import LayerSpec
from kvpolicy.engine.layer_store import LayerStore
from kvpolicy.engine.row_limits import RowBudget
from kvpolicy.kernels.rotary import Rope
from kvpolicy.policy import Policy
from kvpolicy.policy.combination import check_part
from kvpolicy.protocols import Codec, GroupsLayers, Selector
from kvpolicy.selectors.full import KeepAll
from kvpolicy.selectors.window import SlidingWindow
from kvpolicy.statistics.windows import ScoreTransform
from kvpolicy.text.errors import KVPolicyError


class Distortion(NamedTuple):
    """Error and size of encoded tokens; tokens in full precision are not included.

    Attributes:
        keys: Squared error of the keys, relative to their squared norm.
        values: The same for the values.
        bits: Bits per element, for codes and scales.
        coded: The number of encoded tokens per head, on average.
    """

    keys: float
    values: float
    bits: float
    coded: float


def distortion(
    codec: Codec,
    keys: Tensor,
    values: Tensor,
    *,
    queries: Tensor | None = None,
    layer_idx: int = 0,
    selector: Selector | None = None,
) -> Distortion:
    """Encode tokens as a cache does after a prompt, and measure the error.

    Args:
        codec: The codec; of one that groups layers, a layer without a partner is measured: see `group_distortion`. One
            that differs by layer is measured as it is without a model: give the codec of a layer, by `by_layer`.
        keys: [B, H, n, D], in the key space of the codec.
        values: [B, H, n, D].
        queries: [B, Hq, n, D], for codecs that use them, or whose tokens are ranked by a selector; the keys by default.
        layer_idx: Index of the layer, for calibrated codecs.
        selector: The selector that ranks tokens, for codecs that need it; by default newer tokens rank higher.

    Returns:
        Error, bits and number of tokens.

    Raises:
        KVPolicyError: If there are so few tokens that the codec keeps all of them in full precision.

    Examples:
        >>> from kvpolicy import KIVI
        >>> from kvpolicy.distortion import distortion
        >>> x = torch.randn(1, 2, 256, 64, generator=torch.Generator().manual_seed(0))
        >>> four, two = (distortion(KIVI(bits=bits), x, x) for bits in (4, 2))
        >>> four.bits, two.bits, 0 < four.keys < two.keys < 1
        (5.0, 3.0, True)
    """
    layer = coded_store(codec, keys, values, queries=queries, layer_idx=layer_idx, selector=selector)
    return _distortion(layer, keys, values)


def group_distortion(codec: GroupsLayers, layers: Sequence[tuple[Tensor, Tensor]]) -> list[Distortion]:
    """Encode the tokens of the layers of a group, which share a part of what they store, and measure each layer.

    Args:
        codec: The codec.
        layers: Keys and values of each layer of a group, [B, H, n, D] each.

    Returns:
        Error, bits and number of tokens of each layer; what is shared counts in the first one.

    Raises:
        KVPolicyError: If there are so few tokens that the codec keeps all of them in full precision.

    Examples:
        >>> from kvpolicy import MiniCache
        >>> from kvpolicy.distortion import group_distortion
        >>> x, y = torch.randn(2, 1, 2, 256, 64, generator=torch.Generator().manual_seed(0))
        >>> first, second = group_distortion(MiniCache(), [(x, x), (x + 0.1 * y, x)])
        >>> 0 < first.keys < 0.01, second.bits < 2 < 16 < first.bits
        (True, True)
    """
    group = LayerGroup(len(layers))
    stores: list[LayerStore] = []
    for number, (keys, values) in enumerate(layers):
        store = _empty_store(codec.codec_at(number), number)
        store.contents.join(group, number)
        stores.append(_fill(store, keys, values))
    return [_distortion(store, *tensors) for store, tensors in zip(stores, layers, strict=True)]


def _distortion(layer: LayerStore, keys: Tensor, values: Tensor) -> Distortion:
    """The distortion of a layer that holds tokens with these keys and values."""
    count, dim = keys.shape[2:]
    past = layer.past()
    assert past is not None
    coded = layer.tensors.positions >= 0
    coded[..., : layer.layout.exact] = False
    if not bool(coded.any()):
        raise KVPolicyError(
            f"There must be more tokens than {layer.spec.codec} keeps in full precision, got {count}; try more "
            "tokens, or a smaller residual_length."
        )
    nbytes = layer.nbytes_by_kind()
    slots = sum(layer.layout.coded)
    bits = 8 * (nbytes["codes"] + nbytes["scales"]) / (2 * keys.shape[0] * keys.shape[1] * slots * dim)
    at = layer.tensors.positions.clamp_min(0).long()[..., None].expand(-1, -1, -1, dim)
    return Distortion(
        keys=_error(past.keys, keys.gather(2, at), coded),
        values=_error(past.values, values.gather(2, at), coded),
        bits=bits,
        coded=float(coded.sum()) / coded[..., 0].numel(),
    )


def coded_store(
    codec: Codec,
    keys: Tensor,
    values: Tensor,
    *,
    queries: Tensor | None = None,
    layer_idx: int = 0,
    selector: Selector | None = None,
    rope: Rope | None = None,
) -> LayerStore:
    """A layer of a cache after a prompt of which all tokens are kept; see `distortion` for the arguments.

    With `rope`, keys are given as attention sees them, and unrotated for a codec with unrotated keys.
    """
    return _fill(_empty_store(codec, layer_idx, selector, rope), keys, values, queries)


def _empty_store(
    codec: Codec, layer_idx: int, selector: Selector | None = None, rope: Rope | None = None
) -> LayerStore:
    check_part("codec", codec)
    needs_ranking = codec.traits.demotion is not None
    selector = selector or (SlidingWindow() if needs_ranking else KeepAll())
    policy = Policy(codec=codec, selector=selector, budget=1.0)
    rope = rope if codec.traits.key_space == "unrotated" else None
    return LayerStore(LayerSpec(layer_idx, policy.selector, codec, policy.decode, rope=rope))


def _fill(store: LayerStore, keys: Tensor, values: Tensor, queries: Tensor | None = None) -> LayerStore:
    batch, _, count, dim = keys.shape
    everything = torch.full((batch,), count, device=keys.device)
    budget = RowBudget(everything, torch.zeros_like(everything), everything.cpu(), everything.cpu())
    with torch.no_grad():
        store.initialize(keys)
        _, pending = store.attend_prompt(
            keys if queries is None else queries, keys, values, None, ScoreTransform(dim**-0.5)
        )
        store.compress(pending, budget, massive=torch.zeros(batch, count, dtype=torch.bool, device=keys.device))
    return store


def _error(decoded: Tensor, original: Tensor, coded: Tensor) -> float:
    """Squared error relative to the squared norm, over the slots in `coded`."""
    error = (decoded.float() - original.float()).square().sum(-1)[coded].sum()
    return float(error / original.float().square().sum(-1)[coded].sum().clamp_min(1e-30))
