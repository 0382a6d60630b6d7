"""Every family with what `docs/guide/supported.md` says of it: beams, chunks of a prompt, and offloaded weights."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import kvpolicy
from tests.conformance.models import FAMILIES, UNNAMED, build, layers_for
from tests.conformance.play import make_batch
from tests.sampling import product

SHORT: dict[str, Any] = {"do_sample": False, "max_new_tokens": 4, "min_new_tokens": 4}
ROOMY = "snapkv@64"
SMALL = "h2o@0.5"
"""A budget that holds every token, so that the result is that of the stock cache, and one that does not."""
NAMES = [*FAMILIES, *UNNAMED]
SAMPLE = [("qwen2",), ("gemma2",), ("gpt2",), ("gpt_oss",)]
"""Rotary and learned positions, sliding layers, and attention sinks."""
OFFLOADED = [name for name in NAMES if name != "jetmoe"]
"""JetMoE computes with the weights of its experts before accelerate has brought them, with any cache."""


def generate(model: Any, policy: str, **how: Any) -> Any:
    """The tokens of a padded batch under a policy, or with the stock cache, and the positions of the first layer."""
    ids, mask = make_batch([24, 15], [24])
    if not policy:
        return model.generate(ids, attention_mask=mask, **SHORT, **how), None
    with kvpolicy.attach(model, policy) as handle:
        out = model.generate(ids, attention_mask=mask, **SHORT, **how)
    assert handle.cache is not None
    return out, handle.cache.policy_layers[0].positions


WAYS: dict[str, dict[str, Any]] = {"beams": {"num_beams": 2}, "chunks": {"prefill_chunk_size": 7}}


@product("family,way", NAMES, [*WAYS], sample=[(*row, way) for row in SAMPLE for way in WAYS])
def test_beams_and_chunks(family: str, way: str) -> None:
    model = build(family, layers=layers_for("", family))
    stock, _ = generate(model, "", **(WAYS[way] if way == "beams" else {}))
    ours, _ = generate(model, ROOMY, **WAYS[way])
    assert torch.equal(ours, stock)
    _, positions = generate(model, SMALL, **WAYS[way])
    assert len(positions) == (4 if way == "beams" else 2)  # two beams of each row
    assert ((positions >= 0).sum(-1) <= 12).all()


# transformers 5.18 warns of weights that are not where tokens are.
@pytest.mark.filterwarnings("ignore:.*on a device type different than your model:UserWarning")
@product("family", OFFLOADED, sample=SAMPLE)
def test_offloaded_weights(family: str) -> None:
    accelerate = pytest.importorskip("accelerate")
    whole = build(family, layers=layers_for("", family))
    want, kept = generate(whole, SMALL)
    spread = accelerate.cpu_offload(copy.deepcopy(whole), execution_device=torch.device("cpu"))
    got, positions = generate(spread, SMALL)
    assert torch.equal(got, want) and torch.equal(positions, kept)
