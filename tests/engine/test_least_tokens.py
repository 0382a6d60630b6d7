"""A fraction with a least number of tokens: a row has the larger of both, as it would have under that budget alone."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import kvpolicy
from kvpolicy import KVPolicyWarning, Policy, PolicyCache, Share
from kvpolicy.hf.cache_header import read_header
from kvpolicy.reporting.logging import without_warning_of_few_tokens
from kvpolicy.testing import check_cache
from tests.conformance.models import build
from tests.conformance.play import forward, make_batch
from tests.sampling import each_once, product

LONG = 60
SHORT = 31
FRACTION = 0.4
LEAST = 20  # more than the fraction of the short prompt, 12, and less than that of the long one, 24
STEPS = 4
BUDGETS = {LONG: FRACTION, SHORT: LEAST}
"""The plain budget that each prompt has."""

SNAPKV = "snapkv:window=4:kernel=3"
CODES = "tokenwise:group_size=4:residual_length=4:block_size=4"
POLICIES = [
    "window",
    "h2o",
    f"{SNAPKV}:decode=grow",
    f"kvcrush/{SNAPKV}",
    f"h2o+{CODES}",
    "h2o+merge",
    "h2o+mikv:group_size=4",
    "h2o+labels:read=8:channels=2:dense=0",
    "pyramid+h2o",
    "squeeze+h2o",
    f"cake+{SNAPKV}",
    f"uniform/adakv+{SNAPKV}",
    f"squeeze/adakv+{SNAPKV}+{CODES}",
    "kvzip",
]


def of(spec: str, budget: Any) -> Policy:
    """A policy with a budget; `layers` is one of three layers."""
    if spec != "layers":
        return Policy.parse(spec).with_budget(budget)
    return Policy.by_layer([f"{SNAPKV}@0.5", f"h2o+{CODES}@0.25", "h2o@0.4"], budget=budget)


def positions(cache: PolicyCache, row: int) -> list[list[list[int]]]:
    """The positions of each layer and head of a row, sorted."""
    heads = [layer.head_positions[row].sort(-1).values.tolist() for layer in cache.policy_layers]
    return [[[place for place in head if place >= 0] for head in layer] for layer in heads]


def announced(told: str, lengths: list[int]) -> dict[str, Any]:
    """The arguments of a cache that is told nothing, how many tokens follow, or the lengths of the prompts too."""
    return {"new": {"new": STEPS}, "prompt": {"prompt": lengths, "new": STEPS}}.get(told, {})


def kept(
    policy: Policy,
    lengths: list[int],
    pieces: list[int] | None = None,
    told: str = "",
    row: int | None = None,
    **how: Any,
) -> list[Any]:
    """What each row keeps after a prompt, in pieces perhaps, and after steps; or one `row`, which runs alone."""
    ids, mask = make_batch(lengths, [max(lengths), *[1] * STEPS], seed=5)
    if row is not None:
        columns = slice(max(lengths) - lengths[row], None)
        ids = ids[row : row + 1, columns]
        mask = mask[row : row + 1, columns]
        lengths = [lengths[row]]
    model = build("llama")
    prompt = max(lengths)
    found: list[Any] = []
    with kvpolicy.attach(model, policy, **how):
        cache = PolicyCache(model, **announced(told, lengths))
        start = 0
        for size in [*(pieces or [prompt]), *[1] * STEPS]:
            forward(model, ids, mask, start, start + size, cache)
            check_cache(cache)
            start += size
            if start >= prompt:
                found.append([positions(cache, each) for each in range(len(lengths))])
    return found


@product("spec,told", [*POLICIES, "layers"], ["", "new"], sample=each_once([*POLICIES, "layers"], ["", "new"]))
def test_a_row_has_the_larger_of_both(spec: str, told: str) -> None:
    """In a padded batch with prompts on both sides of the boundary, and alone."""
    budget = Share(FRACTION, least=LEAST)
    together = kept(of(spec, budget), [LONG, SHORT], told=told)
    for row, length in enumerate([LONG, SHORT]):
        own = [[turn[row]] for turn in together]
        assert kept(of(spec, budget), [LONG, SHORT], told=told, row=row) == own
        assert kept(of(spec, BUDGETS[length]), [LONG, SHORT], told=told, row=row) == own


def test_a_short_prompt_keeps_more_than_its_fraction_and_not_more_than_it_has() -> None:
    first, *_, last = kept(of("h2o", Share(FRACTION, least=LEAST)), [LONG, SHORT])
    assert [len(row[0][0]) for row in first] == [24, 20] == [len(row[0][0]) for row in last]
    (first, *_, last) = kept(of("h2o", Share(FRACTION, least=1024)), [SHORT])
    assert [len(row[0][0]) for row in (first[0], last[0])] == [SHORT, SHORT + STEPS]
    (first, *_, last) = kept(of(f"uniform/adakv+{SNAPKV}", Share(FRACTION, least=1024)), [SHORT], told="new")
    assert [len(row[0][0]) for row in (first[0], last[0])] == [SHORT, SHORT + STEPS]


@pytest.mark.parametrize("spec", ["h2o", "squeeze+h2o", f"uniform/adakv+{SNAPKV}", f"{SNAPKV}+{CODES}", "layers"])
def test_a_prompt_in_tiles_and_in_chunks(spec: str) -> None:
    policy = of(spec, Share(FRACTION, least=LEAST))
    whole = kept(policy, [LONG, SHORT], told="prompt")
    assert kept(policy, [LONG, SHORT], told="prompt", tile=16) == whole
    assert kept(policy, [LONG, SHORT], [25, 35], told="prompt", chunks="hold") == whole


@pytest.mark.parametrize("spec", ["h2o", "pyramid+h2o", f"uniform/adakv+{SNAPKV}"])
def test_chunks_of_an_announced_prompt(spec: str) -> None:
    """Each is compressed to the budget of the whole prompt."""
    pieces = [20, 40]
    for length, plain in BUDGETS.items():
        parts = [part for part in (min(pieces[0], length - 1), length - min(pieces[0], length - 1))]
        chunks = [
            kept(of(spec, each), [length], parts, told="prompt") for each in (Share(FRACTION, least=LEAST), plain)
        ]
        assert chunks[0] == chunks[1]


@pytest.mark.parametrize("length", [SHORT, LONG])
@pytest.mark.parametrize(
    "spec", ["h2o", "pyramid+h2o", f"uniform/adakv+{SNAPKV}", f"{SNAPKV}:decode=grow+{CODES}", "layers"]
)
def test_what_is_planned_is_held(spec: str, length: int) -> None:
    policy = of(spec, Share(FRACTION, least=LEAST))
    model = build("llama")
    sizes: dict[str, Any] = {"prompt": length, "new": STEPS, "dtype": torch.float32}
    planned = kvpolicy.plan(model.config, policy, **sizes)
    with kvpolicy.attach(model, policy), torch.no_grad():
        cache = PolicyCache(model, new=STEPS)
        model(torch.arange(length)[None] % 40 + 3, cache=cache)
    assert planned.nbytes == cache.nbytes == kvpolicy.plan(model.config, of(spec, BUDGETS[length]), **sizes).nbytes
    assert cache.plan is not None
    assert [layer.tokens for layer in planned.layers] == [layer.tokens for layer in cache.plan.layers]


def test_layers_share_the_least_number() -> None:
    """As a mean over layers, and `plan` of a batch of different lengths has the slots of the fullest row."""
    plan = kvpolicy.plan(build("llama").config, f"pyramid+h2o@{FRACTION}:least={LEAST}", prompt=SHORT)
    assert sum(layer.tokens for layer in plan.layers) == 3 * LEAST and len({layer.tokens for layer in plan.layers}) > 1


@pytest.mark.parametrize("spec", ["h2o", f"uniform/adakv+{SNAPKV}", "layers"])
def test_a_saved_cache_has_the_budget(spec: str, tmp_path: Path) -> None:
    policy = of(spec, Share(FRACTION, least=LEAST))
    model = build("llama")
    ids, mask = make_batch([SHORT], [SHORT, 1, 1])
    path = tmp_path / "cache.safetensors"
    with kvpolicy.attach(model, policy):
        cache = PolicyCache(model, new=2)
        forward(model, ids, mask, 0, SHORT, cache)
        cache.save(path)
        header = json.loads(json.dumps(read_header(path)))
        assert header["policy"]["budget"] == f"{FRACTION}:least={LEAST}" and header["spec"] == str(policy)
        loaded = PolicyCache.load(model, path)
        assert loaded.policy == policy and loaded.plan == cache.plan
        for each in (cache, loaded):
            forward(model, ids, mask, SHORT, SHORT + 1, each)
        assert positions(loaded, 0) == positions(cache, 0)


def run(policy: str, length: int, **how: Any) -> None:
    model = build("llama", layers=2)
    ids, mask = make_batch([length], [length])
    with kvpolicy.attach(model, policy):
        forward(model, ids, mask, 0, length, PolicyCache(model, **how))
        forward(model, ids, mask, 0, length, PolicyCache(model, **how))


@pytest.mark.filterwarnings("always")
def test_a_fraction_that_leaves_few_tokens_is_warned_of_once() -> None:
    with pytest.warns(KVPolicyWarning) as found:
        run("h2o@0.4", LONG)
    assert [str(warning.message) for warning in found] == [
        "The budget 0.4 leaves fewer than 64 tokens of a short prompt under h2o@0.4, too few for most answers; try "
        "0.4:least=1024, which keeps at least 1,024."
    ]


@pytest.mark.filterwarnings("error")
def test_other_budgets_are_not_warned_of() -> None:
    for policy in ("h2o@0.4:least=20", "h2o@24", "h2o@64KiB", "full", "h2o@1.0"):
        run(policy, LONG)
    run("h2o@0.4", 160)  # 64 tokens
    run("h2o@0.4", 1)  # all there are
    with without_warning_of_few_tokens():
        run("h2o@0.4", LONG)
    with pytest.raises(KVPolicyWarning, match="leaves fewer than 64"):
        run("h2o@0.4", 159)


def test_a_program_that_attaches_for_each_prompt_is_told_once() -> None:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("default")
        for length in (LONG, SHORT):
            run("h2o@0.4", length)
    assert len(found) == 1
