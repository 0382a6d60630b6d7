"""Pictures whose tokens see each other, also later ones, and positions with several parts (M-RoPE)."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import kvpolicy
from kvpolicy.hf.masks import hides_padding, is_token
from tests.conformance import pictures
from tests.conformance.masked import differences
from tests.conformance.models import UNNAMED
from tests.conformance.pictures import NAMES, words
from tests.conformance.play import TURNS, make_batch

IMAGE = 47
POLICIES = [
    "snapkv:window=6:kernel=3@0.5",
    "h2o@0.5",
    "squeeze+window@0.4",
    "uniform/adakv+snapkv:window=6:kernel=3@0.5",
]


@functools.cache
def gemma() -> Any:
    """Gemma 3 with a vision tower of one layer, whose pictures are four tokens."""
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(UNNAMED["gemma3_pictures"]()).eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            nn.init.normal_(parameter, std=0.35 if "q_proj" in name or "k_proj" in name else 0.15)
    return model


def prompt(lengths: list[int]) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Ids and mask of a conversation, and the picture in its first forward."""
    ids, mask = make_batch(lengths)
    ids = ids.clamp(max=40)
    ids[:, 17:21] = IMAGE
    first = {"token_type_ids": (ids[:, : TURNS[0]] == IMAGE).long()}
    return ids, mask, first | {"pixel_values": torch.randn(len(lengths), 3, 28, 28, generator=torch.manual_seed(1))}


@pytest.mark.parametrize("lengths", [[26], [26, 11]], ids=["one", "padded"])
@pytest.mark.parametrize("policy", POLICIES)
def test_it_equals_the_masked_stock_model(policy: str, lengths: list[int]) -> None:
    ids, mask, first = prompt(lengths)
    found = differences(gemma(), policy, ids, mask, TURNS, **first)
    assert found["policy"] < 1e-4 and found["unmasked"] > 0.05, found


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_full_equals_stock_where_order_matters(implementation: str) -> None:
    ids, mask, first = prompt([26, 26])
    model = gemma()
    model.set_attn_implementation(implementation)
    given = {"attention_mask": mask[:, :26], **first}
    blind = given | {"token_type_ids": torch.zeros(2, 26, dtype=torch.int64)}
    with torch.no_grad():
        expected, causal = (model(ids[:, :26], **each).logits for each in (given, blind))
        with kvpolicy.attach(model, "full"):
            found = model(ids[:, :26], **given, cache=kvpolicy.PolicyCache(model)).logits
    model.set_attn_implementation("eager")
    assert (found - expected).abs().max() < 1e-4 * expected.std() < (causal - expected).abs().max()


def test_a_picture_behind_other_tokens_and_in_tiles_is_refused() -> None:
    ids, mask, first = prompt([26])
    with torch.no_grad(), kvpolicy.attach(gemma(), "window@0.5"):
        cache = kvpolicy.PolicyCache(gemma())
        gemma()(ids[:, 21:26], cache=cache)
        with pytest.raises(kvpolicy.KVPolicyError, match="whole picture must be in the first forward"):
            gemma()(ids[:, :26], cache=cache, **first)
    refused = pytest.raises(kvpolicy.KVPolicyError, match="attention mask must be 2-D")
    with torch.no_grad(), kvpolicy.attach(gemma(), "window@0.5", tile=8), refused:
        gemma()(ids[:, :26], attention_mask=mask[:, :26], **first)
    with torch.no_grad(), kvpolicy.attach(gemma(), "kvzip:chunk=9:sinks=2@0.5"):
        assert gemma()(ids[:, :26], attention_mask=mask[:, :26], **first).logits.isfinite().all()


@pytest.mark.parametrize("lengths", [[26], [26, 11]], ids=["one", "padded"])
def test_a_turn_of_text_with_its_token_types(lengths: list[int]) -> None:
    """The model makes a mask of pairs again, which hides nothing but padding."""
    ids, mask, first = prompt(lengths)
    made = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True}
    found = []
    for types in ({}, {"token_type_ids": (ids[:, :32] == IMAGE).long()}):
        with kvpolicy.attach(gemma(), "full"):
            cache = kvpolicy.PolicyCache(gemma())
            with torch.no_grad():
                gemma()(ids[:, :26], attention_mask=mask[:, :26], cache=cache, **first)
            turn = {"attention_mask": mask[:, :32], "cache": cache, "output_logits": True, **types, **made}
            found.append(gemma().generate(ids[:, :32], **turn).logits)
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("at", [(1, 0), (5, 8), (0, 7)])
def test_a_mask_that_hides_more_than_padding(at: tuple[int, int]) -> None:
    """From one query alone, or of earlier tokens that are none; a token of this turn may be padding."""
    shown = torch.ones(1, 1, 6, 10, dtype=torch.bool).tril(4)
    seen = torch.tensor([4])
    assert hides_padding(shown, seen) and hides_padding(torch.zeros(shown.shape).masked_fill(~shown, -1e9), seen)
    assert not hides_padding(shown[..., 4:], torch.tensor([0]))
    query, column = at
    shown[:, :, query, column] ^= True
    assert not hides_padding(shown, seen)
    shown[:, :, :, column] = False
    assert hides_padding(shown, seen) is (column >= 4)


def test_padding_by_a_mask_of_either_kind() -> None:
    mask = torch.tensor([[[[True, True, False], [True, True, False], [False, False, False]]]])
    for given in (mask, torch.zeros(mask.shape).masked_fill(~mask, -1e9)):
        assert is_token(given).tolist() == [[True, True, False]]


OF_POSITIONS = [
    "expected:sinks=2:horizon=6:every=7@0.5",
    "compactor:sinks=2:recent=2:block=8:sketch=4@0.5",
    "kvzip:chunk=9:sinks=2@0.5",
    "full+rotate:group_size=4:sinks=2:residual_length=2:block_size=4",
]


def told(model: Any, policy: str, **given: Any) -> tuple[list[torch.Tensor], torch.Tensor]:
    """What layers hold, and the logits of a prompt, of a second turn and of two steps."""
    ids = words(30)
    found: list[torch.Tensor] = []
    with torch.no_grad(), kvpolicy.attach(model, policy):
        cache = kvpolicy.PolicyCache(model, prompt=20, new=10)
        for start, stop in ((0, 20), (20, 28), (28, 29), (29, 30)):
            more = {name: at[..., start:stop] for name, at in given.items()}
            found.append(model(ids[:, start:stop], cache=cache, **more).logits)
        return [layer.positions.clone() for layer in cache.policy_layers], torch.cat(found, 1)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("policy", OF_POSITIONS)
def test_a_text_is_as_with_one_part(name: str, policy: str) -> None:
    model = pictures.build(name)
    kept, logits = told(model, policy, position_ids=torch.arange(30)[None])
    again, own = told(model, policy)
    parts, of_parts = told(model, policy, position_ids=torch.arange(30).expand(4, 1, -1))
    assert all(torch.equal(*pair) for pair in zip(kept, again, strict=True))
    assert all(torch.equal(*pair) for pair in zip(kept, parts, strict=True))
    assert torch.allclose(logits, own, atol=1e-5) and torch.allclose(logits, of_parts, atol=1e-5)


@pytest.mark.parametrize("policy", OF_POSITIONS)
def test_a_picture_is_refused(policy: str) -> None:
    model = pictures.build("qwen2_5_vl")
    refused = pytest.raises(kvpolicy.KVPolicyError, match="M-RoPE")
    with torch.no_grad(), kvpolicy.attach(model, policy), refused:
        model(**pictures.prompt())
