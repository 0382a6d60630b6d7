"""A small model, and caches to draw."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("matplotlib")
pytest.importorskip("transformers")

import kvpolicy
from kvpolicy import Handle

LENGTHS = (40, 24, 1)
"""Tokens of each row, padding left out."""


def llama(layers: int = 4) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=50,
        intermediate_size=32,
        max_position_embeddings=200_000,
    )
    return LlamaForCausalLM(config).eval()


def gemma() -> Any:
    """A model whose layers 0, 1, 3 and 4 slide."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(0)
    kinds = ["full_attention" if at in (2, 5) else "sliding_attention" for at in range(6)]
    config = Gemma3TextConfig(
        num_hidden_layers=6,
        hidden_size=32,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        vocab_size=50,
        intermediate_size=32,
        sliding_window=8,
        layer_types=kinds,
    )
    return Gemma3ForCausalLM(config).eval()


def run(model: Any, policy: str, lengths: tuple[int, ...] = LENGTHS) -> Handle:
    """The handle, after one forward of a batch padded on the left."""
    width = max(lengths)
    ids = torch.randint(50, (len(lengths), width), generator=torch.Generator().manual_seed(1))
    mask = torch.stack([(torch.arange(width) >= width - length).long() for length in lengths])
    with torch.no_grad(), kvpolicy.attach(model, policy) as handle:
        model(ids, attention_mask=mask)
    return handle


@pytest.fixture(scope="session")
def model() -> Any:
    return llama()


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
