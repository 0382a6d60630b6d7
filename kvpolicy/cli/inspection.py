"""A run of a prompt under a policy, and what it shows: the measured layers, their budgets and the kept tokens.

In the terminal it shows them in colors, or with marks below the text if the terminal has none.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from kvpolicy.cli.formatting import paragraph, ranges, size, width
from kvpolicy.cli.generation import held
from kvpolicy.reporting.token_spans import NAMES, SHADES, Piece, Span, cells, ink, level, share_of, wrapped
from kvpolicy.text.errors import KVPolicyError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from kvpolicy.hf.attach import Handle
    from kvpolicy.hf.cache import PolicyCache
    from kvpolicy.hf.tile_size import TileSize


DURING_PREFILL = "during prefill"
SECOND_PASS = "in a second forward pass over the prompt"
"""When the importance of the layers was measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """A layer under the policy.

    Attributes:
        index: The index of the layer in the model.
        cosine: The cosine similarity of the hidden states before and after attention, as a mean over the prompt;
            None if it was not measured.
        budget: The maximum number of tokens.
        kept: Tokens that each KV head keeps.
        nbytes: Bytes that the layer holds.
    """

    index: int
    cosine: float | None
    budget: int
    kept: tuple[int, ...]
    nbytes: int

    @property
    def mean(self) -> float:
        """Kept tokens, as a mean over the KV heads."""
        return sum(self.kept) / len(self.kept)


@dataclass(frozen=True, kw_only=True, slots=True)
class Inspection:
    """Effect of a policy on a prompt.

    Attributes:
        model: The name of the model.
        policy: The spec of the policy.
        prompt: Tokens of the prompt.
        seen: Tokens that the cache has seen.
        nbytes: Bytes held.
        full_nbytes: Bytes of the full cache.
        moved: Bytes that a decode step reads.
        all_moved: Bytes that it would read if it read everything that is kept.
        note: Notes of the plan: where the policy differs from what its spec suggests.
        measured: When the importance of the layers was measured; an empty string if it was not.
        layers: The layers under the policy.
        unmanaged: The window of each unmanaged layer, by its index.
        states: Unmanaged layers with a state alone.
        depth: All layers of the model.
        spans: The text, by tokens.
        cache: The cache, for plots.
    """

    model: str
    policy: str
    prompt: int
    seen: int
    nbytes: int
    full_nbytes: int
    moved: int
    all_moved: int
    note: str
    measured: str
    layers: tuple[Layer, ...]
    unmanaged: dict[int, int]
    states: tuple[int, ...]
    depth: int
    spans: tuple[Span, ...]
    cache: PolicyCache

    @property
    def kept(self) -> float:
        """Kept tokens, as a mean over all layers and KV heads."""
        return sum(layer.mean for layer in self.layers) / len(self.layers)

    def position_of(self, index: int) -> int:
        """Return the position of a layer of the model among the layers under the policy.

        Raises:
            KVPolicyError: If the layer is not under the policy.
        """
        managed = [layer.index for layer in self.layers]
        if index not in managed:
            raise KVPolicyError(
                f"--layer must be a layer under the policy ({ranges(managed, most=None)}), got {index}; try "
                f"{managed[0]}."
            )
        return managed.index(index)

    def as_dict(self) -> dict[str, Any]:
        """Return numbers and strings that can be serialized as JSON."""
        whole = ("model", "policy", "prompt", "seen", "nbytes", "full_nbytes", "moved", "all_moved", "note", "measured")
        tokens = [
            {name: getattr(span, name) for name in ("position", "text", "seen", "kept", "layers")}
            for span in self.spans
        ]
        return {name: getattr(self, name) for name in whole} | {
            "unmanaged": self.unmanaged,
            "states": list(self.states),
            "layers": [asdict(layer) for layer in self.layers],
            "tokens": tokens,
        }


