"""The estimate of CSR's calibration counts windows, steps and initial atoms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

import kvpolicy
from kvpolicy.calibration import Dictionaries, Training, estimate, estimate_csr

OPTIONS = Dictionaries(
    key_spaces=("unrotated", "rotated"),
    value_chunks=(2,),
    atoms=16,
    pairs=4,
    tokens=200,
    training=Training(epochs=3, batch=64, held_out=0.05),
)
WINDOWS = [torch.arange(3, 53)] * 5
"""40 tokens of each are used: 160 vectors of the 4 heads, in each of 8 layers."""


def test_what_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_second(run: Callable[[], object]) -> float:
        run()
        return 1.0

    monkeypatch.setattr(estimate, "_timed", one_second)
    vectors = 5 * 40 * 4 * 8
    steps = vectors / 64 * (3 + 0.05 * 4)
    dictionaries = 3 * 8
    model = kvpolicy.tiny()[0]
    assert estimate_csr(model, WINDOWS, OPTIONS) == pytest.approx(5 + 3 * steps + dictionaries)
    # Above 256 atoms, the initial ones are scaled up by the square of their number.
    assert estimate_csr(model, WINDOWS, replace(OPTIONS, atoms=512)) == pytest.approx(5 + 3 * steps + 4 * dictionaries)


def test_it_is_of_this_machine() -> None:
    seconds = estimate_csr(kvpolicy.tiny()[0], WINDOWS, OPTIONS)
    assert 0 < seconds < 3600
