"""KVCrush: a few tokens of different kinds stand in for all that the base would drop."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from ..coding import Config
from ..exact import Number, exact, floor_share
from ._common import top

DEFAULTS: Config = {
    "base": {"name": "snapkv"},
    "split": 0.25,
    "anchor": "random",
    "seed": 0,
    "quantile": 0.5,
    "pick": "first",
    "buckets": "rank",
    "page": 0,
}
SMALL = "kvcrush/snapkv:window=6:kernel=3"


class Candidate(NamedTuple):
    """A token, or a page, that the base would drop.

    Attributes:
        distance: Hamming distance to the anchor.
        position: Its position, or the page's number.
        priority: What the base thinks of it.
    """

    distance: int
    position: int
    priority: float


def representatives(config: Config, budget: int) -> int:
    """How many tokens of the budget stand in for others."""
    return floor_share(config["split"], budget)


def smallest_share(config: Config, base: int) -> int:
    """The fewest tokens of the base, which alone needs `base`: a page of the newest token, and some of the rest."""
    page = config["page"]
    return page + math.ceil((base - 1) / page) * page if page else base


def bits(scores: list[float], quantile: Number) -> list[int]:
    """One query head's bits: 1 for its highest tokens, ties to the earlier one."""
    ones = math.floor(len(scores) * (1 - exact(quantile)))
    best = set(top(scores, ones))
    return [int(j in best) for j in range(len(scores))]


def anchor(kind: str, head_bits: list[list[int]], seed: int, layer_idx: int) -> list[int]:
    """One bit per query head."""
    heads = len(head_bits)
    if kind == "mean":
        return [int(2 * sum(row) > len(row)) for row in head_bits]
    if kind == "random":
        generator = torch.Generator().manual_seed(seed * 1000003 + layer_idx)
        return torch.randint(0, 2, (heads,), generator=generator).tolist()
    return {"zeros": [0] * heads, "ones": [1] * heads, "alternate": [h % 2 for h in range(heads)]}[kind]


def distances(head_bits: list[dict[int, int]], anchor_bits: list[int]) -> dict[int, int]:
    """How many heads disagree with the anchor about each position; a head that no longer holds it has bit 0."""
    every = sorted({position for row in head_bits for position in row})
    return {p: sum(row.get(p, 0) != bit for row, bit in zip(head_bits, anchor_bits, strict=True)) for p in every}


def scramble(position: int, seed: int) -> int:
    """The hash that stands for chance, 32 bits."""
    x = (position * 2654435761 + seed * 40503 + 12345) & 0xFFFFFFFF
    x ^= x >> 16
    x = (x * 2246822519) & 0xFFFFFFFF
    return x ^ (x >> 13)


def _ordered(members: list[Candidate], pick: str, seed: int) -> list[Candidate]:
    """Members of a bucket, the one to pick first; `members` come in the order that breaks ties."""
    if pick == "best":
        return sorted(members, key=lambda c: -c.priority)
    if pick == "random":
        return sorted(members, key=lambda c: scramble(c.position, seed))
    return members


def quotas(counts: list[int], k: int) -> list[int]:
    """Share `k` among buckets by size: largest remainder, ties to the earlier bucket, never above its size."""
    n = sum(counts)
    given = [k * count // n for count in counts]
    order = sorted(range(len(counts)), key=lambda i: (-(k * counts[i] % n), i))
    for i in [i for i in order if given[i] < counts[i]][: k - sum(given)]:
        given[i] += 1
    return given


def pick_candidates(candidates: list[Candidate], k: int, *, buckets: str, pick: str, seed: int) -> list[int]:
    """Positions (or page numbers) of the `k` candidates that stand in for the rest, ascending."""
    ranked = sorted(candidates, key=lambda c: (c.distance, c.position))
    n = len(ranked)
    k = min(k, n)
    if k <= 0:
        return []
    if buckets == "rank":
        groups = [ranked[i * n // k : (i + 1) * n // k] for i in range(k)]
        return sorted(_ordered(group, pick, seed)[0].position for group in groups)
    values = sorted({c.distance for c in ranked})
    groups = [[c for c in ranked if c.distance == value] for value in values]
    chosen: list[Candidate] = []
    for group, quota in zip(groups, quotas([len(g) for g in groups], k), strict=True):
        chosen += _ordered(group, pick, seed)[:quota]
    return sorted(c.position for c in chosen)


def keep_tokens(
    config: Config, positions: list[int], priorities: list[float], apart: dict[int, int], budget: int
) -> tuple[list[int], list[int]]:
    """Positions that the base keeps, and positions of the representatives.

    Args:
        config: A complete kvcrush configuration.
        positions: Of the tokens on offer, ascending.
        priorities: The base's, with the base's budget.
        apart: Distance of each position to the anchor.
        budget: Tokens in all.
    """
    if len(positions) <= budget:
        return positions, []
    r = representatives(config, budget)
    if config["page"] > 0:
        return _keep_pages(config, positions, priorities, apart, budget, r)
    strong = set(top(priorities, budget - r))
    rest = [Candidate(apart[p], p, priorities[j]) for j, p in enumerate(positions) if j not in strong]
    chosen = pick_candidates(rest, r, buckets=config["buckets"], pick=config["pick"], seed=config["seed"])
    return [positions[j] for j in sorted(strong)], chosen


def _keep_pages(
    config: Config, positions: list[int], priorities: list[float], apart: dict[int, int], budget: int, r: int
) -> tuple[list[int], list[int]]:
    """`keep_tokens` in units of a page of consecutive positions."""
    size = config["page"]
    pages: dict[int, list[int]] = {}
    for j, position in enumerate(positions):
        pages.setdefault(position // size, []).append(j)
    value = {p: sum(priorities[j] for j in members) for p, members in pages.items()}  # inf + anything = inf
    strong: list[int] = []
    used = 0
    for p in sorted(pages, key=lambda p: (p != max(pages), -value[p], p)):
        if used + len(pages[p]) > budget - r:
            break
        strong.append(p)
        used += len(pages[p])
    rest = [
        Candidate(sum(apart[positions[j]] for j in pages[p]), p, value[p]) for p in sorted(pages) if p not in strong
    ]
    chosen = pick_candidates(rest, r // size, buckets=config["buckets"], pick=config["pick"], seed=config["seed"])
    return (
        sorted(positions[j] for p in strong for j in pages[p]),
        sorted(positions[j] for p in chosen for j in pages[p]),
    )
