"""The memory that tuning takes, from a config alone."""

from __future__ import annotations

from collections.abc import Sequence

from kvpolicy.hf.model_spec import ModelShape
from kvpolicy.policy import Policy

ANSWER = 64
"""Tokens behind a prompt that is cut out of plain text, which are its answer."""

ROWS = 16
"""The most changes that are measured at a time: each takes the memory of a layer's full cache."""

ROW_NBYTES = 1 << 30
"""The most bytes that a layer's full cache takes in all of them."""

LOGITS = 1 << 25
"""The most logits that are computed at a time: 128 MiB of fp32."""


def tuning_peak(
    model: ModelShape, weights: int, policies: Sequence[Policy], prompt: int, answer: int, tile: int | None = None
) -> int:
    """The most bytes that `tune` and its evidence take on the device of the model.

    Args:
        model: The shape of the model's cache.
        weights: Bytes of its weights.
        policies: What is measured, and what it is compared with as evidence.
        prompt: Tokens of the longest prompt.
        answer: Tokens of the longest answer.
        tile: The most tokens that a layer takes at a time; None for all, where the prompts of all layers are on the
            device at once.

    Examples:
        >>> from kvpolicy.hf.embedded import config_of
        >>> from kvpolicy.hf.model_spec import describe
        >>> shape = describe(config_of("llama-3.1-8b"))
        >>> policies = [Policy.parse("snapkv@0.1"), Policy.parse("snapkv+tokenwise:bits=4@0.2")]
        >>> [round(tuning_peak(shape, 15 * 2**30, policies, 127_000, 64, tile) / 2**30) for tile in (None, 4096)]
        [109, 22]
    """
    widths = model.widths
    size = model.shape.dtype.itemsize
    layers = len(model.evictable)
    vectors = prompt * model.shape.token_nbytes
    # Queries, keys and values, and the input of attention; the newest layer's are held beside those that are kept.
    layer = vectors + prompt * (widths.queries + widths.hidden) * size
    held = layer if tile is not None and tile < prompt else (layers + 1) * layer
    forwards = [model.prompt_prefill(policy, prompt, tile).activation_bytes(1) for policy in policies]
    # Rows of answers, each with the prompt of a layer and a copy of it behind which the answer stands.
    logits = answer * widths.vocab
    rows = max(min(ROWS, ROW_NBYTES // max(vectors, 1), LOGITS // max(logits, 1)), 1)
    # Logits, and probabilities of changed and of unchanged rows, in fp64.
    answers = 2 * rows * vectors + rows * (32 * logits + 8 * answer * widths.hidden * size) + 24 * logits
    # A prompt that waits for its replay, or for budgets by layer, is held in all layers; nothing else is then.
    waits = any(policy.replay is not None or policy.layer_metric for policy in policies)
    waiting = layers * vectors + max(forwards) if waits else 0
    unmanaged = model.unmanaged_prefill_bytes(1, prompt, min(prompt, tile or prompt))
    return weights + unmanaged + max(held + max(*forwards, answers), waiting)
