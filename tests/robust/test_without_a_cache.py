"""A forward that caches nothing is the stock model's, whatever its attention and its mask."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import kvpolicy
from kvpolicy.hf.cache_names import output_cache
from tests.conformance.models import FAMILIES, UNNAMED
from tests.conformance.play import make_batch
from tests.robust.hostile import own, refused


def run(model: Any, mask: Tensor | None, **how: Any) -> Any:
    ids, _ = make_batch([26, 17], [26])
    with torch.no_grad():
        return model(ids, attention_mask=mask, labels=ids, use_cache=False, **how)


@pytest.mark.parametrize("family", [*FAMILIES, *UNNAMED])
def test_scoring(family: str) -> None:
    """With each attention that a family has; a mask of ones, in one family, is as none."""
    model = own(family)
    _, padded = make_batch([26, 17], [26])
    masks = (None, torch.ones_like(padded), padded) if family == "llama" else (None, padded)
    for attention, mask in itertools.product(("sdpa", "eager"), masks):
        try:
            model.set_attn_implementation(attention)
        except ValueError:
            continue
        if attention == "sdpa" and getattr(model.config, "attn_logit_softcapping", None) is not None:
            continue  # transformers 5.18 takes it and leaves the cap out
        stock = run(model, mask)
        with kvpolicy.attach(model, "h2o@0.5"):
            ours = run(model, mask)
        seen = torch.ones_like(padded).bool() if mask is None else mask.bool()
        assert torch.allclose(ours.logits[seen], stock.logits[seen], atol=3e-5, rtol=1e-4)
        assert output_cache(ours) is None


def test_attention_matrices() -> None:
    """Where the stock model gives them, so does an attached one; with a cache they are refused, however asked for."""
    model = own()
    ids, padded = make_batch([26, 17], [26])
    model.set_attn_implementation("eager")
    stock = run(model, padded, output_attentions=True).attentions
    with kvpolicy.attach(model, "h2o@0.5"):
        ours = run(model, padded, output_attentions=True).attentions
        assert len(ours) == len(stock) > 0 and all(map(torch.equal, ours, stock))
    model.config.output_attentions = True
    with kvpolicy.attach(model, "h2o@0.5"), refused("output_attentions must be False"):
        model(ids, attention_mask=padded)
