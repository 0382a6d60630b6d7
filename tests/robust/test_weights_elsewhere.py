"""Models whose weights are of another dtype than the config says, or are not there."""

from __future__ import annotations

import copy

import pytest
import torch

import kvpolicy
from tests.conformance.models import build


def test_a_plan_has_the_dtype_of_the_weights() -> None:
    model = copy.deepcopy(build("llama"))
    whole = kvpolicy.plan(model, "full", prompt=64)
    half = kvpolicy.plan(model.to(torch.bfloat16), "full", prompt=64)
    model.config.dtype = torch.float32
    again = kvpolicy.plan(model, "full", prompt=64)
    assert again.full_nbytes == half.full_nbytes == whole.full_nbytes / 2
    assert kvpolicy.plan(model, "full", prompt=64, dtype=torch.float32).full_nbytes == whole.full_nbytes
    assert kvpolicy.plan(model.config, "full", prompt=64).full_nbytes == whole.full_nbytes


def test_a_model_without_weights_is_planned_and_refuses_its_first_forward() -> None:
    model = copy.deepcopy(build("llama")).to("meta")
    with kvpolicy.attach(model, "h2o@0.5"), pytest.raises(kvpolicy.KVPolicyError, match="must have its weights"):
        model(torch.ones(1, 9, dtype=torch.int64))
    assert kvpolicy.plan(model, "h2o@0.5", prompt=64).nbytes > 0
