"""What kvpolicy tells besides results: a logger that is silent until asked, and warnings of a category of their own.

    >>> import logging
    >>> logging.getLogger("kvpolicy").level == logging.NOTSET
    True

`logging.basicConfig(level="INFO")` shows when a policy is attached and detached; `DEBUG` adds each prompt's budgets and
every extension of a cache. Nothing is logged from within a compiled step.
"""

from __future__ import annotations

import logging
import warnings
from typing import Any

from kvpolicy.policy import Policy
from kvpolicy.reporting.sources import CacheSource, ShapeSource
from kvpolicy.spec.errors import KVPolicyWarning

log: logging.Logger = logging.getLogger("kvpolicy")
log.addHandler(logging.NullHandler())


def tell_attached(model: Any, policy: Policy, shape: ShapeSource) -> None:
    """Log that a policy was attached, and which layers it leaves alone."""
    alone = f", {len(shape.left_alone)} sliding-window layers left alone" if shape.left_alone else ""
    log.info("attached %s to %s: %d layers%s", policy, type(model).__name__, len(shape.evictable), alone)


def tell_detached(model: Any, policy: Policy) -> None:
    """Log that a policy was detached."""
    log.info("detached %s from %s", policy, type(model).__name__)


def tell_settled(cache: CacheSource) -> None:
    """Log the tokens of each layer after a prompt, and the bytes."""
    plan = cache.plan
    if plan is not None and log.isEnabledFor(logging.DEBUG):
        tokens = [layer.tokens for layer in plan.layers]
        note = f"; {plan.note}" if plan.note else ""
        words = "%s settled: at most %s tokens in the layers of %d row(s), %s bytes, the full cache %s%s"
        log.debug(words, plan.policy, tokens, plan.batch, f"{plan.nbytes:,}", f"{plan.full_nbytes:,}", note)


def tell_extended(layer_idx: int, tokens: int, capacity: int) -> None:
    """Log that a layer was given slots for `tokens` more tokens, if any."""
    if tokens:
        log.debug("layer %d extended by %d tokens to %d", layer_idx, tokens, capacity)


def tell_behind(model: Any, limit: int) -> None:
    """Warn that a text goes behind the positions that a rotary embedding was trained for."""
    warnings.warn(
        f"The text is longer than the {limit:,} positions that {type(model).__name__} was trained for, and a policy "
        "does not move the tokens that stay: expect worse answers, and end the text before.",
        KVPolicyWarning,
        stacklevel=2,
    )


def check_caching(model: Any) -> None:
    """Warn the caller of `attach` where `generate` makes no cache, so that a policy would change nothing."""
    if getattr(getattr(model, "generation_config", None), "use_cache", None) is False:
        warnings.warn(
            f"{type(model).__name__} generates without a cache, so the policy changes nothing there: set "
            "model.generation_config.use_cache = True.",
            KVPolicyWarning,
            stacklevel=3,
        )
