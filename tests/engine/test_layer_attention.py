"""The attention of a layer as an allocator is shown it, beside loops over whole matrices."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpolicy.engine.attention import attend
from kvpolicy.engine.layer_attention import layer_attention, without_measured
from kvpolicy.engine.prefill import PendingPrompt
from kvpolicy.protocols import SINGLE_RANK, AttentionNeeds
from kvpolicy.statistics.attention_sum import AttentionSum
from kvpolicy.statistics.newest_queries import NewestQueries
from kvpolicy.statistics.recent_queries import RecentQueries
from kvpolicy.statistics.statistic import Coming, Tile
from kvpolicy.statistics.windows import ScoreTransform
from tests.sampling import product

TRANSFORMS = {
    "plain": ScoreTransform(0.4),
    "softcap": ScoreTransform(0.4, softcap=2.0),
    "sinks": ScoreTransform(0.4, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0])),
}
EVERY = AttentionNeeds(("mean", "variance", "entropy", "total", "value_size"), 5)


def pending_of(
    transform: ScoreTransform, valid: Tensor | None = None, width: int = 5, tokens: int = 19
) -> tuple[Tensor, PendingPrompt]:
    """Queries of four heads, and the prompt of three rows with two KV heads."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(3, heads, tokens, 8, generator=generator) for heads in (4, 2, 2))
    coming = Coming(valid, tokens, torch.zeros(3, dtype=torch.int64), None)
    recent = RecentQueries(width).begun(coming).added(Tile(q, k, 0, valid, True))
    summed = AttentionSum(attend(q, k, v, transform, None, valid, True)[1])
    return q, PendingPrompt(k, v, valid, transform, (summed, recent, NewestQueries(2)))


def matrix(q: Tensor, k: Tensor, transform: ScoreTransform, row: int, head: int, own: list[int]) -> Tensor:
    """Attention of all queries of a head of a row to all of its tokens, fp64 [n, n]."""
    scores = (q[row, head, own].double() @ k[row, head // 2, own].double().T) * transform.scale
    if transform.softcap is not None:
        scores = torch.tanh(scores / transform.softcap) * transform.softcap
    weights = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf).exp()
    sink = 0.0 if transform.sinks is None else transform.sinks[head].double().exp()
    return weights / (weights.sum(-1, keepdim=True) + sink)


@product("name,padding,width", [*TRANSFORMS], ["none", "left", "between", "all but one"], [5, 9])
def test_as_whole_matrices(name: str, padding: str, width: int) -> None:
    transform = TRANSFORMS[name]
    valid = None if padding == "none" else torch.ones(3, 19, dtype=torch.bool)
    if valid is not None:
        valid[1] = torch.arange(19) >= {"left": 7, "between": 0, "all but one": 18}[padding]
        if padding == "between":
            valid[1, [0, 4, 5, 17]] = False
    q, pending = pending_of(transform, valid, width)
    seen = layer_attention(pending, EVERY, SINGLE_RANK)
    for row in range(3):
        own = list(range(19)) if valid is None else valid[row].nonzero()[:, 0].tolist()
        n = len(own)
        assert seen.positions[row].tolist() == [*range(n), *[-1] * (19 - n)]
        assert int(seen.length[row]) == n and int(seen.queries[row]) == min(5, n)
        for head in range(4):
            weights = matrix(q, pending.keys, transform, row, head, own)
            newest = weights[-5:]
            spread = newest.var(0) if n > 1 else torch.zeros(1)
            entropy = -(newest * (newest + 1e-10).log()).sum(0)
            for got, want in (
                (seen.mean, newest.mean(0)),
                (seen.variance, spread),
                (seen.entropy, entropy),
                (seen.total, weights.sum(0)),
            ):
                assert got is not None
                torch.testing.assert_close(got[row, head, :n].double(), want.double(), rtol=1e-4, atol=1e-6)
                assert not got[row, head, n:].any()
            assert seen.value_size is not None
            size = pending.values[row, head // 2, own].abs().sum(-1).max()
            torch.testing.assert_close(seen.value_size[row, head // 2], size)


def test_only_what_was_asked_for() -> None:
    _, pending = pending_of(TRANSFORMS["plain"])
    seen = layer_attention(pending, AttentionNeeds(("variance",), 3), SINGLE_RANK)
    assert seen.variance is not None and seen.queries.tolist() == [3, 3, 3] and seen.kv_heads == 2
    assert (seen.mean, seen.entropy, seen.total, seen.value_size) == (None,) * 4
    assert AttentionNeeds(("total",), 3).statistics == (AttentionSum(),)
    assert AttentionNeeds(("mean",), 3).statistics == (RecentQueries(3),)


def test_tokens_behind_slots_of_other_rows() -> None:
    """Sums of attention begin with the slots, which a row in its first prompt has none of."""
    _, pending = pending_of(TRANSFORMS["plain"])
    summed = pending.statistics[0]
    assert isinstance(summed, AttentionSum) and summed.total is not None
    behind = AttentionSum(torch.cat([torch.zeros(3, 4, 6), summed.total], -1))
    seen = layer_attention(pending._replace(statistics=(behind,)), AttentionNeeds(("total",)), SINGLE_RANK)
    assert seen.total is not None and torch.equal(seen.total, summed.total)


def test_prompts_that_wait_hold_nothing_for_the_allocator() -> None:
    _, pending = pending_of(TRANSFORMS["plain"])
    assert [type(each) for each in without_measured(pending, ()).statistics] == [NewestQueries]
    summed, recent, _ = without_measured(pending, (AttentionSum(), RecentQueries(4))).statistics
    assert isinstance(summed, AttentionSum) and isinstance(recent, RecentQueries)
    assert recent.width == 4 and recent.window is not None and recent.window.at[0].tolist() == [15, 16, 17, 18]
