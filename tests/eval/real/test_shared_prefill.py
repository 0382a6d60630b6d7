"""What is computed of a prompt is shared among policies, and changes nothing."""

from __future__ import annotations

import torch
from torch.nn import functional as F

import kvpolicy
from kvpolicy_eval.common.conversation import run
from kvpolicy_eval.real.shared_prefill import TOKENS, SharedPrefill

POLICIES = ["full", "snapkv@0.3", "kivi:bits=4", "uniform/adakv+kvzip@0.3", "h2o@0.3", "squeeze+kvcrush/snapkv@0.5"]


def predictions(model: object, policy: str, ids: torch.Tensor) -> torch.Tensor:
    pieces = ids.split([ids.shape[1] - 8, 4, 1, 1, 1, 1], 1)
    return torch.stack(run(model, policy, pieces, prompt=ids.shape[1] - 8, new=8).logits)


def test_predictions_are_equal_bit_for_bit() -> None:
    model, tokenizer = kvpolicy.tiny()
    texts = ("".join(f"{word}={number}\n" for number in range(200)) for word in ("tiger", "lime"))
    prompts = [torch.tensor([tokenizer(text).input_ids[:200]]) for text in texts]
    alone = [[predictions(model, policy, ids) for policy in POLICIES] for ids in prompts]
    with SharedPrefill(model) as shared:
        for ids, wanted in zip(prompts, alone, strict=True):
            shared.clear()
            for policy, expected in zip(POLICIES, wanted, strict=True):
                assert torch.equal(predictions(model, policy, ids), expected), policy
        reused = shared.reused
        parts = len(shared.parts) + model.config.num_hidden_layers - 1  # with attention, without the head
        assert reused >= len(prompts) * (len(POLICIES) - 1) * parts * 0.8
        shared.clear()
        predictions(model, "full", prompts[0])
        assert shared.reused == reused


def test_short_inputs_are_computed_and_everything_is_restored() -> None:
    model, _ = kvpolicy.tiny()
    stock = F.scaled_dot_product_attention
    ids = torch.arange(TOKENS - 1)[None] % 50
    with SharedPrefill(model) as shared, torch.inference_mode():
        model(ids)
        model(ids)
        assert shared.reused == 0 and F.scaled_dot_product_attention is not stock
        longer = torch.arange(TOKENS)[None] % 50
        model(longer)
        model(longer)
        assert shared.reused > 0
    assert F.scaled_dot_product_attention is stock
    assert not any("forward" in vars(part) for part in shared.parts)


def test_what_was_returned_may_be_written_to() -> None:
    model, _ = kvpolicy.tiny()
    part = next(layer for layer in model.modules() if isinstance(layer, torch.nn.Linear))
    tokens = torch.randn(1, TOKENS, part.in_features)
    with SharedPrefill(model), torch.inference_mode():
        first = part(tokens)
        wanted = first.clone()
        first.zero_()
        assert torch.equal(part(tokens), wanted)
        part(tokens).zero_()
        assert torch.equal(part(tokens), wanted)
