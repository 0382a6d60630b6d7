"""What a codec loses: the error and the bits of the tokens that it codes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvpolicy.engine.attention import ScoreTransform
from kvpolicy.engine.rotary import Rope
from kvpolicy.engine.store import LayerStore, RowBudget
from kvpolicy.policy import Policy
from kvpolicy.protocols import Codec, Selector
from kvpolicy.selectors.full import KeepAll
from kvpolicy.selectors.window import SlidingWindow
from kvpolicy.spec.errors import KVPolicyError


class Distortion(NamedTuple):
    """Error and size of coded tokens; exact ones are left out.

    Attributes:
        keys: Squared error of the keys over their squared norm.
        values: The same of the values.
        bits: Bits per number, of codes and scales.
        coded: Tokens coded of each head, on average.
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
    """Code tokens as a cache would after a prompt, and measure what is lost.

    Args:
        codec: The codec.
        keys: [B, H, n, D], as the codec takes them: unrotated where its frame is `pre`.
        values: [B, H, n, D].
        queries: [B, Hq, n, D], for codecs that look at them, or whose tokens a selector ranks; the keys by default.
        layer_idx: Which layer they are of, for calibrated codecs.
        selector: Who ranks tokens, for codecs that ask for it; by default the newest rank highest.

    Returns:
        Error, bits and tokens.

    Raises:
        KVPolicyError: Where the codec leaves all of so few tokens exact.

    Examples:
        >>> from kvpolicy import KIVI
        >>> from kvpolicy.distortion import distortion
        >>> x = torch.randn(1, 2, 256, 64, generator=torch.Generator().manual_seed(0))
        >>> four, two = (distortion(KIVI(bits=bits), x, x) for bits in (4, 2))
        >>> four.bits, two.bits, 0 < four.keys < two.keys < 1
        (5.0, 3.0, True)
    """
    count, dim = keys.shape[2:]
    layer = coded_store(codec, keys, values, queries=queries, layer_idx=layer_idx, selector=selector)
    past = layer.past()
    assert past is not None
    coded = past.occupied.clone()
    coded[..., : layer.layout.exact] = False
    if not bool(coded.any()):
        raise KVPolicyError(f"{codec} leaves all of {count} tokens exact: give more, or a smaller residual.")
    held, slots = layer.nbytes_by_kind(), sum(layer.layout.coded)
    bits = 8 * (held["codes"] + held["scales"]) / (2 * keys.shape[0] * keys.shape[1] * slots * dim)
    at = layer.positions.clamp_min(0).long()[..., None].expand(-1, -1, -1, dim)
    lost = [_error(got, want.gather(2, at), coded) for got, want in ((past.keys, keys), (past.values, values))]
    return Distortion(lost[0], lost[1], bits, float(coded.sum()) / coded[..., 0].numel())


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
    """A layer of a cache after a prompt of which all tokens are kept; the arguments are those of `distortion`.

    With `rope`, keys are taken as attention sees them, and a codec whose frame is `pre` undoes the embedding.
    """
    ranked = codec.traits.demote_by == "priority"
    policy = Policy(codec=codec, selector=selector or (SlidingWindow() if ranked else KeepAll()), budget=1.0)
    rope = rope if codec.traits.key_space == "unrotated" else None
    store = LayerStore(layer_idx, policy.selector, codec, policy.decode, rope)
    batch, _, count, dim = keys.shape
    everything = torch.full((batch,), count, device=keys.device)
    budget = RowBudget(everything, torch.zeros_like(everything), everything.cpu())
    with torch.no_grad():
        store.initialize(keys)
        _, pending = store.attend_prompt(
            keys if queries is None else queries, keys, values, None, ScoreTransform(dim**-0.5)
        )
        store.compress(pending, budget, massive=torch.zeros(batch, count, dtype=torch.bool, device=keys.device))
    return store


def _error(got: Tensor, want: Tensor, coded: Tensor) -> float:
    apart = (got.float() - want.float()).square().sum(-1)[coded].sum()
    return float(apart / want.float().square().sum(-1)[coded].sum().clamp_min(1e-30))
