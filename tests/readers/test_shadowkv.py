"""Keys that a step rebuilds: their basis, coefficients and rotation, and when the basis is found."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import kvpolicy
from kvpolicy import KVPolicyError, PolicyCache, ShadowKV
from kvpolicy.engine.layer_slots import LayerSlots
from kvpolicy.protocols import Read
from kvpolicy.readers import shadowkv
from tests.conformance.models import build
from tests.conformance.play import forward, make_batch
from tests.engine.parts import index_of
from tests.kernels.test_rotary import scaled
from tests.readers.bench import DIM, HEADS, Layer, draw, slow_output
from tests.reference.readers.shadowkv import singular_vectors
from tests.sampling import each_once, product

EVERY = torch.ones(1, dtype=torch.bool)


def moments(keys: Tensor) -> Tensor:
    """Sums of the outer products of keys [B, H, n, D]."""
    return keys.double().mT @ keys.double()


@pytest.mark.parametrize("tokens", [1, 2, 5, 8, 40])
@pytest.mark.parametrize("rank", [1, 3, DIM])
def test_the_basis_is_that_of_the_slow_version(tokens: int, rank: int) -> None:
    """Up to signs, and to what no key has a part in: what is rebuilt is the same."""
    keys = torch.randn(1, 2, tokens, DIM, generator=torch.Generator().manual_seed(tokens + rank))
    reader = ShadowKV(rank=rank, page=1)
    index: Any = reader.alloc(1, 2, tokens, DIM, torch.float32, "cpu")
    reader.fit_basis(index, moments(keys), EVERY)
    assert reader.has_basis(index).tolist() == [True]
    assert torch.allclose(index.vectors.mT @ index.vectors, torch.eye(rank).expand(1, 2, -1, -1), atol=1e-5)
    every = torch.arange(tokens).expand(1, 2, -1)
    reader.project(index, every, keys[:, :, :, None], torch.ones(1, 2, tokens, 1, dtype=torch.bool))
    rebuilt = reader.rebuild_keys(index, every)
    for head in range(2):
        vectors = torch.tensor(singular_vectors(keys[0, head].double().tolist())[:rank], dtype=torch.float64)
        want = keys[0, head].double() @ vectors.mT @ vectors
        assert torch.allclose(rebuilt[0, head].double(), want, atol=1e-4)
        # No other space of this rank is closer to the keys.
        rest = torch.linalg.svdvals(keys[0, head].double())[rank:].square().sum()
        assert torch.allclose((rebuilt[0, head] - keys[0, head]).double().square().sum(), rest, atol=1e-4)


def test_keys_in_few_directions_are_rebuilt_exactly() -> None:
    """Also where all are equal, or zero."""
    generator = torch.Generator().manual_seed(0)
    few = torch.randn(1, 1, 30, 2, generator=generator) @ torch.randn(1, 1, 2, DIM, generator=generator)
    for keys in (few, torch.ones(1, 1, 30, DIM), torch.zeros(1, 1, 30, DIM)):
        reader = ShadowKV(rank=2, page=5)
        index: Any = reader.alloc(1, 1, 6, DIM, torch.float32, "cpu")
        reader.fit_basis(index, moments(keys), EVERY)
        paged = keys.unflatten(2, (6, 5))
        reader.project(index, torch.arange(6)[None, None], paged, torch.ones(1, 1, 6, 5, dtype=torch.bool))
        slots = torch.tensor([[[29, 0, 7, 7]]])
        assert torch.allclose(reader.rebuild_keys(index, slots), keys[:, :, slots[0, 0]], atol=1e-4)


def test_rows_that_are_not_asked_for_keep_their_basis() -> None:
    reader = ShadowKV(rank=2)
    index: Any = reader.alloc(2, 1, 3, DIM, torch.float32, "cpu")
    keys = torch.randn(2, 1, 8, DIM, generator=torch.Generator().manual_seed(0))
    reader.fit_basis(index, moments(keys), torch.tensor([True, False]))
    assert reader.has_basis(index).tolist() == [True, False]
    before = index.vectors.clone()
    reader.fit_basis(index, moments(keys * torch.arange(1, 1 + DIM)), torch.tensor([False, True]))
    assert torch.equal(index.vectors[0], before[0]) and reader.has_basis(index).tolist() == [True, True]


def test_landmarks_and_coefficients_leave_out_empty_slots() -> None:
    reader = ShadowKV(rank=1, page=2)
    index: Any = reader.alloc(1, 1, 2, 2, torch.float32, "cpu")
    reader.fit_basis(index, torch.diag(torch.tensor([5.0, 1.0])).double()[None, None], EVERY)
    keys = torch.tensor([[[[[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0], [torch.nan, 0.0]]]]])
    occupied = torch.tensor([[[[True, True], [True, False]]]])
    every = torch.arange(2)[None, None]
    reader.refresh(index, every, keys, occupied)
    reader.project(index, every, keys, occupied)
    assert index.landmarks.tolist() == [[[[2.0, 3.0], [5.0, 6.0]]]]
    assert reader.coefficients(index).abs().flatten().tolist() == [1.0, 3.0, 5.0, 0.0]
    assert reader.rebuild_keys(index, torch.tensor([[[1, 3]]])).tolist() == [[[[3.0, 0.0], [0.0, 0.0]]]]


@pytest.mark.parametrize(
    ("recent", "sinks", "read", "base"),
    [(1, 0, 8, "full"), (3, 2, 8, "h2o"), (7, 5, 12, "full"), (2, 1, 4, "h2o"), (30, 30, 8, "full")],
)
def test_the_newest_and_the_first_tokens_have_their_own_keys(recent: int, sinks: int, read: int, base: str) -> None:
    """As many as are read, and no other; also where the last page is shorter, so that a slot is named twice."""
    at = "@0.5" if base == "h2o" else ""
    text = f"{base}+shadowkv:page=2:rank=2:read={read}:recent={recent}:sinks={sinks}:rebuild=50{at}"
    layer = Layer(text, [20 if at else 40], new=9)
    layer.prompt(*draw(40, 3))
    for step in range(9):
        q, k, v = draw(1, 30 + step)
        out = layer.step(q, k, v)
        read_by_head = [layer.positions_read(0, head) for head in range(HEADS)]
        assert all(40 + step in each for each in read_by_head)
        assert torch.allclose(out.double(), slow_output(layer, q, [read_by_head]), atol=1e-5)
        layer.between()


def test_generated_tokens_are_in_the_basis_of_the_prompt_until_it_is_found_again() -> None:
    layer = Layer("full+shadowkv:read=8:rank=3:page=2:recent=1:rebuild=5", [24], new=20)
    layer.prompt(*draw(24, 1))
    reads: Any = layer.store.tensors.reads
    before = reads.index.vectors.clone()
    for step in range(1, 11):
        now = draw(1, step)
        layer.step(*now)
        rebuilt = layer.policy.reader.rebuild_keys(reads.index, torch.full((1, HEADS, 1), 23 + step))  # pyright: ignore[reportAttributeAccessIssue]
        assert torch.allclose(rebuilt, now[1] @ before @ before.mT, atol=1e-5)
        layer.between()
        assert torch.equal(reads.index.vectors, before) == bool(step % 5)
        before = reads.index.vectors.clone()


RANK = 3
SPEC = f"full+shadowkv:read=8:page=2:rank={RANK}:sinks=1:recent=2"
FAMILIES = ["llama", "qwen3", "gpt_neox", "gemma2", "gpt_oss", "opt", "gpt2", "yarn", "linear"]


def model_of(family: str) -> Any:
    """A small model."""
    return scaled(family) if family in ("yarn", "linear") else build(family, layers=2)


def vectors_of(layer: Layer) -> Tensor:
    """The basis that a layer holds."""
    reads: Any = layer.store.tensors.reads
    return reads.index.vectors


def watch(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Read, Tensor]]:
    """What steps read from now on: their layer, the chosen slots and their keys."""
    found: list[tuple[Any, Read, Tensor]] = []
    keys = ShadowKV._keys

    def noted(self: ShadowKV, index: Any, slots: LayerSlots, read: Read) -> Tensor:
        found.append((slots._layer, read, keys(self, index, slots, read)))
        return found[-1][2]

    monkeypatch.setattr(ShadowKV, "_keys", noted)
    return found


@product(
    "family,positions,joint",
    FAMILIES,
    ["own", "columns"],
    ["false", "true"],
    sample=each_once(FAMILIES, ["own", "own", "columns", "columns"], ["false", "true"]),
)
def test_keys_are_projected_without_their_rotation(
    family: str, positions: str, joint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of padded rows too, whether the model counts the padding or not; and those of the newest are not projected."""
    model = model_of(family)
    prompt = 26
    lengths = [26, 17]
    ids, mask = make_batch(lengths, [prompt] + [1] * 4)
    found = watch(monkeypatch)
    with torch.no_grad(), kvpolicy.attach(model, f"{SPEC}:joint={joint}"):
        cache = PolicyCache(model, new=4)
        for start, stop in [(0, prompt), *((prompt + step, prompt + step + 1) for step in range(4))]:
            if positions == "own":
                forward(model, ids, mask, start, stop, cache)
            else:
                places = torch.arange(start, stop).expand(2, -1)
                more = {} if family in ("opt", "gpt2") else {"position_ids": places}
                model(ids[:, start:stop], attention_mask=mask[:, :stop], cache=cache, use_cache=True, **more)
    shifts = [0, 0] if positions == "own" else [prompt - length for length in lengths]
    assert found
    for layer, chosen, keys in found[-len(cache.policy_layers) :]:
        tensors = layer.tensors
        rope = layer.spec.rope
        assert rope is not None
        every = range(tensors.keys.shape[1])
        for row in range(2):
            plain: list[Tensor] = []
            there = tensors.positions[row] + shifts[row]
            for head in every:
                stored = tensors.keys[row, head][None, None]
                plain.append(rope.unrotate(stored, there[head][None, None])[0, 0].double())
            rebuilt = [projected(each, tensors.positions[row, head], lengths[row]) for head, each in enumerate(plain)]
            if joint == "true":
                width = keys.shape[-1]
                together = projected(torch.cat(plain, -1), tensors.positions[row, 0], lengths[row])
                rebuilt = [together[:, head * width : (head + 1) * width] for head in every]
            for head in every:
                at = tensors.positions[row, head]
                turned = rope.rotate(rebuilt[head].float()[None, None], there[head][None, None])[0, 0]
                own = (at >= int(tensors.length[row]) - 2) | (at < 1)
                want = torch.where(own[:, None], tensors.keys[row, head], turned)
                chosen_here = chosen.chosen[row, head] & (at[chosen.slots[row, head]] >= 0)
                read = chosen.slots[row, head][chosen_here]
                assert len(read) >= 7
                assert torch.allclose(keys[row, head][chosen_here], want[read], atol=1e-4)


