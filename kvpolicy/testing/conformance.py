"""Conformance checks for custom parts of policies, to be called from a test, and the check of a whole cache.

A part runs on a small model with random weights, and must satisfy what every built-in part satisfies.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from kvpolicy.allocators.uniform import Uniform
from kvpolicy.codecs.plain import Plain
from kvpolicy.engine.invariants import check_invariants
from kvpolicy.hf.attach import attach
from kvpolicy.hf.cache import PolicyCache
from kvpolicy.hf.cache_names import cache_argument, output_cache
from kvpolicy.policy import Policy, describe_missing, missing
from kvpolicy.protocols import Allocator, Codec, HeadAllocator, Merger, Reader, Selector, nested_from
from kvpolicy.registry import Kind, either, kinds
from kvpolicy.reporting.logging import without_warning_of_few_tokens
from kvpolicy.selectors.h2o import H2O
from kvpolicy.selectors.streaming import StreamingLLM
from kvpolicy.testing import part_checks
from kvpolicy.testing.reader_checks import check_reader
from kvpolicy.testing.stage_checks import check_stages
from kvpolicy.text.errors import KVPolicyTypeError
from kvpolicy.text.validation import check_instance


def check_cache(cache: PolicyCache) -> None:
    """Check the invariants of every layer of a cache that a policy manages.

    A head holds a token once, and the newest one; no head or layer holds more than its budget; no slot of one head or
    row holds a token of another; counters, indices and bytes equal a recount. Call it in tests of your own parts and of
    your own loops, after a forward, after `tick()` in a compiled loop, or after rows were selected. It reads all slots
    on the host, so that it takes longer than a step.

    Args:
        cache: The cache.

    Raises:
        AssertionError: If an invariant does not hold; the message says which, and in which layer.
        KVPolicyTypeError: If it is no `PolicyCache`.

    Examples:
        >>> import torch, kvpolicy
        >>> from kvpolicy.testing import check_cache
        >>> model, tokenizer = kvpolicy.tiny()
        >>> with kvpolicy.attach(model, "uniform/adakv+snapkv@0.2"), torch.no_grad():
        ...     cache = model(torch.arange(100)[None] + 5).cache
        >>> check_cache(cache)
    """
    if not isinstance(cache, PolicyCache):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise KVPolicyTypeError(
            f"The cache must be a PolicyCache, got a {type(cache).__name__}; try the cache that a model returns with a "
            "policy."
        )
    stores = [layer.store for layer in cache.policy_layers]
    for store in stores:
        check_invariants(store)
    waits = any(layer.pending is not None for layer in cache.policy_layers)
    started = [store for store in stores if store.is_initialized]
    for store in started:
        held = store.tensors
        first = started[0].tensors
        alike = held.length.equal(first.length) and held.columns.equal(first.columns)
        assert alike or waits, f"layer {store.layer_idx}: all layers see the same tokens"


_LAYERS = 3
_HEADS = 2
_DIM = 16
_PROMPT = 96
_STEPS = 12
_PAD = 7


@without_warning_of_few_tokens()
def check(part: Allocator | HeadAllocator | Selector | Merger | Codec | Reader, *, budget: float | int = 0.5) -> None:
    """Check the rules that the engine and other parts rely on.

    Every part: it is a frozen dataclass with keyword-only fields; a cache holds the planned number of bytes; no token
    has two slots, and the newest token is kept; no layer holds more than its budget; a padded row keeps the same tokens
    as on its own; two runs keep the same tokens. After every step, `check_cache` passes.

    Allocators: budgets are int64 [B, L], sum to the total, respect the bounds, and do not depend on other rows.

    Head allocators: pages are int64 [B, H], at least 1, sum to the pages of the layer, and do not depend on other rows;
    each head has room for what its selector always keeps, also where all priority is in one head.

    Selectors: priorities are fp32 and not NaN; states are [B, H, S]; `min_tokens` is a budget that works; a full budget
    changes no logits; what is kept is nested, if `nested_from` says so.

    Mergers: states are zero and have a row per batch row and a column per head; a prompt without an evicted token
    comes out bit for bit; keys, values and counts keep their shapes and are finite; a full budget changes no logits.

    Codecs: they keep the same tokens as `plain`; what they decode is closer to the original than zeros are, and does
    not depend on the batch; `score` and `mix` are the products with what they decode; each stage writes bit-identical
    codes for a row on its own and in a batch, whatever tokens outside `write_mask` contain.

    Readers: a fixed number of slots is read, in whole pages; entries depend on the tokens in their own slots alone; a
    step moves the planned number of bytes.

    Args:
        part: The strategy, with the hyperparameters to check.
        budget: The budget of the caches: a fraction of the prompt, or tokens per layer. A selector with a high
            `min_tokens` needs more than the default; the prompt has 96 tokens.

    Raises:
        AssertionError: If a rule is violated; the message says which.
        KVPolicyTypeError: If the part is of no kind.

    Examples:
        >>> from kvpolicy import DoubleSparsity, Pyramid, SnapKV, TokenWise
        >>> check(Pyramid(beta=4))
        >>> check(SnapKV(window=8, kernel=3))
        >>> check(TokenWise(group_size=8, residual_length=8, block_size=8))
        >>> check(DoubleSparsity(read=8, dense=0))
    """
    check_instance("strategy", part)
    _check_dataclass(part)
    # First what the part returns by itself, then caches that use it, beside parts that need what it must provide.
    if isinstance(part, Allocator):
        for layers in (_LAYERS, 1, 7):
            part_checks.check_budgets(part, layers)
        policy = Policy(allocator=part, selector=H2O(), budget=budget)
    elif isinstance(part, HeadAllocator):
        part_checks.check_divided(part, _HEADS)
        policy = Policy(allocator=Uniform(heads=part), selector=H2O(), budget=budget)
    elif isinstance(part, Selector):
        part_checks.check_selector(part)
        policy = Policy(selector=part, budget=budget)
    elif isinstance(part, Merger):
        part_checks.check_merger(part)
        policy = Policy(selector=H2O(), merger=part, budget=budget)
    elif isinstance(part, Codec):
        part_checks.check_layout(part)
        selector = H2O() if _needs_ranking(part) else StreamingLLM()
        policy = Policy(selector=selector, codec=part, budget=budget)
    elif isinstance(part, Reader):  # pyright: ignore[reportUnnecessaryIsInstance]
        check_reader(part)
        _check_cache(part, Policy(reader=part))
        policy = Policy(selector=StreamingLLM(), reader=part, budget=budget)
    else:
        raise KVPolicyTypeError(
            f"The part must be {either(_with_article(kind) for kind in kinds())}, got {part!r}; {_what_it_lacks(part)}."
        )
    # Every priority and state that a selector returns meanwhile is checked too.
    with part_checks.watched(part):
        _check_cache(part, policy)
    if isinstance(part, Codec):
        check_stages(part, _HEADS, _DIM)


def _with_article(kind: str) -> str:
    return f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"


def _what_it_lacks(part: object) -> str:
    """The missing members of the kind that a part has the largest fraction of the members of."""

    def missing_fraction(kind: Kind) -> float:
        return len(missing(part, kind)) / len(missing(object(), kind))

    nearest = min(sorted(kinds()), key=missing_fraction)
    return "see kvpolicy.protocols" if missing_fraction(nearest) == 1 else describe_missing(part, nearest)


def _check_cache(part: Any, policy: Policy) -> None:
    """Check caches that use a part."""
    model = _model()
    ids = _tokens()
    kept = _run(model, policy, ids)
    again = _run(model, policy, ids)
    assert kept == again, f"{part} must be deterministic, got other tokens in a second run; try a seed in a field"
    _check_padding(model, policy, ids)
    if isinstance(part, Selector):
        if part.min_tokens <= _PROMPT:
            _run(model, dataclasses.replace(policy, budget=part.min_tokens), ids)
        _check_full_budget(model, dataclasses.replace(policy, budget=1.0), ids)
        _check_nesting(model, policy, ids)
    if isinstance(part, Merger):
        _check_full_budget(model, policy, ids)
    # With H2O, the error of the codec changes the scores, and so the tokens that are kept.
    if isinstance(part, Codec) and not _needs_ranking(part):
        plain = _run(model, dataclasses.replace(policy, codec=Plain()), ids)
        assert kept == plain, f"{part} must keep the tokens that plain keeps, got others"


def _check_nesting(model: Any, policy: Policy, ids: Tensor) -> None:
    """Check that layers may drop tokens of a prompt before its budget is divided, if the selector says so."""
    nested = nested_from(policy.selector)
    if nested is None or 3 * nested > _PROMPT:  # nothing could be dropped
        return
    waits = dataclasses.replace(policy, allocator=part_checks.FallingBudgets(), budget=max(2 * nested, 16))
    trims = dataclasses.replace(waits, allocator=part_checks.FallingBounds())
    same = _run(model, waits, ids) == _run(model, trims, ids)
    assert same, (
        f"{policy.selector}: from a budget of nested_from tokens on, a smaller budget must keep tokens that a larger "
        f"one keeps, got others from {nested} on; try nested_from = None"
    )


def _needs_ranking(codec: Codec) -> bool:
    return codec.traits.demotion is not None


def _check_dataclass(part: Any) -> None:
    name = type(part).__name__
    params = getattr(part, "__dataclass_params__", None)
    assert params is not None, f"{name} must be a dataclass, got an ordinary class; try @dataclass"
    assert params.frozen, f"{name} must be immutable, got a dataclass that is not frozen; try frozen=True"
    fields = dataclasses.fields(part)
    is_kw_only = all(field.kw_only for field in fields)
    assert is_kw_only, f"{name} must take keyword arguments only, got positional ones; try kw_only=True"
    assert hash(part) == hash(dataclasses.replace(part)), f"{name} must be equal to its copy, got another hash"


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
    """The cache and the logits after the prompt, and after each decode step."""
    columns = ids.shape[1] - _STEPS
    # Padding is not counted, so that a padded row has the same rotary angles as the row on its own.
    position_ids = (mask.cumsum(-1) - 1).clamp_min(0)
    cache: Any = PolicyCache(model, prompt=mask[:, :columns].sum(-1), new=_STEPS) if policy else None
    for first, last in [(0, columns), *((at, at + 1) for at in range(columns, ids.shape[1]))]:
        out = model(
            ids[:, first:last],
            **cache_argument(model, cache),
            attention_mask=mask[:, :last],
            position_ids=position_ids[:, first:last],
        )
        cache = output_cache(out)
        yield cache, out.logits


def _kept(layer: Any, row: int = 0) -> list[set[int]]:
    return [set(head[head >= 0].tolist()) for head in layer.head_positions[row]]


def _run(model: Any, policy: Policy, ids: Tensor) -> list[list[set[int]]]:
    """The kept positions of the heads of each layer, after a prompt and decode steps that are checked."""
    cache: Any = None
    with torch.no_grad(), attach(model, policy):
        for step, (cache, logits) in enumerate(_conversation(model, ids, torch.ones_like(ids), policy)):
            assert bool(logits.isfinite().all()), f"{policy}: logits must be finite, got NaN or inf"
            for layer in cache.layers:
                _check_slots(policy, layer, _PROMPT + step - 1)
            check_cache(cache)
        planned = cache.plan.nbytes
        assert cache.nbytes == planned, f"{policy}: the cache must hold the planned {planned} bytes, got {cache.nbytes}"
        moved = [layer.moved for layer in cache.plan.layers]
        found = [layer.moved for layer in cache.layers]
        assert found == moved, f"{policy}: a step must move the planned {moved} bytes of each layer, got {found}"
        kept = [_kept(layer) for layer in cache.layers]
    with torch.no_grad():
        first = _first_encoded(cache)
        full = output_cache(model(ids)).layers[first]
        part_checks.check_reading(policy.codec, cache.layers[first].store, full.keys, full.values)
    return kept


def _first_encoded(cache: Any) -> int:
    """The first layer with codes, whose inputs do not depend on the codec; the first of all if none has any."""
    return next((index for index, layer in enumerate(cache.layers) if sum(layer.layout.coded)), 0)


def _check_slots(policy: Policy, layer: Any, newest: int) -> None:
    """Check the positions in the slots of a layer, after the token at position `newest`."""
    positions = layer.head_positions
    last = int(positions.max())
    assert last <= newest, f"{policy}: positions must be at most that of the newest token, {newest}, got {last}"
    has_newest = bool((positions == newest).any(-1).all())
    assert has_newest, f"{policy}: the newest token must be kept, got a head without it"
    for head in positions[0]:
        held = head[head >= 0]
        assert held.unique().numel() == held.numel(), f"{policy}: a token must have one slot, got two for one token"
    if policy.decode == "evict":
        held = (positions >= 0).sum(-1)
        budget = int(layer.budget.max())
        if policy.heads is not None:  # heads share the budget of the layer
            budget = budget * held.shape[-1]
            held = held.sum(-1)
        most = int(held.max())
        assert most <= budget, f"{policy}: a head must hold at most its budget of {budget} tokens, got {most}"


def _check_padding(model: Any, policy: Policy, ids: Tensor) -> None:
    """Check that a row with padding on its left, in a batch with a longer one, keeps the same tokens as on its own."""
    short = torch.cat([ids.new_zeros(1, _PAD), ids[:, _PAD:]], 1)
    both = torch.cat([ids, short])
    mask = torch.ones(2, ids.shape[1], dtype=torch.int64)
    mask[1, :_PAD] = 0
    with torch.no_grad(), attach(model, policy):
        *_, (together, _) = _conversation(model, both, mask, policy)
        *_, (alone, _) = _conversation(model, ids[:, _PAD:], torch.ones_like(ids[:, _PAD:]), policy)
        for one, two in zip(alone.layers, together.layers, strict=True):
            same = _kept(one) == _kept(two, row=1)
            assert same, f"{policy}: the tokens that a row keeps must not depend on padding or other rows, got others"
        if policy.heads is None:  # in pages, the tokens of a head may be anywhere
            first = _first_encoded(alone)
            part_checks.check_batch(policy.codec, alone.layers[first].store, together.layers[first].store, row=1)


def _check_full_budget(model: Any, policy: Policy, ids: Tensor) -> None:
    """Check that logits are those of the stock cache if the budget is the whole sequence."""
    ones = torch.ones_like(ids)
    with torch.no_grad():
        stock = [logits for _, logits in _conversation(model, ids, ones, None)]
        policy = dataclasses.replace(policy, budget=ids.shape[1])
        with attach(model, policy):
            for expected, (_, logits) in zip(stock, _conversation(model, ids, ones, policy), strict=True):
                is_close = torch.allclose(logits, expected, atol=1e-4, rtol=1e-4)
                assert is_close, f"{policy}: a full budget must not change the logits, got a difference"
