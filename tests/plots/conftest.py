"""A small model, and caches to draw."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("matplotlib")
pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM

import kvpolicy
from kvpolicy import Handle
from tests.conformance.models import FAMILIES, VOCABULARY, build

LENGTHS = (40, 24, 1)
"""Tokens of each row, padding left out."""


def gemma() -> Any:
    """A model whose layers 0, 1, 3 and 4 slide."""
    config = FAMILIES["gemma3"]()
    config.layer_types = ["full_attention" if at in (2, 5) else "sliding_attention" for at in range(6)]
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


def run(model: Any, policy: str, lengths: tuple[int, ...] = LENGTHS) -> Handle:
    """The handle, after one forward of a batch padded on the left."""
    width = max(lengths)
    ids = torch.randint(VOCABULARY, (len(lengths), width), generator=torch.Generator().manual_seed(1))
    mask = torch.stack([(torch.arange(width) >= width - length).long() for length in lengths])
    with torch.no_grad(), kvpolicy.attach(model, policy) as handle:
        model(ids, attention_mask=mask)
    return handle


@pytest.fixture(scope="session")
def model() -> Any:
    return build("llama", layers=4)


@pytest.fixture(scope="session")
def squeezed(model: Any) -> Handle:
    """Rows whose layers have budgets of their own."""
    return run(model, "squeeze+h2o@0.4")


@pytest.fixture(scope="session")
def coded(model: Any) -> Handle:
    return run(model, "h2o+kivi:bits=4:group_size=8:residual_length=4@0.5")


@pytest.fixture(scope="session")
def sliding() -> Handle:
    return run(gemma(), "h2o@0.4", (30,))
