"""RazorAttention's slot: the mean of everything that a head evicted, and the logarithm of its number."""

from __future__ import annotations

import torch

from tests.conformance.bench import Bench, draw


def test_one_slot_is_the_mean_of_all_that_is_gone() -> None:
    """A window of four: the slot of its oldest token, then of the token that takes its place."""
    bench = Bench("window+compensate@4", [4])
    q, k, v = draw(12, 0)
    bench.forward(q, k, v)
    store = bench.layer
    counts = store.tensors.log_counts
    assert counts is not None
    torch.testing.assert_close(counts.exp()[0, 0], torch.tensor([9.0, 1.0, 1.0, 1.0]))
    torch.testing.assert_close(store.tensors.keys[0, :, 0], k[0, :, :9].mean(1))
    torch.testing.assert_close(store.tensors.values[0, :, 0], v[0, :, :9].mean(1))
    for step in range(3):
        q1, k1, v1 = draw(1, step + 1)
        k = torch.cat([k, k1], 2)
        v = torch.cat([v, v1], 2)
        bench.forward(q1, k1, v1)
        slot = int(store.tensors.positions[0, 0].argmin())
        assert int(store.tensors.positions[0, 0, slot]) == 9 + step
        torch.testing.assert_close(store.tensors.values[0, :, slot], v[0, :, : 10 + step].mean(1), atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(store.tensors.keys[0, :, slot], k[0, :, : 10 + step].mean(1), atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(counts.exp().sum(-1), torch.full((1, 2), 13.0 + step))


def test_equal_tokens_are_full_attention() -> None:
    """If all that is evicted is equal, the slot gives what the tokens would have given."""
    q, k, v = draw(12, 0)
    k[:, :, :10] = k[:, :, :1].clone()
    v[:, :, :10] = v[:, :, :1].clone()
    full = Bench("full", [12], new=4)
    slim = Bench("window+compensate@4", [4])
    for bench in (full, slim):
        bench.forward(q, k, v)
    # The step evicts the slot itself, whose mean moves to the token at 9, which has the same key.
    query, new_k, new_v = draw(1, 9)
    want, got = (bench.forward(query, new_k, new_v) for bench in (full, slim))
    torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-6)


def test_the_newest_token_stays_itself() -> None:
    bench = Bench("window+compensate@1", [1])
    _, k, v = draw(5, 0)
    bench.forward(*draw(5, 0))
    assert torch.equal(bench.layer.tensors.values[:, :, 0], v[:, :, 4]) and torch.equal(
        bench.layer.tensors.keys[:, :, 0], k[:, :, 4]
    )