def inspect_prompt(
    model: Any,
    tokenizer: Any,
    ids: Any,
    policy: str,
    *,
    name: str = "",
    new: int = 1,
    importance: bool = True,
    tile: TileSize = None,
) -> Inspection:
    """Run a prompt under a policy and inspect the cache.

    Args:
        model: A model without a policy.
        tokenizer: Its tokenizer.
        ids: The prompt, [1, P].
        policy: The spec of the policy.
        name: The name of the model.
        new: Number of tokens to generate; the last one is not in the cache.
        importance: Whether to report how important each layer is. If the allocator does not measure it, a second
            forward pass does.
        tile: The most tokens of the prompt that a layer takes at a time, `auto`, or None.
    """
    from kvpolicy.reporting.token_spans import pieces, spans

    handle, tokens = _generate(model, tokenizer, ids, policy, new, tile)
    assert handle.cache is not None
    cache = handle.cache
    # How important layers are: as the prompt's own run measured it, else by a second run.
    cosines: list[float] = []
    measured = ""
    if importance and handle.policy.layer_metric == "cosine":
        cosines = cosines_of(cache)
        measured = DURING_PREFILL
    elif importance:  # with an allocator that needs the cosines, as `kvpolicy.profile` does
        second, _ = _generate(model, tokenizer, ids, "squeeze+window@1.0", 1, tile)
        assert second.cache is not None
        cosines = cosines_of(second.cache)
        measured = SECOND_PASS
    # The text as far as the cache has seen it: the last generated token is not in it.
    seen = int(cache.policy_layers[0].length[0])
    report = cache.report()
    text = spans(cache, pieces(tokenizer, tokens[: max(seen, ids.shape[1])]))
    shape = cache.attachment.model_shape
    return Inspection(
        model=name,
        policy=str(handle.policy),
        prompt=ids.shape[1],
        seen=seen,
        nbytes=cache.nbytes,
        full_nbytes=cache.full_nbytes,
        moved=report.moved,
        all_moved=report.all_moved,
        note="" if cache.plan is None else cache.plan.note,
        measured=measured,
        layers=_layers(cache, cosines),
        unmanaged=dict(shape.unmanaged),
        states=tuple(sorted(shape.states.keys() - {*shape.evictable, *shape.unmanaged})),
        depth=shape.depth,
        spans=tuple(text),
        cache=cache,
    )


def cosines_of(cache: PolicyCache) -> list[float]:
    """Return the measured cosine of each layer under the policy, for the first row."""
    return [float(cosine) for cosine in cache.cosines()[0]]


def _generate(model: Any, tokenizer: Any, ids: Any, policy: str, new: int, tile: TileSize) -> tuple[Handle, list[int]]:
    import torch

    from kvpolicy.cli.generation import GenerationOptions
    from kvpolicy.hf.attach import attach
    from kvpolicy.reporting.logging import without_warning_of_few_tokens

    ids = ids.to(model.device)
    arguments = GenerationOptions(new=new).arguments(tokenizer)
    # What is shown are the tokens that are kept.
    with torch.inference_mode(), attach(model, policy, tile=tile) as handle, without_warning_of_few_tokens():
        output = model.generate(ids, attention_mask=torch.ones_like(ids), **arguments)
    return handle, output[0].tolist()


def _layers(cache: PolicyCache, cosines: list[float]) -> tuple[Layer, ...]:
    return tuple(
        Layer(
            index=layer.layer_idx,
            cosine=cosines[position] if cosines else None,
            budget=int(layer.budget[0]),
            kept=tuple((layer.head_positions[0] >= 0).sum(-1).tolist()),
            nbytes=sum(layer.held().values()),
        )
        for position, layer in enumerate(cache.policy_layers)
    )


MARKS = " .:-=+#"
"""The mark of each level, for terminals without colors."""


def show(inspection: Inspection, layer: int | None = None) -> None:
    """Print the layers, and the text with the tokens that a layer keeps; by default the average over all layers."""
    from rich.console import Console

    console = Console(file=sys.stdout, width=width(), highlight=False, markup=False, emoji=False, soft_wrap=False)
    position = None if layer is None else inspection.position_of(layer)
    has_colors = console.color_system is not None and not console.no_color
    print("\n".join([*heading(inspection), "", *layer_lines(inspection, ascii_only=not _supports_unicode()), ""]))
    heads = "KV heads in all layers" if layer is None else f"KV heads of layer {layer}"
    print(paragraph(f"Text: the fraction of the {heads} that keep each token."))
    lines = wrapped(inspection.spans, width())
    if has_colors:
        _print_colored(console, lines, position)
        return
    legend = ", ".join(f"{mark} {name}" for mark, name in zip(MARKS[1:], NAMES[1:], strict=True))
    print(paragraph(f"Marks: {legend}."), "", *marked(lines, position), sep="\n")


