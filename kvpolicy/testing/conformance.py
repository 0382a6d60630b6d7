"""Conformance checks for allocators, selectors and codecs of your own, to be called from a test.

They run a part on a small model with random weights and hold it to what every built-in part is held to.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from kvpolicy.codecs.plain import Plain
from kvpolicy.hf.attach import attach
from kvpolicy.hf.cache import PolicyCache
from kvpolicy.policy import Policy, describe_missing, missing
from kvpolicy.protocols import Allocator, Codec, Selector
from kvpolicy.registry import Kind, kinds
from kvpolicy.selectors.h2o import H2O
from kvpolicy.selectors.streaming import StreamingLLM
from kvpolicy.spec.errors import KVPolicyTypeError
from kvpolicy.spec.validation import check_instance
from kvpolicy.testing.part_checks import check_apart, check_budgets, check_layout, check_reading, check_words, watched
from kvpolicy.testing.stage_checks import check_stages

_LAYERS, _HEADS, _DIM, _PROMPT, _STEPS, _PAD = 3, 2, 16, 96, 12, 7


def check(part: Allocator | Selector | Codec, *, budget: float | int = 0.5) -> None:
    """Hold a strategy to the rules that the engine and every other part rely on.

    Checked of every part: it is a frozen dataclass of keyword-only hyper-parameters; a cache holds the bytes that its
    plan says; no token has two slots and the newest is there; no layer holds more than its budget; a padded row keeps
    what it keeps alone; two runs keep the same.

    Of an allocator also: budgets are int64 [B, L], sum to the total and stay inside the bounds, row by row. Of a
    selector also: priorities are fp32 and no NaN, states are [B, H, S], its floor is enough, and a whole budget changes
    no logit. Of a codec also: the tokens kept are those of `plain`; what it reads is nearer to what was written than
    zeros are, and the same in another batch; its scores and sums are those of what it reads; each stage writes, to the
    bit, the same codes for a row alone and in a batch, whatever tokens beside it that are not write_mask hold.

    Args:
        part: The strategy, with the hyper-parameters that are to be checked.
        budget: What a cache may keep, a share of the prompt or tokens per layer. A selector whose floor is high needs
            more than the default; a prompt here has 96 tokens.

    Raises:
        AssertionError: Where a rule is broken; the message says which.
        KVPolicyTypeError: Where the part is none of the three kinds.

    Examples:
        >>> from kvpolicy import Pyramid, SnapKV, TokenWise
        >>> check(Pyramid(beta=4))
        >>> check(SnapKV(window=8, kernel=3))
        >>> check(TokenWise(group_size=8, residual_length=8, block_size=8))
    """
    check_instance("strategy", part)
    _frozen(part)
    if isinstance(part, Allocator):
        for layers in (_LAYERS, 1, 7):
            check_budgets(part, layers)
        policy = Policy(allocator=part, selector=H2O(), budget=budget)
    elif isinstance(part, Selector):
        check_words(part)
        policy = Policy(selector=part, budget=budget)
    elif isinstance(part, Codec):  # pyright: ignore[reportUnnecessaryIsInstance]
        check_layout(part)
        selector = H2O() if _ranks(part) else StreamingLLM()
        policy = Policy(selector=selector, codec=part, budget=budget)
    else:
        raise KVPolicyTypeError(f"{part!r} is no allocator, no selector and no codec: {_lacking(part)}.")
    with watched(part):
        _behave(part, policy)
    if isinstance(part, Codec):
        check_stages(part, _HEADS, _DIM)


def _lacking(part: object) -> str:
    """What is missing to the kind that has most of its members there."""

    def share(kind: Kind) -> float:
        return len(missing(part, kind)) / len(missing(object(), kind))

    nearest = min(sorted(kinds()), key=share)
    return "see kvpolicy.protocols" if share(nearest) == 1 else describe_missing(part, nearest)


def _behave(part: Any, policy: Policy) -> None:
    """Hold a part to what a cache does under it."""
    model, ids = _model(), _tokens()
    kept = _run(model, policy, ids)
    again = _run(model, policy, ids)
    assert kept == again, f"{part} keeps other tokens in a second run: draw from a seed of its own"
    _rows(model, policy, ids)
    if isinstance(part, Selector):
        if part.min_tokens <= _PROMPT:
            _run(model, dataclasses.replace(policy, budget=part.min_tokens), ids)
        _exact(model, dataclasses.replace(policy, budget=1.0), ids)
    if isinstance(part, Codec) and not _ranks(part):  # H2O's scores would see what the codec lost
        plain = _run(model, dataclasses.replace(policy, codec=Plain()), ids)
        assert kept == plain, f"{part} changes which tokens are kept; only a selector may"


def _ranks(codec: Codec) -> bool:
    return codec.traits.demote_by == "priority"


def _frozen(part: Any) -> None:
    name, params = type(part).__name__, getattr(part, "__dataclass_params__", None)
    assert params is not None, f"{name} is no dataclass: decorate it with @dataclass"
    assert params.frozen, f"{name} can be changed after it was made: write frozen=True"
    fields = dataclasses.fields(part)
    assert all(field.kw_only for field in fields), f"{name} takes arguments by place: write kw_only=True"
    assert hash(part) == hash(dataclasses.replace(part)), f"{name} is not equal to its copy"


def _model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: Any = {"num_attention_heads": 4, "num_key_value_heads": _HEADS, "vocab_size": 64, "pad_token_id": 0}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = LlamaConfig(num_hidden_layers=_LAYERS, hidden_size=4 * _DIM, intermediate_size=64, **sizes)
        return LlamaForCausalLM(config).eval()


def _tokens() -> Tensor:
    return torch.randint(1, 64, (1, _PROMPT + _STEPS), generator=torch.Generator().manual_seed(1))


def _conversation(model: Any, ids: Tensor, mask: Tensor, policy: Policy | None) -> Iterator[tuple[Any, Any]]:
    """The cache and the logits after a prompt, and after each of the steps."""
    columns = ids.shape[1] - _STEPS
    places = (mask.cumsum(-1) - 1).clamp_min(0)
    cache: Any = PolicyCache(model, prompt=mask[:, :columns].sum(-1), new=_STEPS) if policy else None
    for first, last in [(0, columns), *((at, at + 1) for at in range(columns, ids.shape[1]))]:
        given: dict[str, Any] = {"attention_mask": mask[:, :last], "position_ids": places[:, first:last]}
        out = model(ids[:, first:last], past_key_values=cache, **given)
        cache = out.past_key_values
        yield cache, out.logits


def _kept(layer: Any, row: int = 0) -> list[set[int]]:
    return [set(head[head >= 0].tolist()) for head in layer.positions[row]]


def _run(model: Any, policy: Policy, ids: Tensor) -> list[list[set[int]]]:
    """Kept positions of each layer's heads, after a prompt and steps in which every rule was held."""
    cache: Any = None
    with torch.no_grad(), attach(model, policy):
        for step, (cache, logits) in enumerate(_conversation(model, ids, torch.ones_like(ids), policy)):
            assert bool(logits.isfinite().all()), f"{policy}: logits are not finite"
            for layer in cache.layers:
                _hold(policy, layer, _PROMPT + step - 1)
        assert cache.nbytes == cache.plan.nbytes, (
            f"{policy}: {cache.nbytes} bytes are held, planned {cache.plan.nbytes}"
        )
        kept = [_kept(layer) for layer in cache.layers]
    with torch.no_grad():
        full = model(ids).past_key_values.layers[0]
        check_reading(policy.codec, cache.layers[0].store, full.keys, full.values)
    return kept


