"""The check of a whole cache, between two forwards of a model."""

from __future__ import annotations

from kvpolicy.engine.invariants import check_invariants
from kvpolicy.hf.cache import PolicyCache
from kvpolicy.text.errors import KVPolicyTypeError


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
