"""Selectors with options that change what they do: against their slow versions, and the rules that all must keep.

Every selector meets hard inputs and other codecs in tests/conformance/test_layer.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvpolicy import (
    A2SF,
    CAOTE,
    CUR,
    H2O,
    RKV,
    ChunkKV,
    Compactor,
    CriticalKV,
    DefensiveKV,
    DropKV,
    ExpectedAttention,
    KeyDiff,
    Keyformer,
    KeyNorm,
    KVzap,
    LagKV,
    QFilters,
    RandomTokens,
    Scissorhands,
    TriAttention,
)
from kvpolicy.protocols import Selector
from kvpolicy.selectors.center_files import CENTER_FILES, CenterFile, Centers
from kvpolicy.selectors.filter_files import FILTER_FILES, FilterFile
from kvpolicy.selectors.gate_files import GATE_FILES
from kvpolicy.statistics import windows
from kvpolicy.testing import check
from tests.conformance.bench import Bench, draw, padding
from tests.conformance.calibration import filters, gates, write
from tests.selectors.walks import scores, walks

CENTERS = write("triattention") / "centers.safetensors"
FILTERS = write("qfilters") / "filters.safetensors"


SHARE = {
    "a2sf:factor=0.8:recent=4": 0.8,
    "a2sf:factor=0.01:recent=1": 0.8,
    "a2sf:factor=1.0": 0.8,
    "caote:every=7/h2o": 0.8,
    "caote:fast=true:every=3/snapkv:window=6:kernel=3": 0.8,
    "chunk:size=4/snapkv:window=6:kernel=3": 0.8,
    "chunk:size=5/keydiff:every=4": 0.8,
    "chunk:size=100/h2o": 0.8,
    "chunk:size=3/caote/h2o": 0.8,
    "chunk:size=4/random": 1.0,
    "critical/h2o:decode=grow": 0.8,
    "critical:split=0.3/h2o": 0.8,
    "critical:split=0.0:epsilon=0.01/h2o": 0.8,
    "critical:split=1.0/probe": 0.8,
    "cur:of=mean:window=3:every=1": 0.95,
    "cur:sinks=2:window=4:every=5": 0.95,
    "defensive:window=1:mass=0.0:decode=grow": 0.8,
    "defensive:window=3:kernel=1:mass=0.5": 0.8,
    "defensive:window=4:mass=1.0": 0.8,
    "dropkv:window=1": 0.8,
    "dropkv:window=5:kernel=3": 0.8,
    "fair:at=30_90_500/h2o": 0.8,
    "fair:parts=1/snapkv:window=6": 0.8,
    "keyformer:steps=5": 0.8,
    "keyformer:recent=0.0:tau_end=8.0:steps=1": 0.8,
    "keyformer:tau_init=0.05:steps=9": 0.8,
    "kvcrush/critical/snapkv:window=4:kernel=3": 0.8,
    "lagkv:sinks=0:lag=1": 0.95,
    "lagkv:sinks=0:lag=128": 0.95,
    "lagkv:sinks=2:lag=4": 0.95,
    "random": 1.0,
    "random:decode=grow": 1.0,
    "random:seed=3": 1.0,
    "rkv:decode=grow": 0.6,
    "rkv:mix=0.0:every=1:similar=0.1": 0.6,
    "rkv:window=3:kernel=3:every=5": 0.6,
    "scissorhands:window=16:recent=1": 0.8,
    f"qfilters:file={FILTERS}": 0.8,
    f"triattention:file={CENTERS}:every=1:of_group=mean": 0.8,
    f"triattention:file={CENTERS}:reach=20:normalize=true": 0.8,
    "vase:large=0.25:sinks=0:window=2:kernel=1": 0.8,
    "vase:large=0.5:sinks=1:window=2": 0.8,
    "vase:large=1.0": 0.8,
}
"""The share of turns that are compared: of sharp queries or similar keys, some choices are within the noise of fp32."""


@pytest.mark.parametrize("spec", SHARE)
def test_as_the_slow_version(spec: str) -> None:
    assert walks(spec) >= SHARE[spec]


@pytest.mark.parametrize("prompt", [1, 2, 3, 4, 5, 9])
@pytest.mark.parametrize("spec", ["compactor:sinks=2:recent=2:block=8:sketch=4", "expected:sinks=2:every=3"])
def test_prompts_that_are_hardly_longer_than_the_sinks(spec: str, prompt: int) -> None:
    bench = Bench(spec, [5, 3])
    for number, size in enumerate([prompt, *[1] * 6, 1 + prompt, *[1] * 6]):
        bench.forward(*draw(size, number, batch=2))
    assert bench.turns[-1].kept[0][0][:2] == [0, 1] and bench.turns[-1].kept[1][0][0] == 0
    bench.check()


def with_file(kind: Any, folder: Path) -> Selector:
    """A selector with a file for the model of the checks."""
    path = str(folder / "file.safetensors")
    draws = torch.randn(4, 2, 16, generator=torch.Generator().manual_seed(0))
    if kind is QFilters:
        FILTER_FILES.save(path, FilterFile(dict(enumerate(draws))))
        return QFilters(file=path, decode="grow")
    if kind is TriAttention:
        CENTER_FILES.save(path, CenterFile({n: Centers(mean[:1], torch.ones(1, 1)) for n, mean in enumerate(draws)}))
        return TriAttention(file=path, every=1)
    GATE_FILES.save(path, gates(heads=2, hidden=64))
    return KVzap(file=path, window=5)


RULED = [
    A2SF(factor=0.5, recent=1),
    CAOTE(base=H2O(), fast=True),
    ChunkKV(base=H2O(), size=7),
    Compactor(sinks=2, block=7, sketch=3, blend=0.5, decode="grow"),
    CriticalKV(base=H2O(), split=0.0),
    CUR(of="mean", every=3),
    DefensiveKV(),
    DropKV(),
    ExpectedAttention(epsilon=0.01, every=3),
    ExpectedAttention(decode="grow", moments="prompt"),
    KeyDiff(every=7, decode="grow"),
    Keyformer(recent=1.0, tau_end=9.0, steps=1),
    KeyNorm(),
    LagKV(lag=8, sinks=0),
    RandomTokens(seed=7),
    RandomTokens(decode="grow"),
    RKV(window=1, kernel=1, every=1, mix=1.0),
    Scissorhands(window=5, recent=2, sinks=3),
    *(KVzap, QFilters, TriAttention),
]


@pytest.mark.parametrize("selector", RULED, ids=lambda selector: getattr(selector, "__name__", type(selector).__name__))
def test_keeps_the_rules(selector: Any, tmp_path: Path) -> None:
    check(with_file(selector, tmp_path) if isinstance(selector, type) else selector)


@pytest.mark.parametrize("tile", [1, 1 << 20])
@pytest.mark.parametrize("spec", ["a2sf:factor=0.9", "keyformer:tau_init=2.0"])
def test_chunks_are_as_one_prompt(spec: str, tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the sums of a chunk lose or gain follows from the tokens of the next one, of each row."""
    monkeypatch.setattr(windows, "TILE_ELEMENTS", tile)
    found = [scores(spec, *cuts, whole=40)[..., -20:] for cuts in ((40,), (25, 15), (25, 1, 14))]
    for other in found[1:]:
        torch.testing.assert_close(other, found[0])


