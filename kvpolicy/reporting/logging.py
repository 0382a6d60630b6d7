"""The logger `kvpolicy`, which is silent by default, and the warnings of kvpolicy.

    >>> import logging
    >>> logging.getLogger("kvpolicy").level == logging.NOTSET
    True

`logging.basicConfig(level="INFO")` shows when a policy is attached and detached. `DEBUG` adds the budgets of each
prompt and every extension of a cache. A compiled step logs nothing.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from kvpolicy.planning.notes import FEW_TOKENS
from kvpolicy.policy import Policy
from kvpolicy.reporting.report import CacheSource, ShapeSource
from kvpolicy.text.budget import with_least
from kvpolicy.text.errors import KVPolicyWarning
from kvpolicy.text.limits import LEAST_TOKENS
from kvpolicy.text.tables import shorten

log: logging.Logger = logging.getLogger("kvpolicy")
log.addHandler(logging.NullHandler())


def log_attached(model: Any, policy: Policy, shape: ShapeSource) -> None:
    """Log that a policy was attached, and how many layers it does not manage."""
    unmanaged = f", {len(shape.unmanaged)} sliding-window layers unmanaged" if shape.unmanaged else ""
    states = f", {len(shape.states)} layers with states of their own" if shape.states else ""
    reading = f", {len(shape.owners)} layers that read the keys of others" if shape.owners else ""
    others = unmanaged + states + reading
    log.info("attached %s to %s: %d layers%s", policy, type(model).__name__, len(shape.evictable), others)


def log_detached(model: Any, policy: Policy) -> None:
    """Log that a policy was detached."""
    log.info("detached %s from %s", policy, type(model).__name__)


def log_compressed(cache: CacheSource) -> None:
    """Log the tokens and bytes of each layer after a prompt."""
    plan = cache.plan
    if plan is not None and log.isEnabledFor(logging.DEBUG):
        tokens = [layer.tokens for layer in plan.layers]
        note = f"; {plan.note}" if plan.note else ""
        message = "%s compressed a prompt: at most %s tokens in the layers of %d row(s), %s bytes, the full cache %s%s"
        log.debug(message, plan.policy, tokens, plan.batch, f"{plan.nbytes:,}", f"{plan.full_nbytes:,}", note)


def log_extended(layer_idx: int, tokens: int, capacity: int) -> None:
    """Log that slots for `tokens` more tokens were added to a layer, if any were."""
    if tokens:
        log.debug("layer %d extended by %d tokens to %d", layer_idx, tokens, capacity)


def log_tile(columns: int, tile: int | None) -> None:
    """Log how many of a prompt's tokens layers take at a time, where that was chosen by the free memory."""
    if tile is not None:
        log.info("a prompt of %d tokens is read in tiles of %d", columns, tile)


def warn_beyond_trained(model: Any, limit: int) -> None:
    """Warn that a text exceeds the positions that a rotary embedding was trained for."""
    warnings.warn(
        f"The text exceeds the {limit:,} positions that {type(model).__name__} was trained for, and a policy keeps the "
        "positions of its tokens, so expect worse answers; end the text earlier.",
        KVPolicyWarning,
        stacklevel=2,
    )


UNFAITHFUL = {
    "bamba": "one token at a time or several",
    "jamba": "several tokens at once, as in chunks and second turns",
}
"""Families whose state transformers does not continue as in one piece, and behind which forwards."""


def warn_of_states(model: Any, model_type: str) -> None:
    """Warn the caller of `attach` if transformers itself does not continue the states of a model."""
    if model_type in UNFAITHFUL:
        warnings.warn(
            f"transformers does not continue the states of {type(model).__name__} for {UNFAITHFUL[model_type]}, with "
            "or without a policy, so that answers differ from those to the same text in one piece.",
            KVPolicyWarning,
            stacklevel=4,  # above `attach` and what explains its arguments
        )


def warn_of_padding(model: Any) -> None:
    """Warn that the states of a row that ends with padding are not those behind its last token."""
    warnings.warn(
        f"Padding behind the last token of a row moves the states of {type(model).__name__}, with or without a policy, "
        "so that its text must not go on; pad in front.",
        KVPolicyWarning,
        stacklevel=2,
    )


def warn_uncompiled(policy: Policy, reason: str) -> None:
    """Warn that `generate` runs uncompiled, although it was asked to compile."""
    warnings.warn(
        f"generate runs uncompiled under {shorten(str(policy))}, since {reason}; leave compile=True out.",
        KVPolicyWarning,
        stacklevel=2,
    )


def warn_of_chunks(policy: Policy) -> None:
    """Warn that a prompt comes in chunks, each of which is compressed by its own last queries."""
    warnings.warn(
        f"Each chunk of the prompt is compressed by its own last queries under {policy}, which keeps other tokens than "
        "one prompt; attach with tile= instead of chunks, or with chunks='hold'.",
        KVPolicyWarning,
        stacklevel=2,
    )


def warn_of_few_tokens(policy: Policy) -> None:
    """Warn that a fraction of a short prompt is only a few tokens."""
    # Without the numbers of a prompt, so that programs that attach once for each print it once.
    warnings.warn(
        f"The budget {policy.budget} leaves fewer than {FEW_TOKENS} tokens of a short prompt under "
        f"{shorten(str(policy))}, too few for most answers; try {with_least(policy.budget, LEAST_TOKENS)}, which keeps "
        f"at least {LEAST_TOKENS:,}.",
        KVPolicyWarning,
        stacklevel=2,
    )


@contextmanager
def without_warning_of_few_tokens() -> Generator[None]:
    """Do not warn of few tokens where a budget is measured as it is."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The budget .* leaves fewer than", KVPolicyWarning)
        yield


def check_caching(model: Any) -> None:
    """Warn the caller of `attach` if `generate` does not use a cache, so that the policy would have no effect."""
    if getattr(getattr(model, "generation_config", None), "use_cache", None) is False:
        warnings.warn(
            f"{type(model).__name__} generates without a cache, so the policy has no effect there; set "
            "model.generation_config.use_cache = True.",
            KVPolicyWarning,
            stacklevel=4,  # above `attach` and what explains its arguments
        )


_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "repetition_penalty": (1,),
    "no_repeat_ngram_size": (0,),
    "guidance_scale": (1,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "bad_words_ids": (),
    "sequence_bias": (),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "exponential_decay_length_penalty": (),
    "stop_strings": ([],),
}
"""Fields of a generation config that change logits or the end in `generate`, with values besides None that do not."""

_NEUTRAL_SAMPLING: dict[str, tuple[Any, ...]] = {
    "top_k": (0,),
    "top_p": (1,),
    "min_p": (0,),
    "typical_p": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
}
"""Those that do so only where tokens are sampled."""


def warn_of_processors(model: Any, samples: bool) -> None:
    """Warn the caller of `speculate` of the fields of a generation config that it does not apply."""
    config = getattr(model, "generation_config", None)
    fields = _NEUTRAL | (_NEUTRAL_SAMPLING if samples else {})
    given = {name: getattr(config, name, None) for name in fields}
    ignored = [f"{name}={value}" for name, value in given.items() if value is not None and value not in fields[name]]
    if ignored:
        warnings.warn(
            "Speculation takes tokens from the logits of the full cache as they are, without "
            f"{shorten(', '.join(ignored))} of the generation config, so its text may differ from that of generate.",
            KVPolicyWarning,
            stacklevel=4,  # above `speculate` and what explains its arguments
        )
