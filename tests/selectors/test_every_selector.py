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

FILE = write("triattention") / "centers.safetensors"


@pytest.mark.parametrize(
    "spec",
    [
        "a2sf:factor=0.8:recent=4",
        "a2sf:factor=0.01:recent=1",
        "caote:every=7/h2o",
        "caote:fast=true:every=3/snapkv:window=6:kernel=3",
        "chunk:size=4/snapkv:window=6:kernel=3",
        "chunk:size=5/keydiff:every=4",
        "chunk:size=100/h2o",
        "chunk:size=3/caote/h2o",
        "critical/h2o:decode=grow",
        "critical:split=0.3/h2o",
        "critical:split=0.0:epsilon=0.01/h2o",
        "critical:split=1.0/probe",
        "defensive:window=1:mass=0.0:decode=grow",
        "defensive:window=3:kernel=1:mass=0.5",
        "dropkv:window=1",
        "dropkv:window=5:kernel=3",
        "keyformer:steps=5",
        "keyformer:recent=0.0:tau_end=8.0:steps=1",
        "kvcrush/critical/snapkv:window=4:kernel=3",
        f"triattention:file={FILE}:every=1:of_group=mean",
        f"triattention:file={FILE}:reach=20:normalize=true",
    ],
)
def test_as_the_slow_version(spec: str) -> None:
    """Almost everywhere: with sharp queries, some choices are within the noise of fp32."""
    assert walks(spec) > 0.8


@pytest.mark.parametrize(
    "spec",
    ["lagkv:sinks=2:lag=4", "lagkv:sinks=0:lag=1", "cur:sinks=2:window=4:every=5", "cur:of=mean:window=3:every=1"],
)
def test_scores_that_are_given_once_are_those_of_the_slow_version(spec: str) -> None:
    assert walks(spec) > 0.95


@pytest.mark.parametrize(
    "spec", ["rkv:window=3:kernel=3:every=5", "rkv:mix=0.0:every=1:similar=0.1", "rkv:decode=grow"]
)
def test_cosines_are_those_of_the_slow_version(spec: str) -> None:
    assert walks(spec) > 0.6


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
    ("selector", "heads", "codec"),
    [
        ("keydiff", 0, KIVI),
        ("qfilters", 1, ""),
        ("qfilters", 2, KIVI),
        ("kvzap", 1, KIVI),
        ("kvzap", 2, ""),
    ],
)
def test_steps_of_some_rows(selector: str, heads: int, codec: str, tmp_path: Path) -> None:
    """A row that gets no token in a step is ranked again by its own count of tokens, as alone."""
    path = tmp_path / "file.safetensors"
    options = {"keydiff": "every=5", "qfilters": f"file={path}", "kvzap": f"file={path}:window=4"}[selector]
    if heads:
        FILTER_FILES.save(path, filters(heads)) if selector == "qfilters" else GATE_FILES.save(path, gates(heads))
    bench = Bench(f"{selector}:{options}{codec}", [12, 10], layer_idx=4)
    bench.forward(*draw(20, 0, batch=2), padding(20, 20, 13))
    for number in range(24):
        valid = torch.tensor([[True], [number % 3 != 0]])
        bench.forward(*draw(1, number + 1, batch=2), None if number % 2 else valid)
    bench.forward(*draw(7, 99, batch=2), padding(7, 0, 5))
    for number in range(9):
        bench.forward(*draw(1, number + 50, batch=2))
    assert bench.check().turns == 2 * 35 - 4 - 1
