"""DuoAttention: streaming heads have room for sinks and recent tokens, retrieval heads for what is left.

And scores of heads without gradients: how far back the mean query attends to copies of the mean key, and how much a
head attends to copies of a random text.
"""

from __future__ import annotations

import math

from ..coding import Config
from ..exact import exact


def streams(scores: list[list[float]], sparsity: float) -> list[list[bool]]:
    """Which heads of each layer are below the quantile of all scores; an earlier head is above an equal later one."""
    places = [(layer, head) for layer, row in enumerate(scores) for head in range(len(row))]
    quantile = exact(sparsity) * (len(places) - 1)
    found = [[False] * len(row) for row in scores]
    for place in places:
        own = scores[place[0]][place[1]]
        below = 0
        for other in places:
            score = scores[other[0]][other[1]]
            below += score < own or (score == own and other > place)
        found[place[0]][place[1]] = below < quantile or sparsity == 1
    return found


def pages(config: Config, protected: int, pages: int, size: int, most: int) -> list[int]:
    """Pages of each head of the layer `config["layer"]`, dealt one by one."""
    streaming = streams(config["scores"], config["sparsity"])[config["layer"]]
    heads = range(len(streaming))
    held = [0 for _ in heads]
    room = max(config["sinks"] + config["recent"], protected)

    def deal(among: list[int], limit: int) -> None:
        """A page to the head with the fewest, the first of equal ones, until all have as many as they may."""
        while sum(held) < pages:
            able = [head for head in among if held[head] < limit]
            if not able:
                return
            held[min(able, key=lambda head: (held[head], head))] += 1

    deal([head for head in heads if streaming[head]], min(math.ceil(room / size), pages // len(held), most))
    deal([head for head in heads if not streaming[head]], most)
    deal([head for head in heads if streaming[head]], most)
    deal([*heads], pages)
    return held


def reach(
    queries: list[list[float]], keys: list[list[float]], theta: float, positions: int, scale: float, cap: float | None
) -> float:
    """The mean of the cumulated attention of the mean query, at the last position, over the mean key at all of them.

    Args:
        queries: Of each token, before the rotary embedding.
        keys: Likewise.
        theta: Base of the embedding, which turns channel i together with channel i + D / 2.
        positions: How many positions there are.
        scale: Factor of the products.
        cap: Cap of the products, or None.
    """
    query = [math.fsum(column) / len(queries) for column in zip(*queries, strict=True)]
    key = [math.fsum(column) / len(keys) for column in zip(*keys, strict=True)]
    products: list[float] = []
    for position in range(positions):
        product = 0.0
        for q, k in zip(rotated(query, positions - 1, theta), rotated(key, position, theta), strict=True):
            product += q * k
        product *= scale
        products.append(product if cap is None else cap * math.tanh(product / cap))
    largest = max(products)
    weights = [math.exp(product - largest) for product in products]
    cumulated = [math.fsum(weights[: count + 1]) / math.fsum(weights) for count in range(positions)]
    return math.fsum(cumulated) / positions


def rotated(vector: list[float], position: int, theta: float) -> list[float]:
    """A vector with its rotary embedding."""
    half = len(vector) // 2
    found = [*vector]
    for i in range(half):
        angle = position * theta ** (-i / half)
        found[i] = vector[i] * math.cos(angle) - vector[i + half] * math.sin(angle)
        found[i + half] = vector[i + half] * math.cos(angle) + vector[i] * math.sin(angle)
    return found


def echoes(weights: list[list[float]], first: int, random: int) -> tuple[float, float]:
    """Attention of one query head to earlier copies of a token, and to the tokens behind these.

    Args:
        weights: The attention of each query to each token.
        first: Position of the first random token.
        random: Random tokens, which are repeated.
    """
    text = [None if at < first else (at - first) % random for at in range(len(weights))]
    echo: list[float] = []
    induction: list[float] = []
    for query in range(first + random, len(text)):
        copies = [at for at in range(query) if text[at] is not None and text[at] == text[query]]
        echo.append(math.fsum(weights[query][at] for at in copies))
        induction.append(math.fsum(weights[query][at + 1] for at in copies))
    return math.fsum(echo) / len(echo), math.fsum(induction) / len(induction)


def retrieving(scores: list[list[tuple[float, float]]], echo: int, induction: int) -> set[tuple[int, int]]:
    """The best heads by each of two scores, so many of each; of equal scores the first."""
    places = [(layer, head) for layer, row in enumerate(scores) for head in range(len(row))]
    found: set[tuple[int, int]] = set()
    for which, count in ((0, echo), (1, induction)):
        found |= set(sorted(places, key=lambda place: -scores[place[0]][place[1]][which])[:count])
    return found
