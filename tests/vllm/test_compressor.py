"""A rank compresses what comes in parts, through blocks and beside other requests, as a layer that sees it whole."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from kvpolicy import KVPolicyError
from kvpolicy.hf.dense_cache import moved
from kvpolicy.hf.layer import make_store
from kvpolicy.statistics.windows import ScoreTransform
from kvpolicy_vllm import compressor as compressing
from kvpolicy_vllm.compressor import Compressor, EngineLayer
from kvpolicy_vllm.ledger import LastToken, Part, Saving, Work
from kvpolicy_vllm.taps import compressor_of
from tests.sampling import each_once, product
from tests.vllm.compressed import POLICIES, recipe_of
from tests.vllm.models import Saved

BLOCK = 16
LAYERS = 2
HEADS = 2
GROUP = 2
DIM = 32
NAMES = itertools.count()


class Pool:
    """The blocks of an engine, which has written a prompt before a layer is seen."""

    def __init__(self) -> None:
        self.keys = torch.zeros(64 * BLOCK, HEADS, DIM)
        self.values = self.keys.clone()

    def read(self, blocks: Sequence[int], tokens: int) -> tuple[Tensor, Tensor]:
        at = slots_of(blocks, 0, tokens)
        return self.keys[at].transpose(0, 1), self.values[at].transpose(0, 1)


class Text(NamedTuple):
    """A random prompt in every layer, with its blocks."""

    name: str
    queries: Tensor
    keys: Tensor
    values: Tensor
    out: Tensor
    blocks: tuple[int, ...]

    @property
    def total(self) -> int:
        return self.keys.shape[1]


class Rank:
    """A rank of an engine that runs steps under a policy."""

    def __init__(self, saved: Saved, policy: str, kind: str = "plain") -> None:
        self.recipe = recipe_of(policy)
        self.transform = TRANSFORMS[kind]
        self.saved = saved
        self.pools = [Pool() for _ in range(LAYERS)]
        ropes = saved.engine.skeleton.rotations
        layers = {n: EngineLayer(ropes[n], self.transform, pool, DIM) for n, pool in enumerate(self.pools)}
        self.compressor = Compressor(self.recipe, layers)
        self.lost: set[int] = set()

    def step(self, parts: Sequence[tuple[Text, int, int]], last: Sequence[LastToken] = (), **work: Any) -> list[Tensor]:
        """A step of parts of prompts, each from a token to another one, with other requests between them.

        Returns:
            The output of attention in each layer.
        """
        found = [
            Part(text.name, text.total, start, stop - start, slots_of(text.blocks, start, stop)[0], text.blocks)
            for text, start, stop in parts
        ]
        now = Work(found, [*last], **work)
        self.compressor.save(now)
        self.compressor.begin(now)
        outs: list[Tensor] = []
        for layer, pool in enumerate(self.pools):
            noise = torch.randn(3, HEADS * GROUP, DIM)
            slots = [63 * BLOCK, 63 * BLOCK + 1, *[each.slot for each in last]]
            rows = [(noise[:1].expand(len(slots), -1, -1), noise[:1, :HEADS].expand(len(slots), -1, -1))]
            rows = [(q, k, q.clone()) for q, k in rows]
            for text, start, stop in parts:
                at = slots_of(text.blocks, start, stop)
                pool.keys[at] = text.keys[layer, start:stop]
                pool.values[at] = text.values[layer, start:stop]
                rows.append(
                    (text.queries[layer, start:stop], text.keys[layer, start:stop], text.out[layer, start:stop])
                )
                slots += at
            q, k, out = (torch.cat(each).flatten(1) for each in zip(*rows, strict=True))
            padding = torch.tensor([*slots, -1, -1])
            self.compressor.see(layer, q, k, out, padding)
            outs.append(out)
        self.lost = self.compressor.lost_blocks()
        self.compressor.end()
        return outs

    def wanted(self, text: Text, layer: int) -> list[tuple[Tensor, Tensor]]:
        """Keys and values that each head keeps of a prompt in one piece, moved, in order of positions, but the last."""
        rope = self.saved.engine.skeleton.rotations[layer]
        q, k, v = (t[layer].transpose(0, 1)[None] for t in text[1:4])
        store = make_store(self.recipe.policy, layer, rope)
        store.initialize(k, group=GROUP)
        _, pending = store.attend_prompt(q, k, v, None, self.transform)
        store.compress(pending, self.recipe.budget(text.total))
        found: list[tuple[Tensor, Tensor]] = []
        for head, places in enumerate(store.tensors.positions[0].tolist()):
            kept = sorted(place for place in places if place >= 0)
            assert len(kept) == self.recipe.kept(text.total) and kept[-1] == text.total - 1
            keys = moved(k[0, head : head + 1, kept[:-1]], text.total - len(kept), rope)
            found.append((keys[0], v[0, head, kept[:-1]]))
        return found

    def check(self, text: Text) -> None:
        """Take a prompt, and compare it."""
        layers = self.compressor.take(text.name)
        assert [layer.layer_idx for layer in layers] == [*range(LAYERS)]
        for number, layer in enumerate(layers):
            assert layer.keys.device.type == "cpu"
            for head, (keys, values) in enumerate(self.wanted(text, number)):
                assert torch.equal(layer.values[head], values)
                torch.testing.assert_close(layer.keys[head], keys, atol=1e-5, rtol=1e-5)

    def fails(self, text: Text) -> None:
        """A prompt is not there."""
        with pytest.raises(KVPolicyError, match="must be compressed, got an error"):
            self.compressor.take(text.name)


def slots_of(blocks: Sequence[int], start: int, stop: int) -> list[int]:
    return [blocks[at // BLOCK] * BLOCK + at % BLOCK for at in range(start, stop)]


def text_of(tokens: int, seed: int = 0, first: int = 1) -> Text:
    generator = torch.Generator().manual_seed(seed)
    q, out = torch.randn(2, LAYERS, tokens, HEADS * GROUP, DIM, generator=generator)
    k, v = torch.randn(2, LAYERS, tokens, HEADS, DIM, generator=generator)
    blocks = tuple(range(first, first + -(-tokens // BLOCK)))[::-1]
    return Text(f"t{next(NAMES)}", q, k, v, out, blocks)


TRANSFORMS = {
    "plain": ScoreTransform(DIM**-0.5),
    "capped": ScoreTransform(DIM**-0.5, softcap=3.0),
    "sinks": ScoreTransform(DIM**-0.5, sinks=torch.tensor([0.5, -1.0, 2.0, 4.0])),
}


@product("policy,kind", POLICIES, [*TRANSFORMS], sample=each_once(POLICIES, [*TRANSFORMS]))
def test_parts_are_one_piece(saved: Saved, policy: str, kind: str) -> None:
    rank = Rank(saved, policy, kind)
    for tokens, ends in ((70, [70]), (81, [1, 2, 64, 80, 81]), (100, [33, 99, 100]), (100, [7, 100]), (64, [63, 64])):
        text = text_of(tokens, tokens)
        for start, stop in itertools.pairwise([0, *ends]):
            rank.step([(text, start, stop)])
        rank.check(text)


@pytest.mark.parametrize("policy", ["snapkv:window=8@0.4", "h2o@0.3", "expected@0.3"])
def test_several_prompts_of_a_step(saved: Saved, policy: str) -> None:
    rank = Rank(saved, policy)
    one = text_of(90, 1)
    two = text_of(90, 2, 20)
    three = text_of(70, 3, 40)
    rank.step([(one, 0, 40), (two, 0, 90)])
    rank.step([(three, 0, 10), (one, 40, 90)])
    rank.check(one)
    rank.step([(three, 10, 70)])
    rank.check(three)
    rank.check(two)


@product("policy,again", POLICIES, [0, 16, 32], sample=each_once(POLICIES, [0, 16, 32]))
def test_parts_that_are_computed_again(saved: Saved, policy: str, again: int) -> None:
    """A prompt that is preempted begins anew, or behind blocks that are still in the prefix cache."""
    rank = Rank(saved, policy)
    text = text_of(80)
    rank.step([(text, 0, 50)])
    other = text._replace(blocks=(*text.blocks[: again // BLOCK], *range(50, 50 + len(text.blocks) - again // BLOCK)))
    for start, stop in itertools.pairwise([again, 40, 60, 80]):
        if again < stop:
            rank.step([(other, max(start, again), stop)])
    rank.check(text)


def test_the_output_of_the_last_token_is_put_back(saved: Saved) -> None:
    rank = Rank(saved, "window@0.5")
    one = text_of(70, 1)
    two = text_of(80, 2, 20)
    rank.step([(one, 0, 70), (two, 0, 30)])
    rank.step([(two, 30, 80)])
    for _ in range(2):  # again after a preemption
        outs = rank.step([], [LastToken(one.name, 700, 7), LastToken(two.name, 5, 8), LastToken("unknown", 6, 9)])
        for layer, out in enumerate(outs):
            assert torch.equal(out[2], one.out[layer, -1].flatten())
            assert torch.equal(out[3], two.out[layer, -1].flatten())
            assert torch.equal(out[0], out[1]) and torch.equal(out[0], out[4])  # of other requests
            assert not torch.equal(out[0], out[2])
        assert rank.lost == {9}


def test_last_tokens_that_are_not_seen_are_lost(saved: Saved) -> None:
    """As in a graph of a whole step, which no layer of Python takes part in."""
    rank = Rank(saved, "window@0.5")
    text = text_of(70)
    rank.step([(text, 0, 70)])
    assert not rank.lost and not rank.compressor.lost_blocks()
    work = Work(last_tokens=[LastToken(text.name, 5, 8)])
    rank.compressor.begin(work)
    assert rank.compressor.lost_blocks() == {8}
    q = torch.zeros(1, HEADS * GROUP * DIM)
    rank.compressor.see(0, q, q[:, : HEADS * DIM], q.clone(), torch.tensor([5]))
    assert rank.compressor.lost_blocks() == {8}  # of one of two layers
    rank.compressor.see(1, q, q[:, : HEADS * DIM], q.clone(), torch.tensor([5]))
    assert not rank.compressor.lost_blocks()
    rank.compressor.begin(work)
    for layer in range(LAYERS):
        rank.compressor.see(layer, q, q, q, torch.tensor([5], device="meta"))  # nothing can be compared
    assert rank.compressor.lost_blocks() == {8}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"head_size_v": 4}, r"must have the same size .*, got 8 and 4 in layer 1"),
        ({"kv_cache_update_bypass": True}, r"must pass through attention .*, got layer 1, which writes them"),
    ],
)
def test_layers_that_are_refused(saved: Saved, fields: dict[str, Any], message: str) -> None:
    unused: Any = None
    layers = {1: SimpleNamespace(head_size=8, **fields)}
    with pytest.raises(KVPolicyError, match=message):
        compressor_of(recipe_of("window@41"), saved.engine, unused, layers, (4, BLOCK), unused)


def test_what_is_held(saved: Saved) -> None:
    rank = Rank(saved, "window@41")
    text = text_of(80)
    outputs = LAYERS * HEADS * GROUP * DIM * 4
    kept = LAYERS * 2 * HEADS * 40 * DIM * 4
    rank.step([(text, 0, 50)])
    assert rank.compressor.nbytes == 0  # a window needs no queries
    rank.step([(text, 50, 80)])
    assert rank.compressor.nbytes == rank.compressor.peak == outputs + kept
    rank.compressor.take(text.name)
    assert rank.compressor.nbytes == outputs
    rank.step([], dropped=[text.name])
    assert rank.compressor.nbytes == 0 and rank.compressor.peak == outputs + kept
    rank.fails(text)
    summing = Rank(saved, "h2o@41")
    summing.step([(text, 0, 50)])
    assert summing.compressor.nbytes == LAYERS * HEADS * GROUP * 80 * 4


def test_prompts_that_leave_their_blocks_are_saved(saved: Saved) -> None:
    rank = Rank(saved, "keydiff@0.5")
    text = text_of(80)
    rank.step([(text, 0, 80)])
    blocks = (9, 8, 7)
    kept = rank.recipe.kept(80) - 1
    at = slots_of(blocks, 0, kept)
    for pool, layer in zip(rank.pools, rank.compressor.take(text.name), strict=True):
        pool.keys[at] = layer.keys.transpose(0, 1)
        pool.values[at] = layer.values.transpose(0, 1)
    rank.compressor.peak = 0
    rank.compressor.save(Work(savings=[Saving(text.name, kept, blocks)]))
    assert rank.compressor.peak == rank.compressor.nbytes > 0
    other = text_of(40, 5, 7)  # gets the blocks in the same step
    rank.step([(other, 0, 40)])
    rank.check(text)


@pytest.mark.parametrize("what", ["_gather", "_compressed", "_begun"])
def test_what_goes_wrong_with_a_prompt_is_its_own(saved: Saved, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(saved, "snapkv:window=8@0.4")
    good = text_of(80, 1)
    bad = text_of(90, 2, 20)
    original = getattr(rank.compressor, what)

    def broken(*args: Any) -> Any:
        if any(each == 90 or getattr(each, "total", 0) == 90 for each in args if isinstance(each, int | Part)):
            raise RuntimeError("no memory")
        return original(*args)

    monkeypatch.setattr(rank.compressor, what, broken)
    rank.step([(bad, 0, 90), (good, 0, 80)])
    rank.check(good)
    rank.fails(bad)
    rank.step([], dropped=[good.name, bad.name])
    assert not rank.compressor.nbytes and not rank.compressor._failed


def test_a_prompt_of_which_parts_are_missing_fails(saved: Saved) -> None:
    rank = Rank(saved, "window@0.5")
    text = text_of(80)
    rank.step([(text, 10, 80)])
    rank.fails(text)


def test_a_selector_that_evicts_the_last_token_fails(saved: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    """No built-in one does; the last token is computed again, and would be there twice otherwise."""
    text = text_of(80)
    rank = Rank(saved, "window@0.5")

    class Oldest(type(rank.recipe.policy.selector)):
        __slots__ = ()

        def priority(self, state: Any, view: Any) -> Tensor:
            return -view.positions.float()

    def make(policy: Any, layer_idx: int, rope: Any) -> Any:
        store = make_store(policy, layer_idx, rope)
        object.__setattr__(store.spec, "selector", Oldest())
        return store

    monkeypatch.setattr(compressing, "make_store", make)
    rank.step([(text, 0, 80)])
    rank.fails(text)
