"""Policies that differ by layer: every layer is that of its own policy, and all of them fit one budget."""

from __future__ import annotations

import copy
import functools
import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

import kvpolicy
from kvpolicy import KVPolicyError, Policy, PolicyCache
from kvpolicy.hf.model_spec import describe
from kvpolicy.planning.curves import save_layers
from kvpolicy.planning.memory import plan_layers
from kvpolicy.planning.planner import divide
from kvpolicy.policy import LayeredPolicy
from kvpolicy.protocols import LayerShape
from kvpolicy.text.budget import bytes_of
from tests.conformance.access import kept_positions
from tests.conformance.calibration import DIM
from tests.conformance.models import build
from tests.conformance.play import ROWS, TURNS, play, talk
from tests.conformance.policies import words
from tests.conformance.replay import Twin, reference_codec, replay
from tests.conformance.turning import turns
from tests.engine.filled import attached, row_of
from tests.engine.test_by_layer_random import CODED, KIVI
from tests.engine.test_rollback import undone
from tests.files.test_saved_cache import check_same, start
from tests.reference.by_layer import tokens_that_fit
from tests.sampling import each_once, product

MIXED = [
    [words("snapkv", "plain"), words("h2o", "kivi", budget="0.8"), words("streaming", budget="0.3")],
    [words("h2o", "kvquant"), words("expected", budget="0.9"), words("window", "rotate", budget="0.6")],
    [words("tova"), words("h2o", "tokenwise", budget="0.8"), words("keydiff", "bfp")],
    [words("snapkv", "merge"), words("kvcrush", "csr", budget="0.9"), words("snapkv")],
    [words("h2o"), words("probe", "zipcache"), words("scissorhands", "gear")],
    [words("kvzip", "plain"), words("kvzip", "tokenwise", budget="0.9"), words("kvzip", "kivi", budget="0.7")],
    ["full", KIVI, CODED],
]
"""Specs of three layers."""
PAGED = [words("tova"), words("uniform/adakv", "h2o", "tokenwise", budget="0.8"), words("uniform/adakv", "snapkv")]
"""Two of them with head budgets."""
READING = [
    words("h2o", "quest:read=6:page=2:dense=0"),
    words("h2o", "kivi"),
    words("h2o", "labels:read=5:channels=3:dense=0"),
]
"""Two of them with readers."""

REUSED = [f"h2o+{codec}+reuse:every=2:dense=0/exact:read=6@0.5" for codec in ("plain", "kivi")]


def layered(specs: list[str], budget: Any = 0.7) -> Policy:
    return Policy.by_layer(specs, budget=1.0 if specs[0] == "full" else budget)


@product("specs,rows", MIXED, [*ROWS], sample=each_once(MIXED, [*ROWS]))
def test_every_layer_is_that_of_its_own_policy(specs: list[str], rows: str) -> None:
    """Each layer's queries, keys and values through the slow reference of that layer's policy."""
    policy = layered(specs)
    model = build("llama", layers=3)
    tape, cache, logits = play(model, policy, ROWS[rows])
    assert torch.isfinite(logits).all() and cache.policy == policy
    rotations = turns(model, DIM)
    for index, some in tape.items():
        own = policy.at(index)
        verdict = replay(own, {index: some}, twin=Twin(reference_codec(own.codec), rotations))
        assert verdict.turns >= 5, f"most choices of layer {index} were within fp32's noise"


ALONE = [*MIXED[:3], PAGED, READING]


@product("specs,budget", ALONE, [0.5, 18], sample=each_once(ALONE, [0.5, 18]))
def test_a_row_of_a_batch_is_that_row_alone(specs: list[str], budget: Any) -> None:
    lengths = [40, 33]
    moves = [40, *TURNS[1:]]
    with attached(layered(specs, budget), lengths, moves) as (model, ids, mask):
        together = PolicyCache(model, new=sum(TURNS[1:]))
        logits = talk(model, ids, mask, moves, together)
        for row, length in enumerate(lengths):
            alone = PolicyCache(model, new=sum(TURNS[1:]))
            own = talk(model, *row_of(ids, mask, row), [length, *TURNS[1:]], alone)
            assert (own[0] - logits[row, 40 - length :]).abs().max() < 0.1
            for mine, ours in zip(alone.policy_layers, together.policy_layers, strict=True):
                assert int(mine.budget) == int(ours.budget[row])
                assert kept_positions(mine)[0] == kept_positions(ours)[row]


