"""What a plan says of prompts that wait, which is the most that is held, and of loaded models, which attach alike."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import kvpolicy
from kvpolicy import Policy, PolicyCache, attach
from kvpolicy.calibration import calibrate_channels, calibrate_qfilters
from kvpolicy.hf.cache_forward import CacheForward
from kvpolicy.planning.planner import trimmed_bytes
from kvpolicy.planning.tokens import Tokens
from kvpolicy.protocols import LayerShape
from kvpolicy.tuning.tune import tune
from kvpolicy.tuning.windows import Window
from tests.conformance.models import VOCABULARY, build
from tests.engine.parts import generator
from tests.sampling import each_once, product

TOKENS = 400


def most_held(spec: str, rows: int, tile: int | None, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int, int]:
    """The most bytes that a cache held after any layer took its prompt, those of the plan, and of all prompts."""
    model = build("llama", layers=6)
    ids = torch.randint(3, VOCABULARY, (rows, TOKENS), generator=generator(0))
    held: list[int] = []
    compress = CacheForward.compress

    def counted(self: Any, layer: Any, pending: Any) -> None:
        # The prompt of the newest layer is whole here.
        held.append(sum(sum(each.held().values()) for each in self.policy_layers) + pending.nbytes)
        compress(self, layer, pending)

    monkeypatch.setattr(CacheForward, "compress", counted)
    with attach(model, spec, tile=tile), torch.no_grad():
        cache = PolicyCache(model)
        model(ids, cache=cache)
    planned = kvpolicy.plan(model, spec, prompt=TOKENS, batch=rows)
    return max(held), planned.peak_nbytes, planned.full_peak_nbytes


SHARES = {
    "squeeze+snapkv:window=4@0.1": 0.65,
    "squeeze+streaming@0.05": 0.45,
    "cake+h2o@0.1": 0.55,
    "d2olayers+keydiff@0.1": 0.55,
    "zigzag+snapkv:window=2@0.1": 0.55,
}


@product("spec,rows,tile", [*SHARES], [1, 2], [None, 64], sample=each_once([*SHARES], [1, 2], [None, None, 64, 64]))
def test_less_waits_and_no_more_than_planned(
    spec: str, rows: int, tile: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, planned, whole = most_held(spec, rows, tile, monkeypatch)
    # Statistics of the newest prompt are activations of the plan.
    assert held <= planned * 1.2
    assert held < SHARES[spec] * whole
    if rows == 1:  # of more rows, each layer may hold most of another one
        assert planned < whole


@pytest.mark.parametrize(
    "spec",
    [
        "squeeze+kvcrush/snapkv@0.1",
        "dynamickv+h2o@0.1",
        "cake+snapkv+merge@0.1",
        "squeeze+snapkv:window=100@0.1",  # of which a layer may get less than two
        "squeeze+snapkv@1GiB",
    ],
)
def test_whole_prompts_are_planned_where_none_is_trimmed(spec: str) -> None:
    planned = kvpolicy.plan("llama-3.1-8b", spec, prompt=4096)
    assert planned.peak_nbytes >= planned.full_peak_nbytes


def test_codes_wait_whole() -> None:
    """A prompt that waits in codes is not trimmed: its tokens have no keys."""
    plain = kvpolicy.plan("llama-3.1-8b", "squeeze+snapkv+tokenwise@0.1", prompt=8192)
    codes = kvpolicy.plan("llama-3.1-8b", "squeeze+snapkv+tokenwise@0.1", prompt=8192, hold="codes")
    kivi = kvpolicy.plan("llama-3.1-8b", "squeeze+kvcrush/snapkv+tokenwise@0.1", prompt=8192, hold="codes")
    assert codes.peak_nbytes == kivi.peak_nbytes != plain.peak_nbytes


def test_the_peak_of_a_long_prompt() -> None:
    """The figures that the pages print: the total of the budget and one prompt, of allocators by proportion."""
    planned = kvpolicy.plan("llama-3.1-8b", "d2olayers+streaming@0.1", prompt=100_000)
    one = planned.full_peak_nbytes / 32
    assert planned.nbytes + one <= planned.peak_nbytes <= (planned.nbytes + one) * 1.2
    squeeze = kvpolicy.plan("llama-3.1-8b", "squeeze+streaming@0.1", prompt=100_000)
    assert squeeze.peak_nbytes < 0.35 * squeeze.full_peak_nbytes


def test_rows_may_differ_in_their_layers() -> None:
    """Every row is padded to the longest one, which may be another one in each layer."""
    shape = LayerShape(2, 8, torch.float32)
    policy = Policy.parse("squeeze+window@0.05")

    def held(*rows: int) -> int:
        prompt = torch.tensor(rows)
        keep = torch.full((len(rows), 6), 20)
        tokens = Tokens(keep, torch.zeros_like(prompt), keep, prompt)
        found = trimmed_bytes(policy, shape, tokens, prompt, max(rows), 6)
        assert found is not None
        return found

    assert held(TOKENS, TOKENS) == pytest.approx(4 * held(TOKENS), rel=0.01)
    assert held(*[TOKENS] * 50) == 50 * 6 * TOKENS * 2 * (2 * 8 * 4 + 4), "no more than all of all prompts"


def refusals(model: Any, policy: str) -> list[str]:
    found: list[str] = []
    for call in (lambda: kvpolicy.plan(model, policy, prompt=40), lambda: kvpolicy.attach(model, policy)):
        with pytest.raises(kvpolicy.KVPolicyError) as raised:
            call()
        found.append(str(raised.value))
    return found


@pytest.mark.parametrize(
    ("family", "policy"),
    [("jetmoe", "critical/h2o@0.5"), ("jetmoe", "kvzip:plus=true@0.5"), ("llama", "kvzip:instruction=999@0.5")],
)
def test_what_its_modules_do_not_have(family: str, policy: str) -> None:
    planned, attached = refusals(build(family), policy)
    assert planned == attached
    kvpolicy.plan(copy.deepcopy(build("llama")).to("meta"), "critical/h2o@0.5", prompt=40)  # which may yet be loaded


def test_a_file_of_other_weights(tmp_path: Path) -> None:
    model: Any = build("llama")
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    texts = [torch.randint(3, 40, (130,), generator=torch.Generator().manual_seed(0))]
    calibrate_channels(model, texts, tmp_path / "channels")
    calibrate_qfilters(model, texts, tmp_path / "filters")
    tune(model, [Window(texts[0][:60], texts[0][60:66])], tmp_path / "plan.json", candidates=["window@0.5"])
    for spec in (
        f"full+labels:read=16:channels=2:calibration={tmp_path / 'channels'}",
        f"qfilters:file={tmp_path / 'filters'}@0.5",
        f"tuned:file={tmp_path / 'plan.json'}@0.5",
    ):
        assert kvpolicy.plan(model, spec, prompt=40) == kvpolicy.plan(model.config, spec, prompt=40, dtype=model.dtype)
        planned, attached = refusals(other, spec)
        assert planned == attached and "whose weights differ" in planned
