"""Which tokens are kept: the slow version of each selector stands in the file of its name.

A file has `DEFAULTS`, the parameters that the selector has beside `decode`, and `priority`. A selector that looks at
attention also has `scores_after_prefill` and `scores_after_decode`. Further functions that a file may have, with what
they are where it has none: `smallest_budget` (1), `observation_window` (32), and `statistic`, what a refiner asks for
(the attention of the queries in that window). A selector that looks at keys and values has `scores_of_tokens`,
`score_of_newest` and `rerank_every` instead, one that looks at the input of the layer `scores_of_inputs`, and one with
a threshold has `closeness`. `scores_of_layer` stands for
`scores_of_tokens` where KV heads look at each other, and `priorities` for `priority` where tokens do. `SMALL` is a spec
with numbers that fit tiny models.

A selector that wraps another has the other as `base` in its parameters. Where its file lacks a function, that of the
base is asked, so that scores are those of the base; what it knows beside them is in the memory of the head. Only
kvcrush does not work like this: the engine itself runs its base.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..coding import Config
from ..versions import version
from ._common import column_sums as column_sums
from ._common import evicted as evicted
from ._common import margin as margin
from ._common import mean_over as mean_over
from ._common import pool as pool
from ._common import top as top
from ._look import Look as Look


def complete(config: str | Config) -> Config:
    """Fill in the defaults of a selector: `"h2o"` or `{"name": "h2o", "recent": 0.25}`."""
    given = {"name": config} if isinstance(config, str) else dict(config)
    known = version("selector", given["name"]).DEFAULTS
    unknown = set(given) - set(known) - {"name"}
    if unknown:
        raise ValueError(f"{given['name']} has no {sorted(unknown)}; it has {sorted(known)}.")
    full = {**known, **given}
    if "base" in full:
        full["base"] = complete(full["base"])
        if full["base"]["name"] == "kvcrush":
            raise ValueError(f"There is no slow version of {full['name']} over kvcrush; kvcrush goes outside.")
    return full


def _function(config: Config, name: str) -> Any:
    """A function of a selector's file, or of its base's file, with its parameters; None where there is none."""
    own = getattr(version("selector", config["name"]), name, None)
    if own is not None:
        return functools.partial(own, config)
    return _function(config["base"], name) if "base" in config else None


def smallest_budget(config: Config) -> int:
    """The fewest tokens that a selector (not a refiner) can work with."""
    own = _function(config, "smallest_budget")
    return own() if own else 1


def observation_window(config: Config, budget: int) -> int:
    """How many of the newest queries a score or a refiner's statistic sums over."""
    own = _function(config, "observation_window")
    return own(budget) if own else 32


def priority(config: Config, position: int, score: complex, length: int, budget: int) -> float:
    """What one token is worth when `length` tokens have been seen.

    A score is a number; a probe's is two, the attention that a token got and from how many probes, as a complex one.
    """
    return version("selector", config["name"]).priority(config, position, score, length, budget)


def priorities(config: Config, look: Look) -> list[float]:
    """What each token on offer is worth."""
    own = _function(config, "priorities")
    if own:
        return own(look)
    pairs = zip(look.positions, look.scores, strict=True)
    return [priority(config, position, score, look.length, look.budget) for position, score in pairs]


def scores_after_prefill(
    config: Config, old: Sequence[complex], attention: list[Tensor], group: list[int], budget: int
) -> Sequence[complex]:
    """The scores of one KV head's tokens after a prefill or chunk.

    Args:
        config: A selector (not a refiner).
        old: Score of each token on offer before, zero for the new ones.
        attention: Matrix of every query head of the layer.
        group: Which query heads read this KV head.
        budget: Tokens the selector may keep.
    """
    own = _function(config, "scores_after_prefill")
    return own(old, attention, group, budget) if own else old


def scores_after_decode(
    config: Config, old: Sequence[complex], attention: list[Tensor], group: list[int]
) -> Sequence[complex]:
    """The scores of one KV head's tokens after one generated token, itself included as the last."""
    own = _function(config, "scores_after_decode")
    return own(old, attention, group) if own else old


def scores_of_tokens(config: Config, look: Look) -> Sequence[complex] | None:
    """The scores of one KV head's tokens, of a selector that looks at vectors; None of any other."""
    own = _function(config, "scores_of_tokens")
    return own(look) if own else None


def scores_of_layer(config: Config, looks: list[Look]) -> list[Sequence[complex] | None]:
    """The scores of the tokens of every KV head, of a selector that looks at vectors; None of any other."""
    own = _function(config, "scores_of_layer")
    return own(looks) if own else [scores_of_tokens(config, look) for look in looks]


def score_of_newest(config: Config, look: Look) -> complex | None:
    """The score of a generated token, of a selector that looks at vectors; None of any other."""
    own = _function(config, "score_of_newest")
    return own(look) if own else None


def scores_of_step(config: Config, look: Look) -> Sequence[complex] | None:
    """The scores of one KV head's tokens after a generated token, of a selector that asks where they stand."""
    own = _function(config, "scores_of_step")
    return own(look) if own else None


def scores_of_inputs(config: Config, inputs: Tensor | None, layer: int, head: int) -> list[complex] | None:
    """The scores of new tokens, of a selector that looks at the input of their layer [n, M]; None of any other."""
    own = _function(config, "scores_of_inputs")
    return own(inputs, layer, head) if own else None


def closeness(config: Config, attention: list[Tensor]) -> float:
    """How near an attention weight is to a threshold of the selector, relatively; infinite without one."""
    own = _function(config, "closeness")
    return own(attention) if own else math.inf


def rerank_every(config: Config) -> int:
    """After how many generated tokens `scores_of_tokens` is asked again; 0 for never."""
    own = _function(config, "rerank_every")
    return own() if own else 0


def statistic_of_head(config: Config, look: Look, number: int) -> list[float] | None:
    """The same for the query head of this number in its group, of a selector that asks where it stands."""
    own = _function(config, "statistic_of_head")
    return own(look, number) if own else None


def statistic(config: Config, matrix: Tensor, budget: int) -> list[float]:
    """One query head's own score of each token, before any pooling, for a refiner."""
    own = _function(config, "statistic")
    return own(matrix) if own else column_sums(matrix, observation_window(config, budget))
