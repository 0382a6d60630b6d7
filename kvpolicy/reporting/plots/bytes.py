"""Bytes of a cache by kind, next to the full cache; of a handle, a cache, its report, or a plan."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from kvpolicy.planning.result import CachePlan
from kvpolicy.policy import Policy
from kvpolicy.reporting.plots._style import GREY, KINDS, canvas, figure_of, legend_above
from kvpolicy.reporting.report import CacheSource, HandleSource, Report, cache_of, make_report
from kvpolicy.text.errors import KVPolicyError, KVPolicyTypeError
from kvpolicy.text.tables import byte_unit, format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


Source: TypeAlias = HandleSource | CacheSource | Report | CachePlan
"""Objects that have the tokens and bytes of a cache."""

UNMANAGED = "unmanaged"
"""The kind of the bytes of layers that are not under the policy."""


class LayerTokens(NamedTuple):
    """Budgets of a cache.

    Attributes:
        policy: The policy.
        tokens: The most tokens of each row, by layer; for a plan, those of its longest row.
        unmanaged: Layers that are not under the policy.
    """

    policy: Policy
    tokens: dict[int, tuple[int, ...]]
    unmanaged: tuple[int, ...]


def resolve(source: Any) -> Report | CachePlan:
    """A plan or a report as it is, or the report of a handle or a cache.

    Raises:
        KVPolicyError: If the cache has seen no prompt yet.
        KVPolicyTypeError: If the source is of another type.
    """
    if isinstance(source, CachePlan):
        return source
    if not isinstance(source, Report):
        try:
            return make_report(cache_of(source))
        except TypeError:
            raise KVPolicyTypeError(
                "The source must be a Handle, a PolicyCache, a Report, a CachePlan or a dictionary of these, got a "
                f"{type(source).__name__}."
            ) from None
    if all(layer.note == "empty" for layer in source.layers):
        raise KVPolicyError("The cache of the report must have seen a prompt; run the model first.")
    return source


def named(source: Any) -> dict[str, Report | CachePlan]:
    """The sources by name; a single one has its policy as its name.

    Raises:
        KVPolicyError: If there is none.
    """
    if not isinstance(source, Mapping):
        one = resolve(source)
        return {str(one.policy): one}
    if not source:
        raise KVPolicyError("The dictionary of sources must not be empty.")
    return {str(name): resolve(one) for name, one in source.items()}


def layer_tokens(source: Report | CachePlan) -> LayerTokens:
    """The budgets of a plan or a report."""
    if isinstance(source, CachePlan):
        tokens = {layer.layer_idx: (layer.tokens,) for layer in source.layers}
        return LayerTokens(source.policy, tokens, tuple(source.unmanaged))
    tokens = {layer.layer_idx: layer.budget for layer in source.layers if layer.budget}
    return LayerTokens(source.policy, tokens, tuple(layer.layer_idx for layer in source.layers if not layer.budget))


def by_kind(source: Report | CachePlan) -> dict[str, int]:
    """Bytes by kind, without kinds that have none."""
    if isinstance(source, CachePlan):
        return {kind: size for kind, size in source.by_kind().items() if size}
    kinds: dict[str, int] = {}
    for layer in source.layers:
        for kind, size in layer.nbytes.items():
            name = UNMANAGED if kind == "window" else kind
            kinds[name] = kinds.get(name, 0) + size
    return {kind: size for kind, size in kinds.items() if size}


FULL = "full cache"


def bytes_by_kind(source: Source | Mapping[str, Source], *, axes: Axes | None = None) -> Figure:
    """Plot the bytes of a cache by kind, next to those of the full cache.

    The kinds are keys and values in full precision (`exact`), the `codes` and `scales` of the codec, and the
    bookkeeping: `positions`, `statistics`, `index` and `counters`. The weights of a plan are not included.

    Args:
        source: A handle, a cache, a report or a plan; or a dictionary of these by name, with a bar for each.
        axes: Axes to draw into, instead of a new figure.

    Returns:
        The figure.

    Raises:
        KVPolicyError: If a cache has seen no prompt yet.

    Examples:
        >>> from kvpolicy import plan
        >>> from kvpolicy.hf.embedded import config_of
        >>> policies, config = ["h2o@0.2", "kivi:bits=4", "h2o+kivi:bits=4@0.2"], config_of("llama-3-70b")
        >>> figure = bytes_by_kind({spec: plan(config, spec, prompt=4096, new=512) for spec in policies})
        >>> [label.get_text() for label in figure.axes[0].get_yticklabels()]
        ['full cache', 'h2o@0.2', 'kivi:bits=4', 'h2o+kivi:bits=4@0.2']
        >>> figure.axes[0].get_xlabel()
        'bytes, GiB'
    """
    bars = _bars(named(source))
    most = max(sum(kinds.values()) for _, kinds in bars)
    size, unit = byte_unit(most)
    with canvas(axes, (8.0, 1.1 + 0.32 * len(bars))) as own:
        _draw(own, [kinds for _, kinds in bars], size)
        for place, (_, kinds) in enumerate(bars):
            total = sum(kinds.values())
            own.annotate(
                format_bytes(total), (total / size, place), (3, 0), textcoords="offset points", va="center", size=8
            )
        own.set(xlabel=f"bytes, {unit}", xlim=(0, (most or 1) / size * 1.14), ylim=(len(bars) - 0.4, -0.6))
        own.set_yticks(range(len(bars)), [_fold(name) for name, _ in bars])
        legend_above(own, axes is None, 9)
    return figure_of(own)


def _bars(found: dict[str, Report | CachePlan]) -> list[tuple[str, dict[str, int]]]:
    """Name and bytes by kind of each bar; a full cache that is the same for all comes first, once."""
    fulls = {one.full_nbytes for one in found.values()}
    bars = [(FULL, {FULL: size}) for size in fulls if len(fulls) == 1]
    for name, one in found.items():
        if len(fulls) > 1:
            bars.append((f"{name}, {FULL}", {FULL: one.full_nbytes}))
        bars.append((name, by_kind(one)))
    return bars


def _draw(axes: Axes, bars: list[dict[str, int]], size: int) -> None:
    left = [0.0] * len(bars)
    present = {kind for kinds in bars for kind in kinds}
    for kind in [*KINDS, *sorted(present - KINDS.keys())]:
        if kind not in present:
            continue
        widths = [kinds.get(kind, 0) / size for kinds in bars]
        look: Any = {"color": KINDS.get(kind, GREY), "edgecolor": GREY, "linewidth": 0}
        axes.barh(range(len(bars)), widths, 0.7, left, label=kind, hatch="//" if kind == UNMANAGED else None, **look)
        left = [start + width for start, width in zip(left, widths, strict=True)]


def _fold(name: str, width: int = 32) -> str:
    """A long spec on several lines, broken before a part or a parameter."""
    lines = [""]
    for piece in re.split(r"(?=[+/:@,])", name):
        if lines[-1] and len(lines[-1]) + len(piece) > width:
            lines.append("")
        lines[-1] += piece
    return "\n".join(lines)