@pytest.mark.parametrize("specs", [MIXED[1], MIXED[3], PAGED, READING])
def test_saved_and_loaded(specs: list[str], tmp_path: Path) -> None:
    model = build("llama", layers=3)
    with kvpolicy.attach(model, layered(specs)):
        cache, ids, mask = start(model, [26, 17])
        cache.save(tmp_path / "cache.safetensors")
        check_same(model, tmp_path / "cache.safetensors", cache, ids, mask)


def test_taken_back() -> None:
    """A mark and a rollback, with block work in the middle."""
    specs = [words("h2o", "kivi"), words("uniform/adakv", "snapkv"), words("streaming", "tokenwise")]
    undone("llama", layered(specs), [26, 17], 5, 2)


def test_as_data() -> None:
    policy = Policy.by_layer(["snapkv@0.5", Policy.parse("h2o+kivi:bits=4@0.25")], budget=0.2)
    assert isinstance(policy, LayeredPolicy) and isinstance(policy, Policy)
    assert eval(repr(policy)) == policy and str(policy) == repr(policy) and hash(policy) == hash(eval(repr(policy)))
    assert copy.deepcopy(policy) == policy and copy.copy(policy) == policy
    assert Policy.from_dict(json.loads(json.dumps(policy.to_dict()))) == policy
    assert policy.with_budget(0.3).budget == 0.3 and policy.with_budget(0.3) != policy
    assert policy != Policy.parse("snapkv@0.5") and Policy.parse("snapkv@0.5") != policy
    assert "layer 1" in policy.to_html()


def test_a_file_of_layers(tmp_path: Path) -> None:
    """`tuned:file=` is the short form of a policy by layer."""
    file = tmp_path / "layers.json"
    specs = ["snapkv:window=6:kernel=3@0.5", "h2o@0.25"]
    save_layers(file, specs)
    spec = f"tuned:file={file}@0.5"
    policy = Policy.parse(spec)
    assert str(policy) == spec and Policy.parse(str(policy)) == policy and eval(repr(policy)) == policy
    model = build("llama", layers=2)
    with kvpolicy.attach(model, spec) as handle:
        model.generate(torch.arange(30)[None], max_new_tokens=3, do_sample=False)
        assert handle.policy == Policy.by_layer(specs, budget=0.5) and str(handle.policy) == spec
        assert handle.plan is not None and str(handle.plan).startswith(spec)
        again = PolicyCache(model, f"tuned:file={file}@0.4")
        assert again.policy == Policy.by_layer(specs, budget=0.4)
    assert kvpolicy.plan(model.config, spec, prompt=30, new=3).policy == handle.policy


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        (["h2o@0.5", "h2o:decode=grow@0.5"], "must have the same decode mode, got h2o@0.5 for layer 0"),
        (["full", "h2o@0.5"], "must have the same decode mode"),
        (["kvzip@0.5", "h2o@0.5"], "must replay their prompts alike, or none may"),
        (["h2o@0.5", "h2o@12"], "must be fractions, or all tokens, got h2o@0.5 for layer 0 and h2o@12 for layer 1"),
        (["h2o@1MiB"], "must be a relative share"),
        (["squeeze+h2o@0.5"], "must have the allocator uniform"),
        (REUSED, "must have the same reader and codec"),
        ([], "must have at least one layer"),
        ("h2o", "must be a list with one for each layer"),
    ],
)
def test_refused(specs: Any, message: str) -> None:
    with pytest.raises(KVPolicyError, match=message):
        Policy.by_layer(specs, budget=0.5)