def heading(inspection: Inspection) -> list[str]:
    """Return the lines about the whole run."""
    lines = [
        f"{inspection.policy} on {inspection.model}",
        f"kept: {inspection.kept:,.0f} of {inspection.seen:,} tokens (mean over layers and KV heads)",
        f"bytes: {held(inspection.nbytes, inspection.full_nbytes)}",
    ]
    if inspection.moved != inspection.all_moved:  # the policy has a reader
        lines.append(f"moved per decode step: {size(inspection.moved)}; all that is kept: {size(inspection.all_moved)}")
    if inspection.note:
        lines.append(f"note: {inspection.note}")
    return [paragraph(line) for line in lines]


def layer_lines(inspection: Inspection, ascii_only: bool = False) -> list[str]:
    """Return one line per layer: cosine, budget, kept tokens, and a bar of the kept tokens with the mean marked."""
    mean = inspection.kept
    longest = max(mean, *(layer.mean for layer in inspection.layers), 1.0)
    header = f"{'layer':>5}  {'cosine':>6}  {'budget':>7}  {'kept':>7}  "
    columns = min(width() - len(header), 60)
    lines = [f"{header}{'|' if ascii_only else '│'} mean"]
    for layer in inspection.layers:
        cosine = "-" if layer.cosine is None else f"{layer.cosine:.3f}"
        start = f"{layer.index:>5}  {cosine:>6}  {layer.budget:>7,}  {layer.mean:>7,.0f}  "
        lines.append((start + _bar(layer, mean, longest, columns, ascii_only)).rstrip())
    for index, window in inspection.unmanaged.items():
        lines.append(f"{index:>5}  unmanaged: sliding window of {window:,} tokens")
    for index in inspection.states:
        lines.append(f"{index:>5}  unmanaged: a state")
    return [*lines, paragraph(_about_cosine(inspection))]


def _about_cosine(inspection: Inspection) -> str:
    if not inspection.measured:
        return "The importance of the layers was not measured."
    return (
        "cosine: cosine similarity of the hidden states before and after attention (1 if attention changes nothing), "
        f"measured {inspection.measured}."
    )


def _bar(layer: Layer, mean: float, longest: float, columns: int, ascii_only: bool) -> str:
    filled = "#" if ascii_only else "█"
    length = round(layer.mean / longest * columns)
    bar = filled * length + " " * (columns - length)
    marker = min(round(mean / longest * columns), columns - 1)
    return bar[:marker] + ("|" if ascii_only else "│") + bar[marker + 1 :]


def marked(lines: list[list[Piece]], position: int | None = None) -> Iterator[str]:
    """Yield each line of a text, followed by a line of marks: of one layer under the policy, or of all."""
    for line in lines:
        yield "".join(text for text, _ in line)
        marks = (MARKS[level(share_of(span, position))] * cells(text) for text, span in line)
        yield "".join(marks).rstrip()


def _print_colored(console: Console, lines: list[list[Piece]], position: int | None) -> None:
    from rich.text import Text

    legend = Text("")
    for number, name in enumerate(NAMES):
        legend.append(f" {name} ", _style(number))
        legend.append(" ")
    console.print(legend, Text(""), sep="\n")
    for line in lines:
        colored: Text = Text(no_wrap=True, overflow="ignore")
        for text, span in line:
            colored.append(text, _style(level(share_of(span, position))))
        console.print(colored, soft_wrap=True)


def _style(number: int) -> str:
    return f"{ink(SHADES[number - 1])} on {SHADES[number - 1]}" if number else "dim"


def _supports_unicode() -> bool:
    """Return whether standard output can encode the characters of the bars."""
    try:
        "█│".encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True
