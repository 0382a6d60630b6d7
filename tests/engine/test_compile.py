"""Rule 2: one decode step compiles once, whole, and never again; block work is a second entry."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import DynamicCache

import kvpolicy
from kvpolicy import Policy, PolicyCache
from kvpolicy.engine.due_rows import due_rows, only_rows
from kvpolicy.engine.slot_geometry import SlotGeometry
from kvpolicy.engine.state import tensors
from kvpolicy.kernels import words as words_of_codes
from kvpolicy.kernels.words import constant
from kvpolicy.registry import lookup
from tests.codecs.compiling import compile_all
from tests.conformance.access import addresses, kept_positions
from tests.conformance.models import FAMILIES, build
from tests.conformance.play import forward, make_batch, talk
from tests.conformance.policies import CODECS, MERGERS, SELECTORS, words
from tests.engine.filled import attached, prompted
from tests.engine.graphs import Graphs
from tests.engine.parts import slots_of
from tests.sampling import product

pytestmark = pytest.mark.usefixtures("fresh_compiler")

PROMPT = 24
STEPS = 18
LAYERS = 2
"""The time to compile grows with the layers. Two are the first, and one behind it, of each group of calibrations."""


def decode(model: Any, compiled: Any, rows: list[int], steps: int) -> tuple[Tensor, PolicyCache]:
    """Prefill in eager mode, then steps through `compiled`; all that a step reads and writes stays where it is."""
    prompt = max(rows)
    ids, mask = make_batch(rows, [prompt] + [1] * steps)
    places = (mask.cumsum(-1) - 1).clamp_min(0)
    cache = PolicyCache(model, new=steps + 1)  # the last tick makes room for another step
    logits: list[Tensor] = []
    forward(model, ids, mask, 0, prompt, cache)
    before = addresses(cache)
    with torch.no_grad():
        for column in range(prompt, prompt + steps):
            now = slice(column, column + 1)
            out = compiled(ids[:, now].clone(), position_ids=places[:, now].clone(), cache=cache, use_cache=True)
            logits.append(out.logits)
            cache.tick()
    assert addresses(cache) == before, "a recorded CUDA graph would be recorded again"
    return torch.cat(logits, 1), cache


def once(
    policy: str | Policy,
    rows: list[int],
    backend: str | None = None,
    family: str = "llama",
    atol: float = 1e-4,
    steps: int = STEPS,
    layers: int = LAYERS,
) -> None:
    """The same logits as without compiling, from one graph.

    Where no backend is named, the graph must write to static tensors alone: under this condition
    `mode="reduce-overhead"` records a CUDA graph instead of giving up.
    """
    graphs = Graphs()
    counter = CompileCounterWithBackend(backend or graphs)  # pyright: ignore[reportArgumentType]
    with attached(policy, rows, [PROMPT] + [1] * steps, family=family, layers=layers) as (model, ids, mask):
        eager = PolicyCache(model, new=steps)
        want = talk(model, ids, mask, [PROMPT] + [1] * steps, eager)[:, PROMPT:]
        compiled = torch.compile(model, backend=counter, fullgraph=True)
        got, cache = decode(model, compiled, rows, steps)
        again, _ = decode(model, compiled, rows, steps)
    assert counter.frame_count == 1, "of a second conversation too"
    assert torch.equal(again, got)
    if backend is None:
        assert graphs.written[0] and graphs.written[0] <= graphs.static[0] and graphs.count == 1
    assert [kept_positions(a) for a in cache.policy_layers] == [kept_positions(b) for b in eager.policy_layers]
    assert (got - want).abs().max() < atol


METHODS = [
    words("scissorhands", "csr"),
    words("probe", "mikv"),
    words("tova", "zipcache"),
    words("h2o", "merge", "kivi"),
    "h2o+compensate+quest:read=8:page=2:dense=0@0.5",
    "h2o+compensate+sparq:read=6:channels=3:dense=0@0.5",
    "full+shadowkv:read=8:page=2:rank=3:sinks=1:recent=2:host=true",
]
"""What the engine treats differently; it does the same in every layer: the graph of one shows all that it traces.

