"""How a policy does on windows, measured as it runs: a compressed prompt, and an answer decoded behind it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kvpolicy.hf.attach import attach
from kvpolicy.hf.cache import PolicyCache
from kvpolicy.hf.cache_names import cache_argument
from kvpolicy.hf.compiled_generation import step_call
from kvpolicy.hf.discovery import device_of
from kvpolicy.hf.eval_mode import eval_mode
from kvpolicy.hf.model_spec import ModelShape, describe
from kvpolicy.hf.text_angles import check_pieces
from kvpolicy.hf.tile_size import TileSize
from kvpolicy.policy import Policy
from kvpolicy.reporting.logging import without_warning_of_few_tokens
from kvpolicy.text.errors import KVPolicyError
from kvpolicy.tuning.windows import Window


class Score(NamedTuple):
    """Effect of a policy on a model's predictions, by window.

    Attributes:
        kl: Kullback-Leibler divergence of the full cache's predictions from the policy's, in nats, averaged over the
            predictions that the tokens behind the prompt make, [W] fp64.
        top1: Share of these predictions with the same most probable token as the full cache, [W] fp64.
        correct: 1.0 if greedy decoding gives every token of the answer, else 0.0, [W] fp64.
        nbytes: Bytes that the cache holds after the prompt, averaged over the windows.
        seconds: Time of a window, prompt and answer, averaged over them.
    """

    kl: Tensor
    top1: Tensor
    correct: Tensor
    nbytes: float
    seconds: float = 0.0

    def __str__(self) -> str:
        """Means over the windows, in one line."""
        return (
            f"{float(self.correct.mean()):.1%} answered, KL {float(self.kl.mean()):.4f} nats, same token "
            f"{float(self.top1.mean()):.1%}, {self.nbytes:,.0f} bytes"
        )


def score(
    model: nn.Module,
    windows: Sequence[Window],
    policy: Policy | str,
    *,
    share: float | None = None,
    reference: Sequence[Tensor] | None = None,
    tile: TileSize = None,
    compile: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Score:
    """Run windows through a model under a policy, each in a cache of its own.

    The prompt is compressed at its end. A question is then given at once, and the answer token by token, so that
    eviction, codecs and readers act as in generation. The first token of an answer without a question is predicted from
    the whole prompt: it counts for `correct` alone, and no policy changes it.

    Args:
        model: A causal language model without a policy attached.
        windows: The windows.
        policy: The policy or its spec.
        share: The budget as a share of the full cache's bytes, see `share_bytes`; that of the policy by default.
        reference: The result of `reference_logits` for these windows; computed if it is not given.
        tile: The most tokens of a prompt that a layer takes at a time, as for `attach`.
        compile: Whether the steps of an answer are compiled, as with `compile=True` of `attach`.
        progress: Called after each window, with how many are done and how many there are.

    Raises:
        KVPolicyError: If the policy cannot run on a window, such as with too small a budget; if predictions are NaN; or
            if there are no windows.

    Examples:
        >>> import kvpolicy
        >>> window = Window(torch.arange(3, 60), torch.arange(3, 9))
        >>> model, _ = kvpolicy.tiny()
        >>> full, few = (score(model, [window], policy) for policy in ("full", "window@0.1"))
        >>> bool(full.kl < 1e-6), bool(few.kl > full.kl), few.nbytes < full.nbytes
        (True, True, True)
    """
    check_windows(windows, reference)
    policy = Policy.of(policy)
    reference = reference_logits(model, windows, tile) if reference is None else reference
    sized = [policy if share is None else at_bytes(policy, share_bytes(model, window, share)) for window in windows]
    rows: list[tuple[float, float, float, float, float]] = []
    with eval_mode(model), torch.inference_mode(), without_warning_of_few_tokens():
        for window, each, full in zip(windows, sized, reference, strict=True):
            # A policy from a file may have other parts for another budget.
            with attach(model, each, tile=tile, compile=compile):
                start = time.perf_counter()
                logits, nbytes = _decode(model, window, compile=compile)
                found = _compare(logits, full, window)
            rows.append((*found, nbytes, time.perf_counter() - start))
            if progress is not None:
                progress(len(rows), len(windows))
    kl, top1, correct, nbytes, seconds = torch.tensor(rows, dtype=torch.float64, device="cpu").T
    if kl.isnan().any():
        raise KVPolicyError(
            f"Predictions must be finite, got NaN in window {int(kl.isnan().nonzero()[0])} under {policy}; try loading "
            "the model in bf16 or fp32."
        )
    return Score(kl, top1, correct, float(nbytes.mean()), float(seconds.mean()))


def reference_logits(
    model: nn.Module,
    windows: Sequence[Window],
    tile: TileSize = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[Tensor]:
    """The full cache's logits from the last token of each prompt on, to be shared between policies.

    Args:
        model: The model, without a policy attached.
        windows: The windows.
        tile: The most tokens of a prompt that a layer takes at a time, as for `attach`.
        progress: Called after each window, with how many are done and how many there are.

    Returns:
        One tensor a window, [1 + Q + M, V] on the CPU in the model's dtype: V may be large, so that many long answers
        take much memory.
    """
    found: list[Tensor] = []
    with eval_mode(model), torch.inference_mode():
        for window in windows:
            ids = torch.cat([window.prompt, window.follow])
            if tile is None:
                logits = _logits(model, ids, 1 + len(window.follow), use_cache=False)
            else:  # the cache of `full` takes tiles
                with attach(model, "full", tile=tile):
                    logits = _logits(model, ids, 1 + len(window.follow), use_cache=True)
            found.append(logits.cpu())
            if progress is not None:
                progress(len(found), len(windows))
    return found


def check_windows(windows: Sequence[Window], reference: Sequence[Tensor] | None = None) -> None:
    """Raise KVPolicyError if there are no windows, or the reference is of windows of other lengths."""
    if not windows:
        raise KVPolicyError("There must be windows to measure policies on, got none; try a longer text.")
    sizes = None if reference is None else [len(logits) for logits in reference]
    if sizes is not None and sizes != [1 + len(window.follow) for window in windows]:
        raise KVPolicyError(
            "The reference must be of the same windows, got one of other lengths; try reference_logits(model, windows)."
        )


def at_bytes(policy: Policy | str, nbytes: int) -> Policy:
    """The same policy with a budget in bytes.

    Raises:
        KVPolicyError: If the policy has no selector, so that nothing can be left out.

    Examples:
        >>> str(at_bytes("snapkv+kivi:bits=4@0.1", 4096))
        'snapkv+kivi:bits=4@4096B'
    """
    return Policy.of(policy).with_budget(f"{nbytes}B")


def share_bytes(model: nn.Module, window: Window, share: float) -> int:
    """The bytes that are a share of what the full cache holds of a window, answer included.

    The share is of the layers under a policy. Layers with a sliding window come on top with all that they hold, as a
    budget in bytes includes them.

    Args:
        model: The model.
        window: The window.
        share: The share, in (0, 1].

    Raises:
        KVPolicyError: If the share is out of range, or the model is not supported.
    """
    if not 0 < share <= 1:
        raise KVPolicyError(f"The share of the full cache's bytes must be in (0, 1], got {share}; try 0.1.")
    return int(share * managed_bytes(model, window)) + unmanaged_bytes(model, window)


def managed_bytes(model: nn.Module, window: Window) -> int:
    """The bytes that the full cache holds of a window, answer included, in the layers under a policy."""
    shape = _shape_of(model)
    return window.length * len(shape.evictable) * shape.token_bytes()


def unmanaged_bytes(model: nn.Module, window: Window) -> int:
    """The bytes that layers without a policy hold of a window: those with a sliding window, and states."""
    return sum(_shape_of(model).unmanaged_bytes(1, window.length).values())


def _shape_of(model: nn.Module) -> ModelShape:
    config: Any = model.config
    return describe(config, getattr(model, "dtype", None))  # pyright: ignore[reportArgumentType]


def _decode(model: nn.Module, window: Window, *, compile: bool) -> tuple[Tensor, int]:
    """Logits from the last token of the prompt on, [1 + Q + M, V], and bytes after the prompt."""
    prompt = len(window.prompt)
    check_pieces(model, prompt, prompt + len(window.follow), "What follows the prompt of a window")
    cache = PolicyCache(model, new=len(window.follow))
    parts = [_logits(model, window.prompt, 1, cache=cache)]
    nbytes = cache.nbytes
    if len(window.question):
        parts.append(_logits(model, window.question, len(window.question), cache=cache))
    forward = step_call(model, cache) if compile else model
    parts += [_logits(model, token, 1, forward=forward, cache=cache) for token in window.answer.split(1)]
    return torch.cat(parts), nbytes


def _logits(
    model: Any,
    ids: Tensor,
    count: int,
    forward: Callable[..., Any] | None = None,
    cache: PolicyCache | None = None,
    **kwargs: Any,
) -> Tensor:
    """Logits behind the last `count` of some tokens, [count, V]."""
    keeps = getattr(model, "_supports_logits_to_keep", None)
    given = {"logits_to_keep": count} if keeps is not None and keeps() else {}
    device = device_of(model)
    given |= cache_argument(model, cache)
    out = (forward or model)(input_ids=ids[None].to(device), **given, **kwargs)
    return out.logits[0, -count:]


def _compare(logits: Tensor, full: Tensor, window: Window) -> tuple[float, float, float]:
    """Divergence, agreement and whether the answer is right."""
    ours = logits[1:].double().log_softmax(-1)
    theirs = full[1:].to(logits.device).double().log_softmax(-1)
    # A token that the full cache rules out, with -inf, adds nothing.
    terms = torch.where(theirs.isneginf(), 0.0, theirs.exp() * (theirs - ours))
    same = ours.argmax(-1) == theirs.argmax(-1)
    # Row n is the prediction after n tokens behind the prompt; the last one predicts a token beyond the window.
    predicted = logits[len(window.question) : -1].argmax(-1)
    right = bool((predicted.cpu() == window.answer).all())
    return float(terms.sum(-1).mean()), float(same.double().mean()), float(right)
