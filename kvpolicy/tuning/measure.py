"""How much a policy in one layer disturbs a model on the user's text: measured, layer by layer.

Each window is a prompt, at the end of which a layer is compressed, and an answer, whose attention to the compressed
layer is compared with the exact one.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kvpolicy.calibration.corpus import as_window
from kvpolicy.hf.cache import PolicyCache
from kvpolicy.hf.text_angles import check_pieces
from kvpolicy.hf.tile_size import TileSize
from kvpolicy.policy import Policy
from kvpolicy.statistics.windows import Past
from kvpolicy.text.errors import KVPolicyError
from kvpolicy.text.validation import check_size
from kvpolicy.tuning.answers import Answer, Changes, disturbed, over
from kvpolicy.tuning.candidates import check_candidates
from kvpolicy.tuning.compression import Compressor, LayerPrompt, prompt_of, whole
from kvpolicy.tuning.tap import LayerCall, Tap, tapped
from kvpolicy.tuning.windows import Window

NOISE = 0.1
"""Norm of the noise of `sensitivities`, relative to that of the attention output."""

DRAWS = 8
"""How often it is drawn: what one draw does to a short answer differs by a factor of several from another."""

Progress = Callable[[int, int], None]
"""Called with how many windows are measured, and how many there are."""


def output_errors(
    model: nn.Module,
    windows: Sequence[Window],
    candidates: Sequence[Policy | str],
    *,
    progress: Progress | None = None,
    tile: TileSize = None,
) -> Tensor:
    """Measure the error that each candidate makes in the attention output of each layer.

    The model runs once on each window, with a full cache. In each layer the prompt is compressed under each candidate,
    and the answer attends to what is kept and, causally, to itself. The squared distance of its attention output to the
    exact one is divided by the squared norm of the exact one; both are summed over heads, tokens and channels.

    Args:
        model: A causal language model without a policy attached.
        windows: Texts, each with at least one token of prompt and answer.
        candidates: Policies or their specs: the allocator `uniform`, with or without head budgets, and a fraction of
            the prompt as budget.
        progress: Called after each window.
        tile: The most tokens of a prompt that a layer takes at a time, as for `attach`.

    Returns:
        The relative squared errors of windows, layers under a policy, and candidates, [W, L, C] fp64 on the CPU; NaN
        where a candidate's budget is too small for a prompt.

    Raises:
        KVPolicyError: If the model, a window or a candidate cannot be measured.
        KVPolicyTypeError: If a window has no token ids, or a candidate is no policy.

    Examples:
        >>> import kvpolicy
        >>> window = Window(torch.arange(3, 53), torch.arange(60, 65))
        >>> errors = output_errors(kvpolicy.tiny()[0], [window], ["window@0.2", "kivi:bits=4"])
        >>> errors.shape, bool((errors > 0).all())
        (torch.Size([1, 8, 2]), True)
    """
    return _of_windows(model, windows, candidates, _window_errors, progress, tile)


def layer_kls(
    model: nn.Module,
    windows: Sequence[Window],
    candidates: Sequence[Policy | str],
    *,
    progress: Progress | None = None,
    tile: TileSize = None,
) -> Tensor:
    """Measure what each candidate in one layer alone, with all others full, does to the predictions of an answer.

    The prompt is run once, and the answer once for each layer and candidate. Queries, keys and values of the prompt are
    held for all layers meanwhile: with `tile` in the memory of the host, from where a layer's are copied when needed.

    Args:
        model: A causal language model without a policy attached.
        windows: See `output_errors`.
        candidates: See `output_errors`.
        progress: Called after each window.
        tile: The most tokens of a prompt that a layer takes at a time, as for `attach`.

    Returns:
        KL(full || compressed) in nats, mean over the predictions of all answer tokens but the first (if there is one
        token alone, the prediction that it makes), [W, L, C] fp64 on the CPU; NaN where a candidate's budget is too
        small for a prompt.

    Raises:
        KVPolicyError: If the model, a window or a candidate cannot be measured.
        KVPolicyTypeError: If a window has no token ids, or a candidate is no policy.

    Examples:
        >>> import kvpolicy
        >>> window = Window(torch.arange(3, 53), torch.arange(60, 65))
        >>> layer_kls(kvpolicy.tiny()[0], [window], ["window@0.2", "full"]).shape
        torch.Size([1, 8, 2])
    """
    return _of_windows(model, windows, candidates, functools.partial(_window_kls, together=False), progress, tile)


def joint_kls(
    model: nn.Module,
    windows: Sequence[Window],
    candidates: Sequence[Policy | str],
    *,
    progress: Progress | None = None,
    tile: TileSize = None,
) -> Tensor:
    """Measure what each candidate in all layers at once does to the predictions of an answer.

    Args:
        model: A causal language model without a policy attached.
        windows: See `output_errors`.
        candidates: See `output_errors`.
        progress: Called after each window.
        tile: The most tokens of a prompt that a layer takes at a time, as for `attach`.

    Returns:
        The KL divergence as of `layer_kls`, [W, C] fp64 on the CPU.

    Raises:
        KVPolicyError: If the model, a window or a candidate cannot be measured.
        KVPolicyTypeError: If a window has no token ids, or a candidate is no policy.

    Examples:
        >>> import kvpolicy
        >>> window = Window(torch.arange(3, 53), torch.arange(60, 65))
        >>> joint_kls(kvpolicy.tiny()[0], [window], ["window@0.2", "full"]).shape
        torch.Size([1, 2])
    """
    measure = functools.partial(_window_kls, alone=False)
    return _of_windows(model, windows, candidates, measure, progress, tile)[:, 0]


def kls(
    model: nn.Module,
    windows: Sequence[Window],
    candidates: Sequence[Policy | str],
    *,
    progress: Progress | None = None,
    tile: TileSize = None,
) -> Tensor:
    """Measure both at once, so that prompts are run, and candidates compressed, once: `joint_kls` before `layer_kls`.

    Args:
        model: A causal language model without a policy attached.
        windows: See `output_errors`.
        candidates: See `output_errors`.
        progress: Called after each window.
        tile: The most tokens of a prompt that a layer takes at a time, as for `attach`.

    Returns:
        The KL divergences, of all layers at once and of each layer alone, [W, 1 + L, C] fp64 on the CPU.

    Raises:
        KVPolicyError: If the model, a window or a candidate cannot be measured.
        KVPolicyTypeError: If a window has no token ids, or a candidate is no policy.

    Examples:
        >>> import kvpolicy
        >>> window = Window(torch.arange(3, 53), torch.arange(60, 65))
        >>> kls(kvpolicy.tiny()[0], [window], ["window@0.2", "full"]).shape
        torch.Size([1, 9, 2])
    """
    return _of_windows(model, windows, candidates, _window_kls, progress, tile)


def sensitivities(
    model: nn.Module,
    windows: Sequence[Window],
    *,
    size: float = NOISE,
    draws: int = DRAWS,
    seed: int = 0,
    progress: Progress | None = None,
    tile: TileSize = None,
) -> Tensor:
    """Measure what a relative squared error of the attention output of one layer alone does to an answer's predictions.

    Noise is added to the attention output of every token of the answer and every query head, of `size` times its norm,
    and the KL divergence of the predictions is divided by `size` squared. Multiplied by a relative squared error, such
    as that of `output_errors`, it estimates the KL divergence which that would cause if it were small and had no
    preferred direction.

    Args:
        model: A causal language model without a policy attached.
        windows: See `output_errors`.
        size: Norm of the noise, relative to that of the output.
        draws: How often noise is drawn for each window and layer; the result is the mean.
        seed: Seed of the noise, which is another one for each window, layer and draw.
        progress: Called after each window.
        tile: The most tokens of a prompt that a layer takes at a time, as for `attach`.

    Returns:
        KL(full || disturbed) / size^2 in nats, mean over the predictions that `layer_kls` compares, [W, L] fp64 on the
        CPU.

    Raises:
        KVPolicyError: If the model or a window cannot be measured, or `size` is not above 0.
        KVPolicyTypeError: If a window has no token ids.

    Examples:
        >>> import kvpolicy
        >>> window = Window(torch.arange(3, 53), torch.arange(60, 65))
        >>> sensitivities(kvpolicy.tiny()[0], [window]).shape
        torch.Size([1, 8])
    """
    windows = _checked(windows)
    draws = check_size("draws", draws, 1)
    if not 0 < size < math.inf:
        raise KVPolicyError(f"The size of the noise must be a number above 0, got {size}; try {NOISE}.")
    with tapped(model, tile) as tap:
        found = torch.zeros(len(windows), len(tap.layers), dtype=torch.float64, device="cpu")
        for row, window in _counted(windows, progress):
            prompts, cache = _prompts(tap, window)
            full = _full(prompts)
            noisy = (
                (column, {layer: disturbed(past, size, _generator(seed, row, layer, draw))})
                for column, (layer, past) in enumerate(full.items())
                for draw in range(draws)
            )
            for column, kl in Answer(model, cache, full, window.answer).kls(noisy):
                found[row, column] += kl / (size**2 * draws)
    return found


def _of_windows(
    model: nn.Module,
    windows: Sequence[Window],
    candidates: Sequence[Policy | str],
    measure: Callable[[Tap, Compressor, Window], Tensor],
    progress: Progress | None,
    tile: TileSize,
) -> Tensor:
    """The results of a measure in all windows, stacked."""
    windows = _checked(windows)
    with tapped(model, tile) as tap:
        compressor = Compressor(tap, check_candidates(candidates, tap.attachment.info))
        return torch.stack([measure(tap, compressor, window) for _, window in _counted(windows, progress)])


def _window_errors(tap: Tap, compressor: Compressor, window: Window) -> Tensor:
    """See `output_errors`, [L, C]."""
    facts = compressor.facts(window)
    length = len(window.prompt)
    found = torch.full((len(tap.layers), len(compressor.policies)), math.nan, dtype=torch.float64, device="cpu")

    def look(call: LayerCall) -> None:
        prompt = prompt_of(call, length)
        answer = (call.queries[:, :, length:], call.keys[:, :, length:], call.values[:, :, length:])
        exact = over(whole(prompt.keys, prompt.values))(*answer, call.transform)
        errors = found[tap.layers.index(call.layer_idx)]
        for number, past in compressor.compress(prompt, facts):
            errors[number] = _relative_error(over(past)(*answer, call.transform), exact)

    tap.run(torch.cat([window.prompt, window.answer]), length, look, compressor.pins)
    return found


def _window_kls(
    tap: Tap, compressor: Compressor, window: Window, *, together: bool = True, alone: bool = True
) -> Tensor:
    """The divergences of all layers `together`, then those of each layer `alone`, [1 + L, C], [1, C] or [L, C]."""
    facts = compressor.facts(window)
    prompts, cache = _prompts(tap, window, compressor.pins)
    seen: list[dict[Any, Any]] = [{} for _ in prompts]  # what one candidate had to see of a layer serves others
    rows = together + alone * len(prompts)
    found = torch.full((rows, len(compressor.policies)), math.nan, dtype=torch.float64, device="cpu")

    def kept(past: Past) -> Past:
        for known in seen if tap.store else ():  # of one layer at a time
            known.clear()
        return past.to(tap.store)

    # A generator: `Answer.kls` takes a few changes at a time, so that few compressed layers are alive at once.
    def changes() -> Iterator[tuple[tuple[int, int], Changes]]:
        for number, tokens in enumerate(facts.tokens):
            if tokens is None:
                continue
            # The joint row and the row of a layer share its function, since `AnswerCache` batches rows that do.
            everywhere = {
                prompt.layer_idx: over(kept(compressor.past(prompt, facts, number, known)))
                for prompt, known in zip(prompts, seen, strict=True)
            }
            if together:
                yield (0, number), everywhere
            for row, (layer, attention) in enumerate(everywhere.items() if alone else (), int(together)):
                yield (row, number), {layer: attention}

    for at, kl in Answer(tap.model, cache, _full(prompts), window.answer).kls(changes()):
        found[at] = kl
    return found


def _prompts(tap: Tap, window: Window, pins: Collection[int] = ()) -> tuple[list[LayerPrompt], PolicyCache]:
    """The prompt of a window in each layer under a policy, and a cache that has seen it."""
    prompts: list[LayerPrompt] = []
    length = len(window.prompt)
    check_pieces(tap.model, length, length + len(window.answer), "What follows the prompt of a window")
    cache = tap.run(window.prompt, length, lambda call: prompts.append(prompt_of(call, length).to(tap.store)), pins)
    return prompts, cache


def _full(prompts: Sequence[LayerPrompt]) -> dict[int, Past]:
    """All of a prompt in each layer."""
    return {prompt.layer_idx: whole(prompt.keys, prompt.values) for prompt in prompts}


def _generator(seed: int, *numbers: int) -> torch.Generator:
    """Noise with numbers of its own, whatever else is drawn."""
    for number in numbers:
        seed = (seed * 1_000_003 + number) % 2**63
    return torch.Generator().manual_seed(seed)


def _relative_error(out: Tensor, exact: Tensor) -> float:
    """Squared distance over squared norm."""
    norm = exact.double().square().sum()
    return float((out.double() - exact.double()).square().sum() / norm.clamp_min(torch.finfo(torch.float64).tiny))


def _checked(windows: Sequence[Window]) -> list[Window]:
    """The windows as token ids, [N] and [M] int64 on the CPU."""
    # A question behind the prompt is a part of what follows it.
    checked = [Window(*map(as_window, (window.prompt, window.follow))) for window in windows]
    if not checked or any(not len(part) for window in checked for part in (window.prompt, window.answer)):
        raise KVPolicyError(
            "The windows must be at least one, each with a token of prompt and of answer, got "
            + ("an empty part" if checked else "none")
            + "; try kvpolicy.tuning.windows.Window(prompt, answer)."
        )
    return checked


def _counted(windows: Sequence[Window], progress: Progress | None) -> Iterator[tuple[int, Window]]:
    """The windows with their numbers; `progress` is told after each."""
    for row, window in enumerate(windows):
        yield row, window
        if progress is not None:
            progress(row + 1, len(windows))
