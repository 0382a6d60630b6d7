"""Whether a tuned policy is better than ordinary ones, on windows that it was not tuned on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from kvpolicy.hf.tile_size import TileSize
from kvpolicy.planning.curves import Curves, load_tuned, save_curves
from kvpolicy.policy import TunedPolicy
from kvpolicy.policy.tuned import TunedFile
from kvpolicy.text.budget import Share, bytes_of, format_budget, fraction_of, least_of
from kvpolicy.text.errors import KVPolicyError
from kvpolicy.tuning.comparison import Comparison, compare, verdict_line
from kvpolicy.tuning.evidence import Score, managed_bytes, reference_logits, score, unmanaged_bytes
from kvpolicy.tuning.rivals import best_rival
from kvpolicy.tuning.verdict import MARGIN
from kvpolicy.tuning.windows import Window


def prove(
    model: nn.Module,
    file: str | Path,
    budget: Any,
    tuning: Sequence[Window],
    held_out: Sequence[Window],
    *,
    specs: Sequence[str] | None = None,
    margin: float = MARGIN,
    progress: bool = False,
    tile: TileSize = None,
) -> dict[str, Any]:
    """Compare a tuned policy with the best ordinary one of the same bytes, and note the result in its file.

    The ordinary policy is chosen on the windows that the policy was tuned on; both are scored on the others.

    Args:
        model: The model, without a policy attached.
        file: The file that `tune` wrote.
        budget: The budget, as of a policy: a share of the full cache's bytes, tokens, or bytes.
        tuning: The windows that were tuned on.
        held_out: Others, at least two.
        specs: The ordinary policies; `rivals()` by default.
        margin: The least difference that matters, as for `compare`.
        progress: Whether to show a progress bar.
        tile: The most tokens of a prompt that a layer takes at a time, as for `attach`.

    Returns:
        What is noted: the verdict in one sentence, the ordinary policy, and both scores.

    Raises:
        KVPolicyError: If neither runs at the budget, or there are fewer than two windows.
    """
    check_held_out(held_out)
    curves = load_tuned(str(file))
    if not isinstance(curves, Curves):
        raise KVPolicyError(f"The file {str(file)!r} must hold curves, got layers; try kvpolicy tune.")
    policy = TunedPolicy(TunedFile(file=str(file)), budget)
    share = as_share(model, tuning, policy.budget)
    rival = best_rival(model, tuning, share, specs=specs, progress=progress, tile=tile)
    reference = reference_logits(model, held_out, tile)
    ours = score(model, held_out, policy, reference=reference, tile=tile)
    theirs = score(model, held_out, rival.spec, share=share, reference=reference, tile=tile)
    comparison = compare(ours, theirs, margin=margin)
    found = {
        "verdict": verdict_line(comparison, other=rival.spec),
        "better": comparison.verdict,
        "rival": rival.spec,
        "rivals": sum(each.score is not None for each in rival.table),
        "windows": len(held_out),
        "margin": margin,
        "tuned": _means(ours),
        "ordinary": _means(theirs),
        "differences": _differences(comparison),
    }
    evidence = {**(curves.evidence or {}), format_budget(policy.budget): found}
    save_curves(file, curves._replace(evidence=evidence))
    return found


def check_held_out(held_out: Sequence[Window]) -> None:
    """Refuse fewer windows than a comparison needs, before anything is measured.

    Raises:
        KVPolicyError: If there are fewer than two.
    """
    if len(held_out) < 2:
        raise KVPolicyError(
            f"The texts that are held out must be at least two to compare policies on, got {len(held_out)}; try a "
            "larger --held-out, more texts, or --no-evidence."
        )


def as_share(model: nn.Module, windows: Sequence[Window], budget: Any) -> float:
    """A budget as a share of what the full cache of the mean window holds in the layers under a policy.

    Raises:
        KVPolicyError: If a budget in bytes does not exceed what the other layers hold, which count in it.
    """
    if isinstance(budget, float):
        return budget
    length = sum(window.length for window in windows) / len(windows)
    if isinstance(budget, int | Share):
        return min(max(least_of(budget) / length, fraction_of(budget) or 0.0), 1.0)
    full = sum(managed_bytes(model, window) for window in windows) / len(windows)
    others = sum(unmanaged_bytes(model, window) for window in windows) / len(windows)
    left = bytes_of(budget) - others
    if left <= 0:
        raise KVPolicyError(
            f"The budget must exceed the {others:.0f} bytes that layers without a policy hold of a text, got {budget}; "
            "try a fraction."
        )
    return min(left / full, 1.0)


def _means(found: Score) -> dict[str, float]:
    means = {name: float(getattr(found, name).mean()) for name in ("kl", "top1", "correct")}
    return means | {"nbytes": found.nbytes}


def _differences(comparison: Comparison) -> dict[str, list[float]]:
    return {name: list(getattr(comparison, name)) for name in ("kl", "top1", "correct")}