Pages stand in `test_layers_of_different_policies`. tests/codecs compiles what codecs do themselves.
"""
REUSE = "h2o+reuse:every=2:dense=0/exact:read=6@0.5"
"""Its second layer reads what the first one chose."""
MERGED = [words("h2o", name) for name in MERGERS if lookup(name)[1]().traits.when == "always"]
OTHERS = [
    "full",
    *MERGED,
    "h2o:decode=grow+kivi:group_size=4:residual_length=4@0.5",
    "uniform/adakv+h2o+compensate@0.5",
    "quest:read=8:page=2:dense=0:host=true",
    *(words(selector, "plain") for selector in SELECTORS),
    "quest:read=8:page=2:dense=1",
    "h2o+labels:read=6:channels=3:dense=0@0.5",
    words("h2o", "loki"),
    words("h2o+merge", "sparq"),
    words("h2o", "sparq", "tokenwise"),
    words("h2o", "rocket"),
    words("full", "rocket", "tokenwise", budget="1.0"),
    words("h2o+compensate", "centroids"),
    words("h2o", "retrieval"),
    "full+retrieval:recent=1:read=8:cluster=4:host=true",
    words("h2o", "shadowkv"),
    "streaming+shadowkv:joint=true:read=8:page=2:rank=3:sinks=1:recent=2@0.5",
    words("full", "centroids", "kivi", budget="1.0"),
    *(words("h2o", codec) for codec in CODECS if words("h2o", codec) not in METHODS),
    "squeeze+kvcrush@0.5",
    "h2o:decode=grow@0.5",
    "exact:read=8",
    "uniform/adakv+h2o@0.5",
    "uniform/adakv+h2o+tokenwise:group_size=4:residual_length=2:block_size=3@0.5",
    "uniform/adakv+h2o+compensate+tokenwise:group_size=4:residual_length=2:block_size=3@0.5",
    "tokenwise:block_size=4:residual_length=4+quest:read=8:dense=0",
    "snapkv+quest:read=8:page=2:dense=0:resort=5@0.8",
]


@product("policy", [*METHODS, REUSE, *OTHERS], sample=[(policy,) for policy in (*METHODS, REUSE)])
def test_one_graph_for_all_steps(policy: str) -> None:
    once(policy, [PROMPT, 15], layers=1 if policy in METHODS else LAYERS)


@pytest.mark.slow
@pytest.mark.parametrize("codec", CODECS)
def test_two_hundred_steps(codec: str) -> None:
    """Every block is coded many times over, and nothing compiles again."""
    once(words("h2o", codec), [PROMPT, 15], steps=200)


def test_layers_of_different_policies() -> None:
    specs = [words("h2o", "kivi"), "uniform/adakv+h2o+compensate@0.8"]
    once(Policy.by_layer(specs, budget=20), [PROMPT, 15])


WHOLE = [family for family in FAMILIES if family not in ("llama", "gemma2", "gemma3")]


@product("family", WHOLE, sample=[("falcon_grouped",)])
def test_families(family: str) -> None:
    """But for Gemma's sliding layers, which are transformers' own, grow by `torch.cat`, and compile again."""
    once("snapkv@0.5", [PROMPT], family=family, layers=1)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "policy", ["h2o@0.5", words("squeeze", "kvcrush", "kivi"), "h2o+labels:read=8:dense=0:host=true@0.5"]
)
def test_inductor(policy: str) -> None:
    once(policy, [PROMPT], backend="inductor", atol=1e-3)


@pytest.mark.filterwarnings("ignore")
@product("given", [False, True], sample=[(True,)])
def test_a_compiled_model_without_a_cache(given: bool) -> None:
    """The policy is at work, with the same result, or one sentence says why not: never the stock cache."""
    with attached("h2o@0.5", [PROMPT], [PROMPT], layers=1) as (model, ids, mask), torch.no_grad():
        want = forward(model, ids, mask, 0, PROMPT, PolicyCache(model))
        compiled = torch.compile(model, backend="eager")
        try:
            out = compiled(ids, use_cache=True, cache=DynamicCache() if given else None)
        except (ValueError, RuntimeError) as error:
            assert "PolicyCache" in str(error)
        else:
            assert isinstance(out.cache, PolicyCache)
            torch.testing.assert_close(out.logits, want, rtol=0, atol=1e-4)


TICKED = ["window+kivi:group_size=4:residual_length=4@0.5", "h2o:decode=grow@0.5", "window@99"]


@product("policy", TICKED, sample=[(TICKED[0],)])
def test_a_forgotten_tick_is_an_error(policy: str) -> None:
    """Never a lost token."""
    with attached(policy, [PROMPT], [PROMPT] + [1] * STEPS, layers=1) as (model, ids, mask):
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        cache = prompted(model, ids, mask, PROMPT, new=5)
        with pytest.raises(RuntimeError, match=r"tick\(\)"), torch.no_grad():
            for column in range(PROMPT, PROMPT + STEPS):
                at = torch.tensor([[column]])
                compiled(ids[:, column : column + 1].clone(), position_ids=at, cache=cache, use_cache=True)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("due", [[[0], [2], [1], [2]], [[0, 1, 2]] * 3], ids=["one row", "all rows"])
def test_a_flush_is_one_graph(due: list[list[int]], backend: str) -> None:
    """Coding a block traces whole, needs no sync, and does what eager code does, whichever row is due."""
    policy = "h2o+kivi:group_size=4:residual_length=4@0.9"
    with attached(policy, [PROMPT, PROMPT - 1, PROMPT - 2], [PROMPT], layers=1) as (model, ids, mask):
        eager, traced = (prompted(model, ids, mask, PROMPT).policy_layers[0].store for _ in range(2))
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(SlotGeometry.demote, backend=counter, fullgraph=True)
    for step, rows in enumerate(due):
        for layer in (eager, traced):  # a full exact part, as after enough steps
            newest = torch.arange(layer.layout.exact, dtype=torch.int32) + 30 + step * 10
            layer.tensors.positions[rows, :, : layer.layout.exact] = newest
            layer.tensors.keys[:] = torch.arange(layer.tensors.keys.numel()).view_as(layer.tensors.keys).sin()
        for layer, demote in ((eager, SlotGeometry.demote), (traced, compiled)):
            (found,) = due_rows(layer.geometry.full_rows())
            assert found.numbers == rows
            with torch.no_grad(), only_rows(layer.contents, found):
                demote(slots_of(layer))
        assert torch.equal(eager.tensors.positions, traced.tensors.positions)
        for one, other in zip(tensors(eager.tensors.codes), tensors(traced.tensors.codes), strict=True):
            assert torch.equal(one, other)
    assert counter.frame_count == 1


CENTERS = [words("h2o", "tokenwise"), words("h2o", "quest"), "uniform/adakv+h2o+compensate@0.5"]
"""Policies that are compiled first: with codes, with a reader and with budgets of heads."""
POLICIES = list(dict.fromkeys([*METHODS, REUSE, *OTHERS, *(words("h2o", codec) for codec in CODECS)]))
CHAINS = [POLICIES[start : start + 5] for start in range(0, len(POLICIES), 5)]
MARKS = [pytest.mark.slow if number % 4 == 0 else pytest.mark.full for number in range(len(CHAINS))]
"""Each takes a minute: one of four is compiled before an issue is closed, and the others by `pytest -m full`."""
LENGTHS = (24, 37, 31)
"""Tokens of prompts, in turn."""


def check_chain(monkeypatch: pytest.MonkeyPatch, policies: Sequence[str]) -> None:
    """One graph for all steps of each policy; functions for many slots are compiled also with a few."""
    compile_all(monkeypatch)
    monkeypatch.setattr(words_of_codes, "HAS_WIDE_VECTORS", True)  # also where the processor has none
    # A model's forward has one code object, of which each policy has a compilation or two.
    with torch._dynamo.config.patch(recompile_limit=64):
        for number, policy in enumerate(policies):
            model: Any = build("llama", layers=2 if policy == REUSE or "minicache" in policy else 1)
            with kvpolicy.attach(model, policy):
                compiled = torch.compile(model, backend="eager", fullgraph=True)
                decode(model, compiled, [LENGTHS[number % len(LENGTHS)]], 3)


def test_a_policy_compiles_after_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes of half the width, whose numbers are symbols when they are compiled."""
    check_chain(monkeypatch, [f"h2o+kivi:bits={bits}:group_size=4:residual_length=4@0.5" for bits in (4, 2)])


@pytest.mark.parametrize("number", [pytest.param(number, marks=mark) for number, mark in enumerate(MARKS)])
def test_every_policy_compiles_after_others(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """After one of the centers, and before another; after `kivi`, and before it."""
    kivi = words("h2o", "kivi")
    check_chain(monkeypatch, [kivi, CENTERS[number % 3], *CHAINS[number], CENTERS[(number + 1) % 3], kivi])


def test_a_size_that_changed_is_a_number() -> None:
    """Neither `math.gcd` nor a set takes a symbol."""

    def widths(t: torch.Tensor) -> torch.Tensor:
        size = constant(t.shape[-1])
        return torch.zeros(math.gcd(size, 8) * len({size, 1}))

    step: Any = torch.compile(widths, backend="eager", fullgraph=True)
    assert [len(step(torch.ones(2, size))) for size in (8, 12, 20)] == [16, 8, 8]