def projected(plain: Tensor, positions: Tensor, prompt: int) -> Tensor:
    """Unrotated keys [n, D] in the space of those of a prompt; of slots that are empty, any."""
    vectors = torch.linalg.svd(plain[(positions >= 0) & (positions < prompt)], full_matrices=False).Vh[:RANK]
    return plain @ vectors.mT @ vectors


@pytest.mark.parametrize("joint", ["false", "true"])
def test_moments_are_summed_in_tiles(joint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the last tile is shorter."""
    bases: list[Tensor] = []
    for tile in (512, 5, 1):
        monkeypatch.setattr(shadowkv, "_TILE", tile)
        layer = Layer(f"{SPEC}:joint={joint}", [26, 17], new=2)
        layer.prompt(*draw(26, 1, batch=2), torch.arange(26) >= torch.tensor([[0], [9]]))
        bases.append(vectors_of(layer))
    for each in bases[1:]:
        assert torch.allclose(each @ each.mT, bases[0] @ bases[0].mT, atol=1e-5)


def test_the_basis_is_of_tokens_and_not_of_what_stands_in_empty_slots() -> None:
    layer = Layer(SPEC, [24], new=9)
    layer.prompt(*draw(24, 1))
    before = vectors_of(layer).clone()
    tensors = layer.store.tensors
    empty = tensors.positions < 0
    assert bool(empty.any())
    tensors.keys[empty] = torch.nan
    index_of(layer.store).rebuild(placed=torch.ones(1, dtype=torch.bool))
    assert torch.equal(vectors_of(layer), before)


def test_a_row_that_begins_in_a_step_gets_a_basis_before_it_needs_one() -> None:
    """While all of its tokens are read as they are stored; the other row keeps what it has."""
    layer = Layer("full+shadowkv:read=8:page=2:rank=2:sinks=0:recent=4:rebuild=100", [24, 24], new=20)
    layer.prompt(*draw(24, 1, batch=2), torch.arange(24) >= torch.tensor([[0], [24]]))
    reader: Any = layer.policy.reader
    reads: Any = layer.store.tensors.reads
    before = vectors_of(layer).clone()
    has: list[bool] = []
    for step in range(10):
        layer.step(*draw(1, 10 + step, batch=2), valid=torch.tensor([[True], [step > 1]]))
        held = int(layer.store.tensors.length[1])
        has.append(reader.has_basis(reads.index).tolist()[1])
        assert has[-1] or held <= 4
        layer.between()
    assert has == [False] * 4 + [True] * 6
    assert torch.equal(vectors_of(layer)[0], before[0])


def test_a_layer_that_gets_more_slots_keeps_its_basis() -> None:
    layer = Layer(SPEC, [24], new=1)
    layer.prompt(*draw(24, 1))
    before = vectors_of(layer).clone()
    for step in range(4):
        layer.step(*draw(1, 20 + step))
        layer.between()
    assert layer.store.layout.exact > 25 and torch.equal(vectors_of(layer), before)


@pytest.mark.parametrize("joint", ["false", "true"])
def test_a_short_row_is_what_it_is_alone(joint: str) -> None:
    """Although all of its tokens are read, and those of the other row are not."""
    lengths = torch.tensor([24, 6])
    q, k, v = draw(24, 2, batch=2)
    spec = SPEC.replace("read=8", f"read=16:joint={joint}")  # the short row has 12 slots alone
    both = Layer(spec, [24, 6], new=6)
    both.prompt(q, k, v, torch.arange(24) >= 24 - lengths[:, None])
    alone = Layer(spec, [6], new=6)
    alone.prompt(*(t[1:, :, 18:] for t in (q, k, v)))
    stored = Layer("full", [6], new=6)
    stored.prompt(*(t[1:, :, 18:] for t in (q, k, v)))
    for step in range(6):
        now = draw(1, 20 + step, batch=2)
        outputs = both.step(*now)[1], alone.step(*(t[1:] for t in now))[0], stored.step(*(t[1:] for t in now))[0]
        assert torch.allclose(outputs[0], outputs[1], atol=1e-5)
        assert not torch.allclose(outputs[1], outputs[2], atol=1e-3), "the rank is low"
        for layer in (both, alone, stored):
            layer.between()


def test_each_prompt_finds_the_basis_again_of_its_rows() -> None:
    layer = Layer(SPEC, [24, 24], new=2)
    layer.prompt(*draw(24, 1, batch=2))
    before = vectors_of(layer).clone()
    layer.budgets = [30, 30]
    layer.prompt(*draw(6, 2, batch=2), torch.tensor([[True] * 6, [False] * 6]))
    same = [torch.equal(now, then) for now, then in zip(vectors_of(layer), before, strict=True)]
    assert same == [False, True]


@pytest.mark.parametrize("joint", ["false", "true"])
@pytest.mark.parametrize("host", ["true", "false"])
def test_bytes_are_those_of_the_parts(host: str, joint: str) -> None:
    policy = f"full+shadowkv:read=64:rank=5:joint={joint}:page=8:sinks=3:recent=9:host={host}"
    plan = kvpolicy.plan("tiny", policy, prompt=500, dtype=torch.float32)
    layer = plan.layers[0]
    count = 4
    dim = 32
    number = 4
    entries = -(-layer.tokens // 8)
    basis = count * dim * 5 * number
    landmarks = count * entries * dim * number
    coefficients = (count if joint == "false" else 1) * entries * 8 * 5 * number
    assert layer.nbytes["index"] == landmarks + coefficients + basis + 8 + 8  # limit and offset
    vector = count * dim * number
    keys = (8 + 12) * vector  # of the page that was written, and those that are read as they are stored
    values = 64 * vector
    positions = count * layer.tokens * 4
    assert layer.moved == positions + landmarks + 2 * basis + count * 64 * 5 * number + keys + values
    assert (layer.loaded, layer.stored) == ((keys + values, 2 * vector) if host == "true" else (0, 0))


@pytest.mark.parametrize("selector", ["full", "window", "streaming"])
def test_heads_that_share_a_basis(selector: str) -> None:
    """A rank of all channels leaves nothing out, and the index is that of the slots, in a long life."""
    budget = "" if selector == "full" else "@0.8"
    shape = "read=8:page=2:recent=1:sinks=0:rebuild=3"
    pair = [
        Layer(f"{selector}+shadowkv:{shape}:{options}{budget}", [26, 17] if selector == "full" else [20, 13], new=3)
        for options in ("rank=16:joint=true", "rank=8")
    ]
    for layer in pair:
        layer.prompt(*draw(26, 1, batch=2), torch.arange(26) >= torch.tensor([[0], [9]]))
    for step in range(9):
        now = draw(1, 20 + step, batch=2)
        outs = [layer.step(*now) for layer in pair]
        assert torch.allclose(outs[0], outs[1], atol=1e-4)
        for layer in pair:
            layer.between()


@pytest.mark.parametrize("policy", ["h2o+shadowkv:joint=true@0.5", "snapkv+shadowkv:joint=true@0.5"])
def test_heads_that_keep_different_tokens_share_no_basis(policy: str) -> None:
    with pytest.raises(KVPolicyError, match="must keep the same tokens in every head to be combined with shadowkv"):
        kvpolicy.Policy.parse(policy)


def test_an_embedding_that_depends_on_the_length_is_refused() -> None:
    with pytest.raises(KVPolicyError, match=r"must be undone for this reader, .* try a reader that reads keys as they"):
        kvpolicy.attach(scaled("dynamic"), SPEC)
    kvpolicy.attach(scaled("dynamic"), "full+quest:read=8").detach()


def test_positions_with_a_gap_are_refused() -> None:
    """What stands for padding counts in the rotation, so that the first position need not be 0."""
    model = build("llama", layers=1)
    with torch.no_grad(), kvpolicy.attach(model, SPEC):
        cache = PolicyCache(model, new=2)
        ids = torch.arange(3, 33)[None]
        model(ids[:, :20], cache=cache, position_ids=torch.arange(20)[None] + 4)
        with pytest.raises(KVPolicyError, match="positions must go on by one"):
            model(ids[:, 20:], cache=cache, position_ids=torch.arange(10)[None] + 29)
        model(ids[:, 20:], cache=cache, position_ids=torch.arange(10)[None] + 24)
        assert [layer.store.rope_offset.tolist() for layer in cache.policy_layers] == [[4]]  # pyright: ignore[reportOptionalMemberAccess]
