"""Policies by layer are checked before weights are read, for the ranks and the dtype that they will be used with."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from kvpolicy import KVPolicyError, Policy
from kvpolicy.planning.curves import save_curves, save_layers
from kvpolicy_deepspeed.checks import check_policy
from tests.planning.test_tuned import draw_curves

CONFIG = LlamaConfig(
    num_hidden_layers=3, hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8, vocab_size=9
)


def _check(policy: str | Policy, dtype: torch.dtype | None = None, tp: int = 1) -> None:
    check_policy(CONFIG, policy, dtype, tp, follows_plan=False)


def test_checked(tmp_path: Path) -> None:
    save_layers(tmp_path / "layers.json", ["h2o@0.5"] * 3)
    _check(f"tuned:file={tmp_path}/layers.json@0.5")
    _check(Policy.by_layer(["h2o@0.5", "kivi:bits=4+h2o@0.5", "h2o@0.5"], budget=0.5))
    with pytest.raises(KVPolicyError, match="one for each of the model's 3 layers, got 2"):
        _check(Policy.by_layer(["h2o@0.5"] * 2, budget=0.5))
    with pytest.raises(KVPolicyError, match="must be readable"):
        _check(f"tuned:file={tmp_path}/none.json")


def test_bytes_are_those_of_a_rank(tmp_path: Path) -> None:
    save_curves(tmp_path / "curves.json", draw_curves(1))
    spec = f"tuned:file={tmp_path}/curves.json@2500B"
    _check(spec, torch.float32, 2)
    _check(spec, torch.bfloat16)
    with pytest.raises(KVPolicyError, match="must fit a text of 60 and 8 tokens, got 2500 bytes"):
        _check(spec, torch.float32)
