"""Sweeps that run without warnings."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from tests.eval.sweep.helpers import quietly


@pytest.fixture
def quiet() -> Generator[None]:
    with quietly():
        yield