def test_refused_later() -> None:
    model = build("llama", layers=2)
    policy = Policy.by_layer(["h2o@0.5"] * 3, budget=0.5)
    message = "one for each of the model's 2 layers, got 3"
    with pytest.raises(KVPolicyError, match=message):
        kvpolicy.attach(model, policy)
    with kvpolicy.attach(model, "h2o@0.5"), pytest.raises(KVPolicyError, match=message):
        PolicyCache(model, policy)
    with pytest.raises(KVPolicyError, match="must not differ by layer itself"):
        Policy.by_layer([policy], budget=0.5)
    with pytest.raises(KVPolicyError, match="must be read from one layer"):
        _ = policy.selector


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("tuned@0.1", "must have the file"),
        ("tuned:file=a.json+kivi", "must stand alone"),
        ("tuned:name=a.json", "must be among file, length"),
        ("tuned:file=a.json:length=0", "at least 1 token"),
        ("tuned:file=none.json@0.1", "must be readable"),
        ("tuned:file=bad.json@0.1", "must be JSON"),
    ],
)
def test_files_that_are_refused(spec: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bad.json").write_text("{")
    with pytest.raises(KVPolicyError, match=message):
        kvpolicy.attach(build("llama", layers=2), spec)


@product("seed", [*range(60), 244], sample=[*((seed,) for seed in range(7)), (244,)])
def test_random_divisions(seed: int) -> None:
    """Any shares, lengths and budgets, with the bytes of plans: the budget is met, and would be by no larger factor."""
    dice = Random(seed)
    shape = LayerShape(2, 8, torch.float32)
    layers = dice.randint(1, 4)
    pool = ["h2o", "snapkv", f"streaming+{KIVI}", "tova+tokenwise:bits=4", "uniform/adakv+h2o"]
    shares = [str(dice.randint(1, 100) / 100) for _ in range(layers)]
    specs = [f"{dice.choice(pool)}@{share}" for share in shares]
    length = dice.randint(60, 150)
    end = length + dice.randint(0, 20)
    budgets: list[Any] = [dice.randint(40, 95) / 100, dice.randint(10, 90), f"{layers * dice.randint(3, 19)}KB"]
    budget = budgets[seed % 3]
    policy = Policy.by_layer(specs, budget=budget)
    prompt = torch.tensor([length])
    ends = torch.tensor([end])

    def nbytes(keep: list[int]) -> int:
        pairs = enumerate(zip(specs, keep, strict=True))
        return sum(_planned(spec, count, shape, index, length, end) for index, (spec, count) in pairs)

    token = layers * shape.token_nbytes
    limit = bytes_of(budget) if isinstance(budget, str) else int(token * budget)
    if isinstance(budget, float):
        limit = int(budget * token * end + 1e-9)
    try:
        tokens = divide(policy, None, prompt, ends, [shape] * layers)
    except KVPolicyError:
        assert nbytes([policy.at(index).min_tokens for index in range(layers)]) > limit
        return
    floors = [policy.at(index).min_tokens for index in range(layers)]
    assert tokens.keep[0].tolist() == tokens_that_fit(shares, floors, end, nbytes, limit)


@functools.cache
def _planned(spec: str, keep: int, shape: LayerShape, layer_idx: int, length: int, end: int) -> int:
    """Bytes of one layer under an ordinary policy with a budget in tokens."""
    policy = Policy.parse(spec).with_budget(keep)
    tokens = divide(policy, None, torch.tensor([length]), torch.tensor([end]), [shape])
    size = sum(plan_layers(policy, tokens, [shape], [layer_idx], 1)[0].nbytes.values())
    return size - (8 if layer_idx else 0)  # the mask digest is in the first layer of a cache alone


MIXES = [
    [words("h2o"), words("h2o", "kvquant"), words("expected")],
    [words("h2o"), words("h2o", "rotate"), words("window")],
    [words("h2o"), words("h2o", "merge"), words("snapkv")],
    [words("kvzip"), words("kvzip", "tokenwise"), words("kvzip", "kivi")],
    ["h2o:decode=grow@0.5", "snapkv:window=4:kernel=3:decode=grow@0.9", "full"],
    ["h2o+quest:read=6:page=2:dense=0:resort=3@0.5", "h2o@0.5", "h2o+labels:read=5:channels=3:dense=1@0.5"],
]


def ids(count: int, rows: int = 1) -> torch.Tensor:
    return (torch.arange(count * rows).reshape(rows, count) * 7) % 40 + 1


@pytest.mark.parametrize("specs", MIXES)
def test_chunks_turns_forks_drafts_and_beams(specs: list[str]) -> None:
    """Nothing of it fails, the plan is right to the byte, and a rollback leaves what was there."""
    model = build("llama", layers=3)
    policy = Policy.by_layer(specs, budget=0.75)
    with kvpolicy.attach(model, policy) as handle, torch.no_grad():
        cache = PolicyCache(model, prompt=40, new=30)
        model(ids(25), cache=cache)
        model(ids(15), cache=cache)
        for _ in range(3):
            model(ids(1), cache=cache)
        assert kvpolicy.plan(model, policy, prompt=40, new=30).nbytes == cache.nbytes
        model(ids(5), cache=cache)
        two = cache.fork([0, 0])
        two.reorder_cache(torch.tensor([1, 0]))
        own = model(ids(1), cache=cache.fork()).logits
        logits = model(ids(1).expand(2, 1), cache=two).logits
        assert (logits - own).abs().max() < 1e-4
        cache.mark(most=4)
        for _ in range(4):
            model(ids(1), cache=cache)
        cache.rollback(0)
        assert torch.equal(model(ids(1), cache=cache).logits, own)
        cache.reset()
        model(ids(30), cache=cache)
        out = model.generate(ids(30, 2), max_new_tokens=5, num_beams=3, do_sample=False, pad_token_id=0)
        assert out.shape == (2, 35) and handle.cache is not None
        assert kvpolicy.plan(model, policy, batch=6, prompt=30, new=5).nbytes == handle.cache.nbytes
        drafted = kvpolicy.speculate(model, policy, ids(30), max_new_tokens=8)
    assert isinstance(drafted, torch.Tensor)
    wanted = model.generate(ids(30), max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert torch.equal(drafted, wanted)


def test_the_part_that_forbids_a_move_is_named() -> None:
    """Of whichever layer has it."""
    model = build("llama", layers=3)
    for specs, shift, crop in (
        (["window@0.5", words("expected"), "window@0.5"], "got expected", "the selector expected"),
        (["full", "full", KIVI], "got kivi", "the codec kivi"),
        (["h2o@0.5", "h2o+merge@0.5", "h2o@0.5"], "got the merger merge", "the selector h2o"),
    ):
        budget = 1.0 if specs[0] == "full" else 0.9
        with kvpolicy.attach(model, Policy.by_layer(specs, budget=budget)), torch.no_grad():
            cache = PolicyCache(model, new=9)
            model(ids(30), cache=cache)
            with pytest.raises(KVPolicyError, match=shift):
                cache.shift(5, 2)
            with pytest.raises(KVPolicyError, match=crop):
                cache.crop(-1)


def test_moves_where_every_layer_allows_them() -> None:
    """A cropped cache goes on as one that never saw what was cropped."""
    model = build("llama", layers=3)
    policy = Policy.by_layer(["window@0.5", "streaming@0.9", "window@0.4"], budget=1.0)
    with kvpolicy.attach(model, policy), torch.no_grad():
        short, cropped = (PolicyCache(model, new=9) for _ in range(2))
        model(ids(20), cache=short)
        model(ids(23), cache=cropped)
        cropped.crop(-3)
        one, other = (model(ids(1), cache=cache).logits for cache in (short, cropped))
        assert (one - other).abs().max() < 1e-5
        short.shift(4, 3)
        model(ids(1), cache=short)


def test_a_cache_of_another_policy_than_the_attached_one() -> None:
    """It works if the attached policy has the hooks that the cache's layers need, or says what is missing."""
    model = build("llama", layers=3)
    plain = words("h2o")
    quant = words("h2o", "kvquant")
    pins = words("h2o", "rotate")
    in_one = [plain, quant, plain], [plain, pins, plain]
    with kvpolicy.attach(model, plain), pytest.raises(KVPolicyError, match="attach a policy"):
        PolicyCache(model, "squeeze+h2o@0.5")
    with kvpolicy.attach(model, plain):
        PolicyCache(model, Policy.by_layer([plain, words("tova"), plain], budget=0.7))
        for specs in in_one:
            with pytest.raises(KVPolicyError, match="must store unrotated keys"):
                PolicyCache(model, Policy.by_layer(specs, budget=0.7))
    with kvpolicy.attach(model, Policy.by_layer(in_one[1], budget=0.7)), torch.no_grad():
        PolicyCache(model, plain)
        PolicyCache(model, quant)
        with pytest.raises(KVPolicyError, match="must read hidden states"):
            PolicyCache(model, pins)
    with kvpolicy.attach(model, pins), torch.no_grad():
        cache = PolicyCache(model, Policy.by_layer(in_one[1], budget=0.7), new=9)
        for count in (20, 3, 1):
            model(ids(count), cache=cache)


def run(policy: Policy, prompt: int, count: int, **told: Any) -> PolicyCache:
    """A cache of a model of two layers behind a prompt and some single tokens."""
    turns = [prompt] + [1] * count
    with attached(policy, [prompt], turns, layers=2) as (model, ids, mask):
        cache = PolicyCache(model, **told)
        talk(model, ids, mask, turns, cache)
    return cache


def fewest(cache: PolicyCache) -> list[int]:
    """The fewest tokens that a head of each layer holds."""
    return [int((layer.positions >= 0).sum(-1).amin()) for layer in cache.policy_layers]


@pytest.mark.parametrize("lengths", [[20], [26, 15]])
@pytest.mark.parametrize("budget", ["9000B", "40000B", "400000B"])
def test_bytes_beyond_a_prompt_are_for_what_follows(budget: str, lengths: list[int]) -> None:
    """Equal layers have the tokens of the ordinary policy, also where nobody announced how many will follow."""
    turns = [max(lengths)] + [1] * 40
    kept: list[list[list[int]]] = []
    for policy in (Policy.by_layer(["h2o@0.5"] * 2, budget=budget), f"h2o@{budget}"):
        with attached(policy, lengths, turns, layers=2) as (model, ids, mask):
            cache = PolicyCache(model)
            talk(model, ids, mask, turns, cache)
        kept.append([layer.budget.tolist() for layer in cache.policy_layers])
        assert cache.nbytes <= int(budget[:-1])
    assert kept[0] == kept[1]


def test_a_budget_in_tokens_beyond_a_prompt_is_for_what_follows() -> None:
    """A sliding window of 48 tokens' bytes does not slide after a prompt of 20."""
    cache = run(Policy.by_layer(["window@0.9", "h2o@0.3"], budget=48), 20, 20)
    token = 2 * 2 * cache.policy_layers[0].store.shape.heads * cache.policy_layers[0].keys.shape[-1] * 4
    assert fewest(cache) == [40, 40] and 44 * token < cache.nbytes <= 48 * token


def test_a_growing_share_counts_what_was_announced() -> None:
    """Room for tokens that nobody announced is on top of the share of the prompt, as in other growing caches."""
    policy = Policy.by_layer(["h2o:decode=grow@0.5", "full"], budget=0.8)
    unknown, none = (fewest(run(policy, 40, 0, new=new)) for new in (None, 0))
    assert unknown == none and none[1] == 40


@pytest.mark.parametrize("prompt", [1, 2, 4, 5])
@pytest.mark.parametrize("new", [None, 6])
def test_a_layer_that_evicts_nothing_keeps_short_prompts(prompt: int, new: int | None) -> None:
    """Also where another layer's selector needs more tokens than the share, so that it is not met."""
    policy = Policy.by_layer(["streaming:decode=grow@0.5", "full"], budget=0.5)
    assert fewest(run(policy, prompt, 3, new=new)) == [prompt + 3] * 2


@pytest.mark.parametrize(
    ("specs", "budget", "prompt"),
    [
        (["full", "full"], 0.0005, 513),  # a share of more than 1 is never named, since it would be refused
        (["h2o@0.5", "h2o@0.1"], 0.0005, 600),
        (["snapkv@0.5", "h2o@0.1"], 0.0005, 700),
        (["snapkv@0.5", "streaming:sinks=5@0.1"], 1, 31),
        (["streaming:sinks=8@0.5", "h2o@0.1"], 1, 60),
    ],
)
def test_the_smallest_budget_that_is_named_works(specs: list[str], budget: float | int, prompt: int) -> None:
    config = build("llama", layers=2).config
    with pytest.raises(KVPolicyError, match="must be at least") as caught:
        kvpolicy.plan(config, Policy.by_layer(specs, budget=budget), prompt=prompt)
    named = str(caught.value).partition("at least ")[2].split()[0]
    kvpolicy.plan(config, Policy.by_layer(specs, budget=type(budget)(named)), prompt=prompt)


def test_layers_that_no_policy_manages_have_no_part() -> None:
    """What is given for a sliding window is not used: no reader, no codec, and no calibration is looked for."""
    model = build("gemma2")
    managed = describe(model.config).evictable
    depth = model.config.num_hidden_layers
    for unused in (words("h2o", "kvquant"), words("h2o", "rotate"), "h2o+quest:read=6:page=2:dense=0@0.5"):
        specs = ["h2o@0.5" if index in managed else unused for index in range(depth)]
        with kvpolicy.attach(model, Policy.by_layer(specs, budget=0.8)) as handle, torch.no_grad():
            cache = PolicyCache(model, new=4)
            for count in (20, 1, 1, 1, 1):
                model(ids(count), cache=cache)
            assert not handle.policy.reads_part and not handle.policy.undoes_rotation
            assert kvpolicy.plan(model, handle.policy, prompt=20, new=4).nbytes == cache.nbytes
    both = Policy.by_layer(["h2o@0.5", "window@0.5"] * (depth // 2), budget=0.8)
    with kvpolicy.attach(model, both) as handle:
        assert len(handle.policy.distinct) == 1
    with pytest.raises(KVPolicyError, match="one for each of the model's"):
        kvpolicy.attach(model, Policy.by_layer(["h2o@0.5"], budget=0.8))


WRONG: list[Any] = [5, {"layers": 5}, {"layers": [{}]}, {"layers": [{}], "budget": 0.2, "codec": {}}]


@pytest.mark.parametrize("content", [*WRONG, *({"layers": layers, "budget": 0.1} for layers in ([5], ["h2o"], []))])
def test_data_that_describes_no_policy(content: Any) -> None:
    with pytest.raises(KVPolicyError):
        Policy.from_dict(content)
