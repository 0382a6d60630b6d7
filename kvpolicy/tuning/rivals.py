"""Ordinary policies at the same bytes, which a policy found by tuning has to beat."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor, nn
from tqdm.auto import tqdm

from kvpolicy.hf.tile_size import TileSize
from kvpolicy.policy import Policy
from kvpolicy.text.errors import KVPolicyError
from kvpolicy.tuning.evidence import Score, check_windows, reference_logits, score, share_bytes
from kvpolicy.tuning.ordinary import rivals
from kvpolicy.tuning.windows import Window

FIRST_ROUND = 4
"""One in so many windows is used to find the finalists, if that leaves at least four."""

FINALISTS = 8
"""Policies that are scored on all windows."""


class Rival(NamedTuple):
    """An ordinary policy at a budget.

    Attributes:
        spec: The policy without its budget.
        score: How it did; None if it cannot run.
        reason: Why it cannot; empty if it can.
    """

    spec: str
    score: Score | None
    reason: str = ""


class BestRival(NamedTuple):
    """The best of some policies.

    Attributes:
        spec: The policy without its budget.
        score: How it did.
        table: All policies, the best first, and those that cannot run last; scores of those that were left out early
            are of a part of the windows.
    """

    spec: str
    score: Score
    table: tuple[Rival, ...]


def best_rival(
    model: nn.Module,
    windows: Sequence[Window],
    share: float,
    *,
    specs: Sequence[str] | None = None,
    reference: Sequence[Tensor] | None = None,
    progress: bool = False,
    tile: TileSize = None,
) -> BestRival:
    """Score policies at the same bytes; the best has the most correct answers, then the lowest divergence.

    With many windows, all policies are scored on a part of them, and the best ones on all (successive halving).

    Args:
        model: A causal language model without a policy attached.
        windows: The windows.
        share: Bytes of each window's cache, as a share of the full cache's; see `share_bytes`.
        specs: The policies; `rivals()` by default. A budget that they have is not used.
        reference: The result of `reference_logits` for these windows; computed if it is not given.
        progress: Whether to show a progress bar.
        tile: The most tokens of a prompt that a layer takes at a time, as for `attach`.

    Returns:
        The best one and all. A policy that cannot run on some window, such as one whose smallest cache takes more
        bytes, is in the table with the reason.

    Raises:
        KVPolicyError: If no policy can run, a spec is not valid, or the share is out of range.
    """
    # What is wrong with any policy is the caller's mistake, and no reason to leave out all of them.
    check_windows(windows, reference)
    share_bytes(model, windows[0], share)
    reference = reference_logits(model, windows, tile) if reference is None else reference
    specs = rivals() if specs is None else specs
    for spec in specs:
        Policy.parse(spec)

    def scored(some: Sequence[str], step: int, what: str) -> list[Rival]:
        found: list[Rival] = []
        few, full = (windows, reference) if step == 1 else (windows[::step], reference[::step])
        for spec in tqdm(some, desc=what, disable=not progress):
            try:
                found.append(Rival(spec, score(model, few, spec, share=share, reference=full, tile=tile)))
            except KVPolicyError as error:
                found.append(Rival(spec, None, str(error)))
        return sorted(found, key=_rank)  # stable: of equal ones the first given is the best

    table: list[Rival] = []
    step = min(FIRST_ROUND, len(windows) // 4)
    if step > 1 and len(specs) > FINALISTS:
        table = scored(specs, step, "ordinary policies")
        specs = [rival.spec for rival in table[:FINALISTS]]
    table = scored(specs, 1, "the best of them") + table[FINALISTS:]
    table.sort(key=lambda rival: rival.score is None)
    if not table or table[0].score is None:
        why = table[0].reason if table else "none was given"
        raise KVPolicyError(f"At least one policy must run at {share:.1%} of the full cache's bytes, got none: {why}")
    return BestRival(table[0].spec, table[0].score, tuple(table))


def estimate_rivals(
    model: nn.Module,
    windows: Sequence[Window],
    held_out: int,
    specs: Sequence[str] | None = None,
    tile: TileSize = None,
) -> float:
    """Seconds that `best_rival`, and two scores of the windows that are held out, will take, from those of one window.

    Args:
        model: A causal language model without a policy attached.
        windows: The windows of `best_rival`.
        held_out: Other windows, on which the best one and a tuned policy are scored.
        specs: See `best_rival`.
        tile: See `best_rival`.
    """
    specs = rivals() if specs is None else specs
    start = time.perf_counter()
    full = reference_logits(model, windows[:1], tile)
    once = time.perf_counter() - start
    # A replay is a prefill more, and the time of other policies differs little beside that of the model.
    seconds: dict[bool, float] = {}
    replayed = [Policy.parse(spec).replay is not None for spec in specs]
    for spec, replays in zip(specs, replayed, strict=True):
        try:
            if replays not in seconds:
                seconds[replays] = score(model, windows[:1], spec, share=0.5, reference=full, tile=tile).seconds
        except KVPolicyError:
            continue  # it cannot run, which takes no time
    if not seconds:
        return 0.0
    mean = sum(seconds.get(replays, 0.0) for replays in replayed) / len(replayed)
    step = min(FIRST_ROUND, len(windows) // 4)
    scored = len(specs) * len(windows)
    if step > 1 and len(specs) > FINALISTS:
        scored = len(specs) * -(-len(windows) // step) + FINALISTS * len(windows)
    return (scored + 2 * held_out) * mean + (len(windows) + held_out) * once


def _rank(rival: Rival) -> tuple[bool, float, float]:
    if rival.score is None:
        return True, 0.0, 0.0
    return False, -float(rival.score.correct.mean()), float(rival.score.kl.mean())
