"""What is left of the rules: what a query attends to (1), what is stored of it (7), and odd ways to call a model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import kvpolicy
from kvpolicy import PolicyCache
from kvpolicy.engine.state import tensors
from tests.conformance.access import kept_positions, selector_state
from tests.conformance.models import FAMILIES, build
from tests.conformance.play import TURNS, forward, make_batch, talk
from tests.conformance.policies import CODECS, SELECTORS, words
from tests.sampling import each_once, product


@product("selector,codec", SELECTORS, CODECS, sample=each_once(["snapkv", "h2o", "window", "tova"], CODECS))
def test_a_query_attends_to_the_budget(selector: str, codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rule 1: to the budget exactly, the current token counted, in every step and head."""
    from kvpolicy.engine import layer_index

    seen: list[Tensor] = []
    real = layer_index.attend_columns

    def attend_columns(q: Tensor, exact: Any, coded: Any, empty: Tensor | None, *rest: Any, **options: Any) -> Any:
        heads = exact.keys.new_full(exact.keys.shape[:2], exact.keys.shape[2], dtype=torch.int64)
        seen.append(heads if empty is None else (~empty).sum(-1))
        return real(q, exact, coded, empty, *rest, **options)

    monkeypatch.setattr(layer_index, "attend_columns", attend_columns)
    model = build("llama")
    with kvpolicy.attach(model, words("squeeze", selector, codec)):
        cache = PolicyCache(model)
        talk(model, *make_batch([26, 17], [26] + [1] * 9), [26] + [1] * 9, cache)
    budgets = [layer.budget[:, None].expand(-1, 2) for layer in cache.policy_layers]
    assert len(seen) == 27
    assert all(torch.equal(count, budgets[number % 3]) for number, count in enumerate(seen))


@pytest.mark.parametrize("family", [*FAMILIES])
def test_kv_heads_are_never_repeated(family: str) -> None:
    """Rule 7."""
    model = build(family)
    with kvpolicy.attach(model, "h2o@0.5"):
        cache = PolicyCache(model)
        talk(model, *make_batch([26], [26]), [26], cache)
    single = family == "falcon_single"
    heads = (
        1
        if single
        else getattr(model.config, "num_kv_heads", None)
        or getattr(model.config, "num_key_value_heads", model.config.num_attention_heads)
    )
    assert all(layer.positions.shape[1] == heads for layer in cache.policy_layers)


SCORING = [["h2o", "snapkv", "tova", "kvcrush/h2o"], [torch.bfloat16, torch.float16]]


@product("selector,dtype", *SCORING, sample=each_once(*SCORING))
def test_scores_are_fp32(selector: str, dtype: torch.dtype) -> None:
    """Rule 7."""
    model = build("llama", dtype)
    with kvpolicy.attach(model, f"{selector}@0.5"):
        cache = PolicyCache(model)
        logits = talk(model, *make_batch([26, 17]), TURNS, cache)
    kinds = {t.dtype for layer in cache.policy_layers for t in tensors(selector_state(layer)) if t.is_floating_point()}
    assert kinds == {torch.float32}
    assert logits.dtype == dtype and torch.isfinite(logits).all()


def test_a_mask_of_the_new_tokens_alone() -> None:
    model = build("llama")
    ids, mask = make_batch([26, 17])
    places = (mask.cumsum(-1) - 1).clamp_min(0)
    with kvpolicy.attach(model, "h2o@0.5"), torch.no_grad():
        want = talk(model, ids, mask, TURNS, PolicyCache(model))
        cache = PolicyCache(model)
        got = list[Tensor]()
        start = 0
        for size in TURNS:
            now = slice(start, start + size)
            out = model(ids[:, now], attention_mask=mask[:, now], position_ids=places[:, now], cache=cache)
            got.append(out.logits)
            start += size
    assert torch.equal(torch.cat(got, 1), want)


@pytest.mark.parametrize("policy", ["h2o+kivi:group_size=4:residual_length=4@0.5", "full", "window@0.5"])
def test_a_tick_too_many_does_no_harm(policy: str) -> None:
    """An uncompiled loop that also calls `tick`."""
    model = build("llama")
    ids, mask = make_batch([26, 17])
    with kvpolicy.attach(model, policy):
        want = talk(model, ids, mask, TURNS, PolicyCache(model, new=sum(TURNS[1:])))
        cache = PolicyCache(model, new=sum(TURNS[1:]))
        start = 0
        got = list[Tensor]()
        for size in TURNS:
            got.append(forward(model, ids, mask, start, start + size, cache))
            cache.tick()
            start += size
    assert torch.equal(torch.cat(got, 1), want)


@pytest.mark.parametrize(
    ("selector", "sizes"),
    [
        ("window", [13, 13]),
        ("window", [1] * 26),
        ("streaming:sinks=2", [26]),
        ("streaming:sinks=2", [7, 7, 7, 5]),
        ("streaming:sinks=2", [25, 1]),
    ],
)
def test_a_prompt_may_come_in_pieces(selector: str, sizes: list[int]) -> None:
    """Selectors by position keep the same, however the prompt is cut, where its length is known."""
    model = build("llama")
    with kvpolicy.attach(model, f"{selector}@0.5"):
        cache = PolicyCache(model, prompt=26)
        talk(model, *make_batch([26], [26]), sizes, cache)
    sinks = [0, 1] if "sinks" in selector else []
    assert kept_positions(cache.policy_layers[0])[0][0] == [*sinks, *range(13 + len(sinks), 26)]
