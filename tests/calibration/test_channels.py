"""The salience of key channels is that of the definition, for what attention takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from kvpolicy import DoubleSparsity
from kvpolicy.calibration import calibrate_channels


def test_each_token_counts_once(tmp_path: Path) -> None:
    """Of two windows, the longer one counts more."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    config = LlamaConfig(**sizes, num_hidden_layers=2, intermediate_size=32, vocab_size=90, initializer_range=0.5)
    model = LlamaForCausalLM(config).eval()
    # Tokens of other kinds, so that the windows differ by more than chance.
    windows = [torch.arange(3, 33).repeat(5), torch.arange(40, 85).repeat(10)]

    def salience(name: str, texts: list[Tensor]) -> Tensor:
        calibrate_channels(model, texts, tmp_path / name)
        return DoubleSparsity(channels=4, calibration=str(tmp_path / name)).load_salience(1)

    short, long = (salience(str(number), [window]) for number, window in enumerate(windows))
    both = salience("both", windows)
    torch.testing.assert_close(both, (150 * short + 450 * long) / 600)
    assert not torch.allclose(both, (short + long) / 2, rtol=1e-3)
