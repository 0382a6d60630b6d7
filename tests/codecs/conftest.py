"""What tests of codecs share."""

from __future__ import annotations

from collections.abc import Generator

import pytest
import torch


@pytest.fixture(autouse=True)
def fresh(request: pytest.FixtureRequest) -> Generator[None]:
    """Compiled code of other codecs counts in no codec's recompilations."""
    if "compile" in request.node.name:
        torch.compiler.reset()
    yield
