"""Rows of a cache that join and leave it: `PolicyCache.put` and `drop`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvpolicy.engine import rows as engine
from kvpolicy.engine.layer_contents import RowRoom
from kvpolicy.engine.layout import fix_addresses
from kvpolicy.hf.budgets import counted
from kvpolicy.hf.cache_forward import CacheForward
from kvpolicy.hf.plan import Prefilling, build_plan
from kvpolicy.hf.rows import Rows, given_rows, refuse_rows
from kvpolicy.hf.states import States
from kvpolicy.planning.planner import divide
from kvpolicy.planning.tokens import SHORT_PROMPT, Tokens, tokens_of, too_short
from kvpolicy.policy import Policy
from kvpolicy.text.errors import KVPolicyError, KVPolicyStateError, KVPolicyTypeError
from kvpolicy.text.validation import check_size

_SAMPLES = 32
"""Lengths of prompts for which slots are counted: a shorter one may need more of them in a layer."""


def open_rows(cache: CacheForward, count: int, length: int, new: int | None) -> None:
    """Let the rows of an empty cache come and go; see `Handle.rows`.

    Raises:
        KVPolicyError: If a number is out of range, or the policy or the model does not allow it.
    """
    count = check_size("count", count, 1)
    length = check_size("length", length, 1)
    if new is not None:
        new = check_size("new", new, 0)
        if new > length:
            raise KVPolicyError(f"new must be at most length, which counts the prompt too, got {new} of {length}.")
    _check_policy(cache)
    cache.rows = Rows(count, length, new)


def _check_policy(cache: CacheForward) -> None:
    policy = cache.policy
    if isinstance(policy.budget, str):
        raise KVPolicyError(
            "The budget must be that of each row where rows come and go, a fraction of its prompt or a number of "
            f"tokens, got {policy.budget}, which is that of the whole cache; try 0.2 or 2048."
        )
    windows = cache.attachment.model_shape.unmanaged
    if windows:
        raise KVPolicyError(
            "Every layer must be under the policy where rows come and go, got a sliding window in layer "
            f"{min(windows)}, whose mask counts the columns of a batch; try a padded batch."
        )
    headed = next((own for own in policy.distinct if own.heads is not None), None)
    if headed is not None and cache.attachment.sharing is not None:
        raise KVPolicyError(
            "The heads of a layer must have equal budgets where rows come and go on several ranks, got "
            f"{headed.heads}; try uniform."
        )


def put(cache: CacheForward, row: Any, other: Any) -> None:
    """Let a free row go on as a cache of one row; see `PolicyCache.put`."""
    rows = given_rows(cache.rows, "put()")
    cache.forward.check_idle("put()")
    cache.journal.refuse_changes("put()")
    row = rows.check_row(row, is_live=False)
    _check_other(cache, rows, other)
    layers = [*zip(cache.policy_layers, other.policy_layers, strict=True)]
    first = cache.policy_layers[0]
    with torch.no_grad(), torch.inference_mode(_is_inference(cache, other)):
        if not first.is_initialized:
            _begin(cache, rows, other)
        tokens: list[int] = []
        for layer, own in layers:
            found = engine.obstacle(layer.store, own.store)
            if found:
                raise KVPolicyError(f"A row must be of the same model as the cache, got {found}; try a new cache.")
            tokens.append(engine.needed_tokens(own.store, rows.length, is_announced=other.new is not None))
        each = [*zip(layers, tokens, strict=True)]
        changes = [engine.widen(layer.store, own.store, needed) for (layer, own), needed in each]
        if any(changes):
            assert cache.plan is not None, "the layers have slots"
            cache.plan = counted(cache.plan, cache.policy_layers)
        for (layer, own), needed in each:
            if not engine.holds(layer.store, own.store, needed):
                raise KVPolicyError(
                    f"A row must hold at most {rows.length} tokens, got a cache with more slots in layer "
                    f"{layer.layer_idx}; try PolicyCache(model, new=...) with the tokens that will follow."
                )
        for (layer, own), needed in each:
            engine.put_row(layer.store, row, own.store, needed)
        for mine, theirs in zip(cache.layers, other.layers, strict=True):
            if isinstance(mine, States):
                mine.put_states(row, theirs)
        digest = first.mask_digest
        theirs = other.policy_layers[0].mask_digest
        assert digest is not None and theirs is not None
        digest[row] = theirs[0]
        rows.set(row, is_live=True)
        _count_columns(cache)


def drop(cache: CacheForward, row: Any) -> None:
    """Free a row; see `PolicyCache.drop`."""
    rows = given_rows(cache.rows, "drop()")
    cache.forward.check_idle("drop()")
    cache.journal.refuse_changes("drop()")
    row = rows.check_row(row, is_live=True)
    with torch.no_grad(), torch.inference_mode(cache.policy_layers[0].store.contents.is_inference):
        for layer in cache.policy_layers:
            engine.drop_row(layer.store, row)
        for layer in cache.layers:
            if isinstance(layer, States):
                layer.drop_states(row)
        digest = cache.policy_layers[0].mask_digest
        assert digest is not None
        digest[row] = 0
        rows.set(row, is_live=False)
        _count_columns(cache)


def _is_inference(cache: CacheForward, other: CacheForward) -> bool:
    """Whether tensors are changed that only inference mode may change."""
    first = cache.policy_layers[0] if cache.policy_layers[0].is_initialized else other.policy_layers[0]
    return first.store.contents.is_inference


def _check_other(cache: CacheForward, rows: Rows, other: Any) -> None:
    """Refuse what cannot become a row."""
    if not isinstance(other, CacheForward):
        raise KVPolicyTypeError(
            f"A row must be filled with a kvpolicy.PolicyCache of one row, got {type(other).__name__}; try that of its "
            "prompt."
        )
    other.forward.check_idle("put()")
    other.journal.refuse_marked("put()")
    refuse_rows(other.rows, "put() with a cache")
    if other.attachment is not cache.attachment or other.policy != cache.policy:
        raise KVPolicyError(
            f"A row must be of the same model and policy as its cache, got {other.policy} instead of {cache.policy}; "
            "try kvpolicy.PolicyCache(model) while the policy of the rows is attached."
        )
    if not other.is_initialized or not other.has_prompt or other.holds_next or other.awaits_chunk:
        raise KVPolicyStateError(
            "A row must be filled with a cache that holds a whole prompt, got one that does not; try to run the prompt "
            "first."
        )
    if other.policy_layers[0].prefix_columns:
        raise KVPolicyStateError(
            "A row must be filled with a cache that holds all its tokens itself, got one with a shared prefix; try "
            "fork() without shared=True."
        )
    if other.batch_size != 1:
        raise KVPolicyError(
            f"A row must be filled with a cache of one row, got {other.batch_size}; try cache.fork([0]) for each."
        )
    if other.counts_padding():
        raise KVPolicyError(
            "The positions of a row must not count padding, got a cache whose padded prompt was given none; try "
            "position_ids=(attention_mask.cumsum(-1) - 1).clamp_min(0) with the prompt."
        )
    length = int(other.policy_layers[0].length)
    if length > rows.length:
        raise KVPolicyError(
            f"A row must have at most {rows.length} tokens, got a cache of {length}; try handle.rows with a larger "
            "length."
        )


def _begin(cache: CacheForward, rows: Rows, like: CacheForward) -> None:
    """Make the slots of all rows, on the devices and in the dtype of a cache with a prompt."""
    store = like.policy_layers[0].store
    tokens = _room(cache, rows, like)
    numbers = zip(tokens.expected_len[0].tolist(), (tokens.keep + tokens.extra[:, None])[0].tolist(), strict=True)
    pairs = zip(cache.policy_layers, like.policy_layers, strict=True)
    for (layer, own), room in zip(pairs, numbers, strict=True):
        engine.begin_rows(layer.store, own.store, rows.count, RowRoom(*room))
    for mine, theirs in zip(cache.layers, like.layers, strict=True):
        if isinstance(mine, States):
            mine.begin_states(theirs, rows.count)  # pyright: ignore[reportArgumentType]  # as this layer is
    first = cache.policy_layers[0]
    first.hold_digest(torch.zeros_like(first.length))
    rows.on_device = torch.zeros_like(first.length, dtype=torch.bool)
    fix_addresses([rows.on_device])
    model = cache.attachment.model_shape
    heads = store.shape.heads
    lengths = torch.full((rows.count,), rows.length, device="cpu")
    cache.plan = build_plan(
        cache.policy,
        model,
        store.shape._replace(all_heads=store.ranks.kv_heads(heads)),
        tokens,
        lengths,
        Prefilling(rows.length),
        full_tokens=rows.count * rows.length,
        unmanaged=model.unmanaged_bytes(rows.count, rows.length),
        measured=True,
        held=store.ranks.held,
    )
    if any(own.heads is not None for own in cache.policy.distinct):  # with pages for any division among the heads
        cache.plan = counted(cache.plan, cache.policy_layers)


def _room(cache: CacheForward, rows: Rows, like: CacheForward) -> Tokens:
    """Tokens that a free row has room for in each layer: the most that any text of its length may need there."""
    policy = cache.policy
    most = rows.length if rows.new is None else max(rows.length - rows.new, 1)
    prompt = _prompts(policy, most)
    # A text may end at once, or as late as it can; what is divided among layers depends on it.
    end = torch.cat([prompt, torch.full_like(prompt, rows.length) if rows.new is None else prompt + rows.new])
    prompt = prompt.repeat(2)
    metrics = None
    if policy.layer_metric:
        known = like.budgets.metrics
        assert known is not None, "the layers were measured in the prompt"
        metrics = known.expand(len(prompt), *known.shape[1:])
    store = like.policy_layers[0].store
    heads = store.shape.heads
    shape = store.shape._replace(
        all_heads=store.ranks.kv_heads(heads),
        heads=store.ranks.most_heads(heads),
        group=store.ranks.most_group(store.shape.group),
    )
    model = cache.attachment.model_shape
    indices = model.evictable
    found = divide(policy, metrics, prompt, end, [shape] * len(indices), 0, indices, model.whole)
    budget = (found.keep + found.extra[:, None]).amax(0)
    expected = budget.clamp_max(rows.length)
    every = rows.count, -1
    none = torch.zeros(rows.count, dtype=torch.int64, device="cpu")
    last = torch.full((rows.count,), rows.length, device="cpu")
    return Tokens(budget.expand(every), none, expected.expand(every), last)


def _prompts(policy: Policy, most: int) -> Tensor:
    """Lengths of prompts up to `most`, among them those that may need the most slots in a layer, [n] int64."""
    if policy.differs_by_layer:
        return torch.tensor([most], device="cpu")
    assert not isinstance(policy.budget, str), "a budget in bytes is not that of a row"
    every = torch.tensor([most * number // _SAMPLES for number in range(1, _SAMPLES + 1)], device="cpu")
    # A short prompt of which the policy keeps too little is kept whole; a longer one is refused.
    short = torch.arange(1, min(most, SHORT_PROMPT) + 1, device="cpu")
    whole = short[too_short(policy, short)][-1:]
    kept = (tokens_of(policy.budget, every) >= policy.min_tokens) & (every > 0)
    kept[-1] = True  # refused by the division if it is too long
    return torch.cat([whole, every[kept]])


def _count_columns(cache: CacheForward) -> None:
    """Count as many columns as the longest row has tokens."""
    longest = int(cache.policy_layers[0].length.max())
    for layer in cache.policy_layers:
        layer.store.contents.set_columns(longest)
