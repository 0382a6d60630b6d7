"""The policy of each layer for a budget, from curves of distortion.

One option is chosen for each layer, so that the bytes fit the budget and the distortions are small: a multiple-choice
knapsack.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvpolicy.planning.curves import Curves, Layers, load_tuned
from kvpolicy.planning.memory import plan_layers
from kvpolicy.planning.planner import tokens_of_share
from kvpolicy.policy import LayeredPolicy, Policy, TunedPolicy
from kvpolicy.protocols import LayerShape, ModelInfo
from kvpolicy.text.budget import EPSILON, Share, bytes_of
from kvpolicy.text.errors import KVPolicyError
from kvpolicy.text.model_file import version_of
from kvpolicy.text.model_identity import check_same_model

UNITS = 4096
"""Parts of the limit in which costs are counted by dynamic programming."""


class Option(NamedTuple):
    """An option for one item.

    Attributes:
        cost: Its cost, counted against the limit, at least 0.
        loss: Its contribution to the sum that is minimized.
    """

    cost: int
    loss: float


def choose(items: Sequence[Sequence[Option]], limit: int) -> list[int] | None:
    """Choose one option for each item.

    Two ways, of which the better one counts: by the lower convex hulls, and by dynamic programming over `UNITS` parts
    of the limit. Both then exchange single options while that saves something.

    Args:
        items: The options of each item.
        limit: The most that the chosen options may cost together.

    Returns:
        The index of the chosen option of each item; None if even the cheapest ones cost more than the limit.

    Examples:
        >>> items = [[Option(1, 4.0), Option(3, 1.0)], [Option(1, 9.0), Option(2, 2.0), Option(4, 0.0)]]
        >>> choose(items, 5), choose(items, 3), choose(items, 1)
        ([1, 1], [0, 1], None)
    """
    if not items:
        return []
    first = _by_hulls(items, limit)
    if first is None:
        return None
    found = [_fill(items, chosen, limit) for chosen in (first, _by_units(items, limit)) if chosen is not None]
    return min(found, key=lambda chosen: _total(items, chosen).loss)


def _total(items: Sequence[Sequence[Option]], chosen: Sequence[int]) -> Option:
    options = [item[index] for item, index in zip(items, chosen, strict=True)]
    return Option(sum(option.cost for option in options), sum(option.loss for option in options))


def _by_units(items: Sequence[Sequence[Option]], limit: int) -> list[int] | None:
    """The optimum for costs that are rounded up to parts of the limit; None if nothing fits then."""
    unit = max(-(-limit // UNITS), 1)
    size = limit // unit + 1
    least = torch.zeros(size, dtype=torch.float64, device="cpu")
    picks: list[Tensor] = []
    for options in items:
        after = torch.full_like(least, torch.inf)
        pick = torch.zeros(size, dtype=torch.int64, device="cpu")
        for index, option in enumerate(options):
            cost = -(-option.cost // unit)
            if cost >= size:
                continue
            losses = least[: size - cost] + option.loss
            better = losses < after[cost:]
            after[cost:][better] = losses[better]
            pick[cost:][better] = index
        picks.append(pick)
        least = after
    at = size - 1
    if not bool(least[at].isfinite()):
        return None
    chosen: list[int] = []
    for options, pick in zip(reversed(items), reversed(picks), strict=True):
        chosen.append(int(pick[at]))
        at -= -(-options[chosen[-1]].cost // unit)
    return chosen[::-1]


def _by_hulls(items: Sequence[Sequence[Option]], limit: int) -> list[int] | None:
    """The steps of all lower convex hulls in the order of the loss that a unit of cost saves.

    Up to the first step that does not fit, that is the optimum of the Lagrangian relaxation.
    """
    hulls = [_hull(options) for options in items]
    chosen = [hull[0] for hull in hulls]
    left = limit - _total(items, chosen).cost
    if left < 0:
        return None
    steps: list[tuple[float, int, int]] = []
    for number, (options, hull) in enumerate(zip(items, hulls, strict=True)):
        for at in range(1, len(hull)):
            steps.append((-_saving(options[hull[at - 1]], options[hull[at]]), number, at))
    closed: set[int] = set()
    # Savings fall along a hull, so that sorting keeps the steps of an item in order; ties go to the earlier item.
    for _, number, at in sorted(steps):
        cost = items[number][hulls[number][at]].cost - items[number][chosen[number]].cost
        # A step that does not fit closes its item: the savings of later steps are counted from where this one ends.
        if number in closed or cost > left:
            closed.add(number)
            continue
        left -= cost
        chosen[number] = hulls[number][at]
    return chosen


def _hull(options: Sequence[Option]) -> list[int]:
    """The options on the lower convex hull from the cheapest to the one of least loss, by their cost."""
    order = sorted(range(len(options)), key=lambda index: (options[index].cost, options[index].loss, index))
    hull: list[int] = []
    for index in order:
        if hull and options[index].loss >= options[hull[-1]].loss:
            continue  # costs no less, and saves nothing
        while len(hull) > 1 and _saving(options[hull[-2]], options[hull[-1]]) <= _saving(
            options[hull[-1]], options[index]
        ):
            hull.pop()
        hull.append(index)
    return hull


def _saving(cheap: Option, dear: Option) -> float:
    """The loss that each further unit of cost saves."""
    return (cheap.loss - dear.loss) / (dear.cost - cheap.cost) if dear.cost > cheap.cost else float("inf")


def _fill(items: Sequence[Sequence[Option]], chosen: Sequence[int], limit: int) -> list[int]:
    """Exchange one option after another while one fits that saves something, the best first."""
    chosen = list(chosen)
    left = limit - _total(items, chosen).cost
    while True:
        best: tuple[float, int, int] | None = None
        for number, options in enumerate(items):
            now = options[chosen[number]]
            for index, option in enumerate(options):
                saved = now.loss - option.loss
                if option.cost - now.cost <= left and saved > 0 and (best is None or saved > best[0]):
                    best = saved, number, index
        if best is None:
            return chosen
        _, number, index = best
        left -= items[number][index].cost - items[number][chosen[number]].cost
        chosen[number] = index


STEPS = 8
"""Sizes that are tried between two measured ones, where a distortion is interpolated."""


class LayerOption(NamedTuple):
    """A policy that a layer may have.

    Attributes:
        policy: With the fraction of the prompt that it keeps as its budget.
        nbytes: Bytes that the layer then holds.
        loss: The distortion.
    """

    policy: Policy
    nbytes: int
    loss: float


class Reason(NamedTuple):
    """Why a layer holds what it does.

    Attributes:
        loss: The distortion of its choice.
        half: The least distortion of any choice of half of its bytes or less; None if there is none.
        double: The least distortion of any choice of twice its bytes or less.
    """

    loss: float
    half: float | None
    double: float


def resolve(
    policy: Policy, model: ModelInfo, shape: LayerShape, whole: LayerShape, unmanaged_nbytes: Callable[[int], int]
) -> Policy:
    """Resolve a policy that is made from a file into those of its layers; return other policies unchanged.

    Args:
        policy: The policy.
        model: The model.
        shape: Shape of a layer on one rank, the one that holds the most.
        whole: The same on all ranks together, so that every rank makes the same policy.
        unmanaged_nbytes: Bytes of the layers that are not under the policy, by the length of a text.

    Raises:
        KVPolicyError: If the file cannot be read, is of another model, or has no policy for the budget.
    """
    if not isinstance(policy, TunedPolicy):
        return policy
    what = f"The file {policy.source.file!r} of a tuned policy"
    found = load_tuned(policy.source.file)
    if isinstance(found, Layers):
        if policy.source.length != "auto":
            raise KVPolicyError(
                f"length must be given only for curves, got length={policy.source.length} for the layers of "
                f"{policy.source.file!r}, which are the same at any length; try without it."
            )
        return LayeredPolicy(found.policies, policy.budget, spec=str(policy))
    remedy = "try kvpolicy tune on this model"
    check_same_model(found.model, what, model, remedy=remedy)
    if found.layers != model.indices or found.depth != model.depth:
        raise KVPolicyError(f"{what} must be of the layers {list(model.indices)}, got {list(found.layers)}; {remedy}.")
    prompt, new = lengths(found, policy)
    limit = managed_limit(found, policy, shape, unmanaged_nbytes)
    if limit is not None:  # of one rank; each holds the same share
        limit = limit * whole.heads // shape.heads
    layers = _solved(version_of(policy.source.file), policy.source.file, whole, prompt, new, limit)
    every = dict(zip(found.layers, layers, strict=True))
    # A layer that is not under the policy has one that is not used.
    return LayeredPolicy([every.get(index, layers[0]) for index in range(found.depth)], policy.budget, spec=str(policy))


def managed_limit(
    curves: Curves, policy: TunedPolicy, shape: LayerShape, unmanaged_nbytes: Callable[[int], int]
) -> int | None:
    """Bytes that the layers under a policy may hold of a text of its lengths; None if they need evict nothing.

    Args:
        curves: The curves of its file.
        policy: The policy.
        shape: Shape of a layer.
        unmanaged_nbytes: See `resolve`.
    """
    length = sum(lengths(curves, policy))
    limit = byte_limit(policy, shape, len(curves.layers), length)
    return max((limit or 0) - unmanaged_nbytes(length), 0) if isinstance(policy.budget, str) else limit


def lengths(curves: Curves, policy: TunedPolicy) -> tuple[int, int]:
    """Tokens of a prompt and of what follows, for which a tuned policy is made."""
    prompt = max(round(curves.text["prompt"]), 1)
    new = round(curves.text["new"])
    if policy.source.length != "auto":
        new = min(new, policy.source.length - 1)
        prompt = policy.source.length - new
    return prompt, new


def byte_limit(policy: Policy, shape: LayerShape, layers: int, length: int) -> int | None:
    """Bytes that the layers under a policy may hold of a text of some length; None if they need evict nothing."""
    full = layers * shape.token_nbytes
    budget = policy.budget.of_prompt(length) if isinstance(policy.budget, Share) else policy.budget
    if isinstance(budget, str):
        return bytes_of(budget)
    if isinstance(budget, int):
        return full * budget
    return None if budget == 1.0 else int(full * length * budget + EPSILON)


def solve(curves: Curves, shape: LayerShape, prompt: int, new: int, limit: int | None) -> list[Policy]:
    """The policy of each measured layer, of least total distortion within a limit in bytes.

    Candidates that generate differently, or replay differently, cannot be mixed: each such group is solved by itself.

    Args:
        curves: The curves.
        shape: Shape of a layer.
        prompt: Tokens of a prompt.
        new: Tokens that follow.
        limit: The most bytes of all layers; None for no limit.

    Raises:
        KVPolicyError: If nothing fits.
    """
    best: tuple[float, list[Policy]] | None = None
    smallest: int | None = None
    for group in _groups(curves):
        items = [options(curves, number, group, shape, prompt, new) for number in range(len(curves.layers))]
        if not all(items):
            continue
        least = sum(min(choice.nbytes for choice in choices) for choices in items)
        smallest = least if smallest is None else min(smallest, least)
        most = sum(max(choice.nbytes for choice in choices) for choices in items)
        bounds = [[Option(choice.nbytes, choice.loss) for choice in choices] for choices in items]
        chosen = choose(bounds, most if limit is None else limit)
        if chosen is None:
            continue
        picked = [choices[index] for choices, index in zip(items, chosen, strict=True)]
        loss = sum(choice.loss for choice in picked)
        if best is None or loss < best[0]:
            best = loss, [choice.policy for choice in picked]
    if best is None:
        needed = "" if smallest is None else f", which is less than the {smallest} that these layers need at least"
        raise KVPolicyError(
            f"The budget of a tuned policy must fit a text of {prompt} and {new} tokens, got {limit} bytes{needed}; "
            "try a larger budget, or kvpolicy tune with smaller shares."
        )
    return best[1]


@functools.lru_cache(maxsize=64)
def _solved(
    _version: object, file: str, shape: LayerShape, prompt: int, new: int, limit: int | None
) -> tuple[Policy, ...]:
    """The policies of a version of a file, since every cache of a model asks for them."""
    curves = load_tuned(file)
    assert isinstance(curves, Curves), "a file of layers needs no solution"
    return tuple(solve(curves, shape, prompt, new, limit))


def reasons(curves: Curves, shape: LayerShape, prompt: int, new: int, chosen: Sequence[Policy]) -> list[Reason]:
    """The distortion of each layer's choice, and the least distortions for half and for twice its bytes.

    Args:
        curves: The curves.
        shape: Shape of a layer.
        prompt: Tokens of a prompt.
        new: Tokens that follow.
        chosen: The policy of each measured layer, as `solve` returns it.
    """
    found: list[Reason] = []
    group = next(group for group in _groups(curves) if _kind(curves.candidates[group[0]]) == _kind(chosen[0]))
    for number, policy in enumerate(chosen):
        choices = options(curves, number, group, shape, prompt, new)
        # Shares are equal to the last bit, since `solve` computed them by the same interpolation.
        own = next(choice for choice in choices if choice.policy == policy)
        half = min((choice.loss for choice in choices if choice.nbytes <= own.nbytes // 2), default=None)
        double = min(choice.loss for choice in choices if choice.nbytes <= own.nbytes * 2)
        found.append(Reason(own.loss, half, double))
    return found


def options(
    curves: Curves, number: int, group: Sequence[int], shape: LayerShape, prompt: int, new: int
) -> list[LayerOption]:
    """The choices of a layer: every measured candidate, and sizes between those of the same parts.

    Args:
        curves: The curves.
        number: Number of the layer among the measured ones.
        group: Indices of the candidates.
        shape: Shape of the layer.
        prompt: Tokens of a prompt.
        new: Tokens that follow.
    """
    families: dict[tuple[object, ...], list[tuple[float, float]]] = {}
    parts: dict[tuple[object, ...], Policy] = {}
    for index in group:
        loss = curves.distortion[number][index]
        candidate = curves.candidates[index]
        if loss is not None:
            key = candidate.allocator, candidate.selector, candidate.merger, candidate.codec, candidate.reader
            parts[key] = candidate
            assert isinstance(candidate.budget, float), "a file of curves has no other candidates"
            families.setdefault(key, []).append((candidate.budget, loss))
    found: list[LayerOption] = []
    for key, points in families.items():
        for share, loss in _interpolated(sorted(points)):
            # Layers differ only by what they read.
            like = curves.layers[number if parts[key].reads_part else 0]
            own, nbytes = _sized(parts[key], share, like, shape, prompt, new)
            if nbytes is not None:
                found.append(LayerOption(own, nbytes, loss))
    return found


def _interpolated(points: Sequence[tuple[float, float]]) -> Iterable[tuple[float, float]]:
    """Shares and losses, and some between each two that were measured, on a line over the logarithm of the share."""
    for (share, loss), (other, its) in itertools.pairwise(points):
        for step in range(STEPS):
            at = step / STEPS
            yield share * (other / share) ** at, loss + (its - loss) * at
    yield points[-1]


@functools.lru_cache(maxsize=2**15)
def _sized(
    parts: Policy, share: float, layer_idx: int, shape: LayerShape, prompt: int, new: int
) -> tuple[Policy, int | None]:
    """A policy of some share, and the bytes of a layer; None if a selector needs more of such a prompt."""
    policy = parts.with_budget(share)
    tokens = tokens_of_share(policy, prompt, new, [shape])
    if tokens is None:
        return policy, None
    return policy, plan_layers(policy, tokens, [shape], [layer_idx], 1)[0].device_nbytes


def _groups(curves: Curves) -> list[list[int]]:
    """Candidates that may stand in layers of one policy."""
    groups: dict[object, list[int]] = {}
    for index, candidate in enumerate(curves.candidates):
        groups.setdefault(_kind(candidate), []).append(index)
    return list(groups.values())


def _kind(policy: Policy) -> object:
    """The properties that all layers of a policy must share."""
    return policy.decode, policy.replay
