"""A tuning: curves are means of what windows show, an interrupted run continues, and the file serves any budget."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kvpolicy
from kvpolicy import KVPolicyError, Policy
from kvpolicy.planning.curves import Curves, load_tuned
from kvpolicy.policy import LayeredPolicy, TunedPolicy
from kvpolicy.policy.tuned import TunedFile
from kvpolicy.tuning import proof
from kvpolicy.tuning import tune as module
from kvpolicy.tuning.evidence import share_bytes
from kvpolicy.tuning.grid import PARTS, SHARES, default_grid, make_grid
from kvpolicy.tuning.measure import joint_kls, layer_kls, output_errors, sensitivities
from kvpolicy.tuning.proof import as_share, prove
from kvpolicy.tuning.steps import Steps
from kvpolicy.tuning.tune import check_budget, interaction, tune
from kvpolicy.tuning.windows import Window
from tests.conformance.models import build
from tests.tuning.test_measure import gemma, llama

MODEL = llama(num_hidden_layers=4, head_dim=32)
TOKEN = 4 * 2 * 2 * 32 * 4
"""Bytes of a token in all layers."""
SPECS = ["window@0.2", "window@0.6", "h2o+tokenwise:bits=4@0.5", "streaming:sinks=8@0.1"]
"""The budget of the last is too small for a short prompt, which is kept whole."""


def window(seed: int, prompt: int = 40, answer: int = 4, question: int = 2) -> Window:
    ids = torch.randint(3, 40, (prompt + answer + question,), generator=torch.Generator().manual_seed(seed))
    first, second, third = ids.split([prompt, answer, question])
    return Window(first, second, third)


WINDOWS = [window(seed) for seed in range(3)]


def close(got: Any, want: Tensor) -> None:
    numbers = torch.tensor([[float("nan") if x is None else x for x in row] for row in got], dtype=torch.float64)
    torch.testing.assert_close(numbers, want, rtol=1e-4, atol=1e-7, equal_nan=True)


@pytest.mark.parametrize("measure", ["joint", "kl", "output"])
def test_curves_are_means_over_windows(measure: Any, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    # A model that was trained answers worse for a candidate in all layers than for the sum of single ones.
    model = kvpolicy.tiny()[0] if measure == "joint" else MODEL
    curves = tune(
        model, WINDOWS, tmp_path / "a.json", candidates=SPECS, measure=measure, progress=lambda *n: seen.append(n)
    )
    assert load_tuned(str(tmp_path / "a.json")) == curves and not (tmp_path / "a.json.unfinished").exists()
    assert seen == [(1, 3), (2, 3), (3, 3)]
    if measure == "output":
        noise = torch.cat([sensitivities(model, [one], seed=n) for n, one in enumerate(WINDOWS)])
        rows = output_errors(model, WINDOWS, SPECS) * noise[..., None]
    else:
        rows = layer_kls(model, WINDOWS, SPECS)
    factor = torch.ones(len(SPECS), dtype=torch.float64)
    together = rows.new_zeros(len(SPECS))
    if measure == "joint":
        together = joint_kls(model, WINDOWS, SPECS).mean(0)
        factor = ((together + 1e-5) / (rows.mean(0).sum(0) + 1e-5)).clamp_min(1)
    close(curves.distortion, rows.mean(0) * factor)
    close(curves.spread, rows.std(0) / 3**0.5 * factor)
    assert (
        curves.distortion[0][3] == pytest.approx(0, abs=1e-9)
        and curves.text["prompt"] == 40
        and curves.text["new"] == 6
    )
    if measure == "joint":  # a candidate in all layers adds up to what it does in all layers
        assert sum(row[0] or 0 for row in curves.distortion) == pytest.approx(float(together[0]), rel=1e-3)


def test_a_budget_that_is_too_small_has_no_distortion(tmp_path: Path) -> None:
    specs = ["window@0.5", "streaming:sinks=8@0.01"]
    curves = tune(MODEL, [window(0, prompt=520)], tmp_path / "a.json", candidates=specs, measure="output")
    assert [[point is None for point in row] for row in curves.distortion] == [[False, True]] * 4


def test_layers_that_stand_in_for_one_another() -> None:
    together = torch.tensor([3.0, 0.2, float("nan")])
    alone = torch.tensor([[0.0, 0.2, 1.0], [0.0, 0.2, 1.0]])
    factor = interaction(together, alone)
    assert factor[0] > 1e5 and factor[1] == 1 and factor[2].isnan()


def test_an_interrupted_run_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = tune(MODEL, WINDOWS, tmp_path / "whole.json", candidates=SPECS)
    file = tmp_path / "cut.json"
    measured = module._measured
    calls: list[int] = []

    def stops(model: Any, one: Window, policies: Any, measure: Any, seed: int, tile: Any) -> Tensor:
        calls.append(seed)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return measured(model, one, policies, measure, seed, tile)

    monkeypatch.setattr(module, "_measured", stops)
    with pytest.raises(KeyboardInterrupt):
        tune(MODEL, WINDOWS, file, candidates=SPECS)
    with (tmp_path / "cut.json.unfinished").open("a") as unfinished:
        unfinished.write('["window 2", [[0.1')  # cut off in the middle of a line
    with pytest.raises(KVPolicyError, match="must be of the same model, text and options"):
        tune(MODEL, WINDOWS, file, candidates=SPECS[:2])
    assert tune(MODEL, WINDOWS, file, candidates=SPECS) == whole and calls == [0, 1, 2, 2]


def test_steps_are_rounded_alike_when_read_again(tmp_path: Path) -> None:
    values = torch.tensor([1 / 3, float("nan"), 2e-9])
    first = Steps(tmp_path / "steps", {}).get("a", lambda: values)
    again = Steps(tmp_path / "steps", {}).get("a", lambda: pytest.fail("is known"))
    assert first.tolist()[0] == again.tolist()[0] == 0.333333 and again[1].isnan() and again[2] == 2e-9
    (tmp_path / "steps").write_text("nonsense\n")
    with pytest.raises(KVPolicyError, match="unfinished run"):
        Steps(tmp_path / "steps", {})


def test_the_file_serves_any_budget(tmp_path: Path) -> None:
    file = tmp_path / "a b.json"
    tune(MODEL, WINDOWS, file, candidates=make_grid(["h2o", "h2o+tokenwise:bits=4"], [0.1, 0.3, 1.0]))
    for budget in ("0.2", "0.5", "1.0", "20", "30KB"):
        with kvpolicy.attach(MODEL, f"tuned:file={str(file).replace(' ', '%20')}@{budget}") as handle, torch.no_grad():
            assert isinstance(handle.policy, LayeredPolicy)
            cache = kvpolicy.PolicyCache(MODEL, new=6)
            MODEL(WINDOWS[0].prompt[None], cache=cache)
        limit = {"0.2": 0.2 * TOKEN * 46, "0.5": 0.5 * TOKEN * 46, "20": TOKEN * 20, "30KB": 30_000}
        assert cache.nbytes <= limit.get(budget, 2 * TOKEN * 46)


def test_the_proof_is_noted(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    tune(MODEL, WINDOWS, file, candidates=make_grid(["h2o"], [0.1, 0.5]))
    others = [window(seed) for seed in range(10, 14)]
    found = prove(MODEL, file, 0.3, WINDOWS, others, specs=["window", "streaming", "squeeze+h2o"])
    assert found["rivals"] == 3 and found["windows"] == 4 and found["rival"] in ("window", "streaming", "squeeze+h2o")
    assert found["tuned"]["nbytes"] <= 0.3 * TOKEN * 46
    noted = load_tuned(str(file))
    assert isinstance(noted, Curves) and noted.evidence is not None
    assert json.loads(json.dumps(noted.evidence)) == {"0.3": json.loads(json.dumps(found))}
    prove(MODEL, file, 20, WINDOWS, others, specs=["window"])
    again = load_tuned(str(file))
    assert isinstance(again, Curves) and [*(again.evidence or {})] == ["0.3", "20"]


def test_budgets_as_shares() -> None:
    assert as_share(MODEL, WINDOWS, 0.3) == 0.3
    assert as_share(MODEL, WINDOWS, 23) == 0.5 and as_share(MODEL, WINDOWS, 99) == 1.0
    assert as_share(MODEL, WINDOWS, f"{TOKEN * 23}B") == 0.5


def test_grids() -> None:
    assert len(default_grid()) == len(PARTS) * len(SHARES)
    assert [str(p) for p in make_grid(["kivi:bits=4", "h2o+merge"], [1.0, 0.5])] == ["kivi:bits=4", "h2o+merge@0.5"]
    with pytest.raises(KVPolicyError, match="must be at least one policy at one share"):
        make_grid([], [0.1])


def test_refused(tmp_path: Path) -> None:
    with pytest.raises(KVPolicyError, match="measure must be one of joint, kl, output"):
        tune(MODEL, WINDOWS, tmp_path / "a.json", measure="mean")  # pyright: ignore[reportArgumentType]
    with pytest.raises(KVPolicyError, match="must be a fraction of the prompt"):
        tune(MODEL, WINDOWS, tmp_path / "a.json", candidates=["h2o@20"])
    assert not (tmp_path / "a.json").exists()


def test_a_finished_file_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.json"
    first = tune(MODEL, WINDOWS, file, candidates=SPECS[:2])
    monkeypatch.setattr(module, "_measured", lambda *_: pytest.fail("is measured"))
    assert tune(MODEL, WINDOWS, file, candidates=SPECS[:2]) == first
    for other in ({"candidates": SPECS[1:]}, {"candidates": SPECS[:2], "measure": "kl"}):
        with pytest.raises(KVPolicyError, match="must be absent, or a tuning of the same model"):
            tune(MODEL, WINDOWS, file, **other)  # pyright: ignore[reportArgumentType]
    with pytest.raises(KVPolicyError, match="must be absent, or a"):
        tune(MODEL, WINDOWS[1:], file, candidates=SPECS[:2])
    monkeypatch.undo()
    assert len(tune(MODEL, WINDOWS, file, candidates=SPECS[1:], force=True).candidates) == 3


def test_a_refused_run_does_not_block_the_next_one(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    with pytest.raises(KVPolicyError, match="must be windows to measure policies on, got none"):
        tune(MODEL, [], file, candidates=SPECS)
    with pytest.raises(KVPolicyError, match="must give every layer the same budget"):
        tune(MODEL, WINDOWS, file, candidates=["pyramid+h2o@0.2"])
    assert not list(tmp_path.iterdir())
    Steps(tmp_path / "a.json.unfinished", {"another": 1})  # which was stopped before it measured anything
    assert len(tune(MODEL, WINDOWS[:1], file, candidates=SPECS[:1]).candidates) == 1


def test_the_home_folder_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    first = tune(MODEL, WINDOWS[:1], "~/a.json", candidates=SPECS[:1])
    assert tune(MODEL, WINDOWS[:1], "~/a.json", candidates=SPECS[:1]) == first
    assert [file.name for file in tmp_path.iterdir()] == ["a.json"]


def test_bytes_of_layers_without_a_policy_are_taken_off_both_sides() -> None:
    model = gemma()  # a layer of it holds 7 tokens
    token = 2 * 2 * 8 * 4
    share = as_share(model, WINDOWS, f"{(7 + 23) * token}B")
    assert share == 0.5 and share_bytes(model, WINDOWS[0], share) == (7 + 23) * token
    with pytest.raises(KVPolicyError, match=f"budget must exceed the {7 * token} bytes that layers without a policy"):
        as_share(model, WINDOWS, f"{7 * token}B")


def test_a_proof_needs_two_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tune(MODEL, WINDOWS, tmp_path / "a.json", candidates=SPECS[:1])
    monkeypatch.setattr(proof, "best_rival", lambda *_, **__: pytest.fail("is measured"))
    with pytest.raises(KVPolicyError, match="must be at least two to compare policies on, got 1; try a larger --held"):
        prove(MODEL, tmp_path / "a.json", 0.3, WINDOWS, WINDOWS[:1])


@pytest.mark.parametrize("family", ["deepseek_v3", "mimo_v2_flash"])
def test_what_cannot_be_measured_leaves_no_file(family: str, tmp_path: Path) -> None:
    short = [Window(torch.arange(3, 30), torch.arange(3, 6))]
    with pytest.raises(KVPolicyError, match="Values must have the size of keys to be measured"):
        tune(build(family), short, tmp_path / "plan.json", candidates=["window@0.5"])
    with pytest.raises(KVPolicyError, match="must have weights to be measured, got some on the device meta"):
        tune(copy.deepcopy(build("llama")).to("meta"), short, tmp_path / "plan.json", candidates=["window@0.5"])
    with pytest.raises(KVPolicyError, match=r"Token ids must be from 0 to 47, .* got 48; try"):
        tune(build("llama"), [Window(torch.arange(3, 49), torch.arange(3, 6))], tmp_path / "plan.json")
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(("budget", "fits"), [(0.2, False), ("2KiB", False), (9, False), (0.5, True), (30, True)])
def test_a_budget_that_no_candidate_fits_is_refused_as_by_the_file(budget: Any, fits: bool, tmp_path: Path) -> None:
    model = build("llama")
    windows = [Window(torch.arange(3, 43), torch.arange(3, 6))]
    candidates = [Policy.parse("window@0.4"), Policy.parse("window@0.6")]
    file = tmp_path / "plan.json"
    tune(model, windows, file, candidates=candidates)
    spec = TunedPolicy(TunedFile(file=str(file)), budget)
    if fits:
        check_budget(model, windows, candidates, budget)
        kvpolicy.attach(model, spec).detach()
        return
    told: list[str] = []
    for call in (lambda: check_budget(model, windows, candidates, budget), lambda: kvpolicy.attach(model, spec)):
        with pytest.raises(
            KVPolicyError, match=r"must fit a text of 40 and 3 tokens, .* which is less than the"
        ) as raised:
            call()
        told.append(str(raised.value))
    assert told[0] == told[1]