KIVI = "+kivi:bits=4:group_size=4:residual_length=4"


@pytest.mark.parametrize(
    ("spec", "heads"),
    [
        (f"keydiff:every=5{KIVI}", 0),
        ("qfilters:file={}", 1),
        (f"qfilters:file={{}}{KIVI}", 2),
        (f"kvzap:file={{}}:window=4{KIVI}", 1),
        ("kvzap:file={}:window=4", 2),
        ("expected:sinks=2:every=5", 0),
        (f"expected:sinks=2:every=5{KIVI}", 0),
    ],
)
def test_steps_of_some_rows(spec: str, heads: int, tmp_path: Path) -> None:
    """A row that gets no token in a step is ranked again by its own count of tokens, as alone."""
    path = tmp_path / "file.safetensors"
    if spec.startswith("qfilters"):
        FILTER_FILES.save(path, filters(heads))
    if spec.startswith("kvzap"):
        GATE_FILES.save(path, gates(heads))
    bench = Bench(spec.format(path), [12, 10], layer_idx=4)
    bench.forward(*draw(20, 0, batch=2), padding(20, 20, 13))
    for number in range(24):
        valid = torch.tensor([[True], [number % 3 != 0]])
        bench.forward(*draw(1, number + 1, batch=2), None if number % 2 else valid)
    bench.forward(*draw(7, 99, batch=2), padding(7, 0, 5))
    for number in range(9):
        bench.forward(*draw(1, number + 50, batch=2))
    assert bench.check().turns == 2 * 35 - 4 - 1