def _hold(policy: Policy, layer: Any, newest: int) -> None:
    places, valid = layer.positions, layer.positions >= 0
    assert int(places.max()) <= newest, f"{policy}: a position is not there yet"
    assert bool((places == newest).any(-1).all()), f"{policy}: the newest token is not kept"
    for head in places[0]:
        held = head[head >= 0]
        assert held.unique().numel() == held.numel(), f"{policy}: a token has two slots"
    if policy.decode == "evict":
        assert int(valid.sum(-1).max()) <= int(layer.budget.max()), f"{policy}: more tokens than the budget are held"


def _rows(model: Any, policy: Policy, ids: Tensor) -> None:
    """A row with padding on its left, beside a longer one, keeps what it keeps alone."""
    short = torch.cat([ids.new_zeros(1, _PAD), ids[:, _PAD:]], 1)
    both, mask = torch.cat([ids, short]), torch.ones(2, ids.shape[1], dtype=torch.int64)
    mask[1, :_PAD] = 0
    with torch.no_grad(), attach(model, policy):
        *_, (together, _) = _conversation(model, both, mask, policy)
        *_, (alone, _) = _conversation(model, ids[:, _PAD:], torch.ones_like(ids[:, _PAD:]), policy)
        for one, two in zip(alone.layers, together.layers, strict=True):
            same = _kept(one) == _kept(two, row=1)
            assert same, f"{policy}: padding, or the other row, changes which tokens a row keeps"
        check_apart(policy.codec, alone.layers[0].store, together.layers[0].store, row=1)


def _exact(model: Any, policy: Policy, ids: Tensor) -> None:
    ones = torch.ones_like(ids)
    with torch.no_grad():
        stock = [logits for _, logits in _conversation(model, ids, ones, None)]
        policy = dataclasses.replace(policy, budget=ids.shape[1])
        with attach(model, policy):
            for wanted, (_, found) in zip(stock, _conversation(model, ids, ones, policy), strict=True):
                close = torch.allclose(found, wanted, atol=1e-4, rtol=1e-4)
                assert close, f"{policy}: a budget of everything changes the logits"
