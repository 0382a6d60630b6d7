"""The tokens of a text, each with the fraction of layers and heads that keep it, and how they are rendered.

For terminals, HTML and plots there are shades, line breaks, and symbols for invisible characters.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvpolicy.reporting.report import CacheSource, HandleSource, cache_of
from kvpolicy.text.errors import KVPolicyError
from kvpolicy.text.validation import check_index

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Span:
    """One token of a text.

    Attributes:
        text: Its part of the text.
        position: Its position in the row, from 0, without padding.
        kept: Fraction of the KV heads of all layers that keep it.
        layers: The same for each layer under the policy.
        seen: False for a token that the cache has not seen, such as the last one generated.
    """

    text: str
    position: int
    kept: float
    layers: tuple[float, ...]
    seen: bool = True


def spans(source: HandleSource | CacheSource, tokens: Sequence[str], *, row: int = 0) -> list[Span]:
    """The fraction of KV heads that keep each token of a text, over all layers and in each.

    Args:
        source: A cache, or a handle for its newest cache.
        tokens: Every token of the row as text, without padding; see `pieces`.
        row: Index of the row in the batch.

    Raises:
        KVPolicyError: If the cache is empty, has no such row, or has seen more tokens than are given.
        KVPolicyTypeError: If the row is not an integer.

    Examples:
        >>> import torch, kvpolicy
        >>> model, tokenizer = kvpolicy.tiny()
        >>> ids = tokenizer("tiger=4821", return_tensors="pt").input_ids
        >>> with torch.no_grad(), kvpolicy.attach(model, "streaming:sinks=1@0.5") as handle:
        ...     _ = model(ids)
        >>> [(span.text, span.kept) for span in spans(handle, pieces(tokenizer, ids[0].tolist()))]
        [('<s>', 1.0), ('tiger', 0.0), ('=', 0.0), ('4', 0.0), ('8', 0.0), ('2', 1.0), ('1', 1.0)]
    """
    cache = cache_of(source)
    shares, seen = shares_kept(cache, row)
    if seen > len(tokens):
        raise KVPolicyError(
            f"tokens must be all {seen:,} tokens that row {row} of the cache has seen, without padding, got "
            f"{len(tokens):,}."
        )
    by_token: list[tuple[float, ...]] = list(zip(*(layer.tolist() for layer in shares), strict=True))
    by_token += [(0.0,) * len(shares)] * (len(tokens) - seen)  # not seen yet, so not kept
    return [
        Span(text, position, sum(layers) / len(layers), layers, position < seen)
        for position, (text, layers) in enumerate(zip(tokens, by_token, strict=True))
    ]


def shares_kept(cache: CacheSource, row: int = 0) -> tuple[list[Tensor], int]:
    """The fraction of KV heads that keep each position, [N] float64 per layer, and the number of tokens N seen.

    Args:
        cache: A cache that has seen a prompt.
        row: Index of the row in the batch.

    Raises:
        KVPolicyError: If the cache is empty, or has no such row.
        KVPolicyTypeError: If the row is not an integer.
    """
    import torch

    row = check_index("row", row, cache.batch_size)
    seen = int(cache.policy_layers[0].length[row])
    shares: list[Tensor] = []
    for layer in cache.policy_layers:
        held = layer.head_positions[row].long().cpu()
        counts = torch.bincount(held[held >= 0], minlength=seen)
        shares.append(counts.double() / held.shape[0])
    return shares, seen


def pieces(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """Split a text into its tokens: what each adds to the text before it.

    If several tokens form one character, the last one has it, and the others show their bytes, as `<E4>`.

    Args:
        tokenizer: A tokenizer of transformers.
        ids: Token ids of one row, without padding.

    Examples:
        >>> import kvpolicy
        >>> _, tokenizer = kvpolicy.tiny()
        >>> pieces(tokenizer, tokenizer("a=é").input_ids)
        ['<s>', 'a', '=', '<C3>', 'é']
    """
    found: list[str] = []
    before: list[int] = []
    for group, text in _whole(tokenizer, ids):
        piece = text
        if before:  # decoded in context, because a tokenizer may drop a leading space
            start = _decode(tokenizer, before)
            both = _decode(tokenizer, [*before, *group])
            piece = both[len(start) :] if both.startswith(start) else text
        found += [*(_bytes(tokenizer, token) for token in group[:-1]), piece]
        before = group
    return found


def _whole(tokenizer: Any, ids: Sequence[int]) -> Iterator[tuple[list[int], str]]:
    """Groups of tokens that form whole characters; each byte of an invalid character is a group of its own."""
    group: list[int] = []
    for token in ids:
        group.append(int(token))
        text = _decode(tokenizer, group)
        if not text.endswith("\ufffd"):  # the replacement character marks an incomplete sequence of bytes
            yield group, text
            group = []
        elif len(group) == 4:  # no UTF-8 character has more bytes
            yield group[:1], _bytes(tokenizer, group[0])
            group = group[1:]
    yield from (([token], _bytes(tokenizer, token)) for token in group)


def _decode(tokenizer: Any, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def _bytes(tokenizer: Any, token: int) -> str:
    """The bytes of a token that is part of a character."""
    name = str(tokenizer.convert_ids_to_tokens(token))
    if name.startswith("<0x"):  # a byte token of SentencePiece
        return f"<{name[3:5]}>"
    table = _byte_level()
    return f"<{' '.join(f'{table[c]:02X}' for c in name)}>" if all(c in table for c in name) else "\ufffd"


def _byte_level() -> dict[str, int]:
    """The characters of GPT-2 for bytes: printable bytes are themselves, the others follow after 255 in order."""
    plain = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + at): byte for at, byte in enumerate(others)}


SHADES = ("#440154", "#414487", "#2a788e", "#22a884", "#7ad151", "#fde725")
"""Viridis in six steps, from few heads to all, for terminals with any background."""
LIGHT = ("#dfebf7", "#bcd7ee", "#8fbde0", "#5b9bcf", "#2b75b3", "#084a8c")
"""Blues for light pages: the darker, the more heads."""
DARK = ("#12304d", "#17497a", "#1f68a8", "#3f8fd0", "#7dbbea", "#c9e5fa")
"""Blues for dark pages: the lighter, the more heads."""
WHITE = "#ffffff"
BLACK = "#000000"
NAMES = ("none", "under 20%", "20% or more", "40% or more", "60% or more", "80% or more", "all")
"""The names of the levels, from none to all."""
TAB = 4
"""Columns of a tab character."""
MIN_LINE = 16
"""Average characters per line; the lines of a text with fewer are joined."""
_SIGNS = {"\r": "␍", "\t": "⇥".ljust(TAB), "\x7f": "␡", "\u200b": "·", "\ufeff": "·"}
_DIRECTIONS = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}
"""The Unicode classes of characters that set a writing direction."""

Piece = tuple[str, Span]
"""Characters on one line, and the token that they belong to."""


def level(share: float) -> int:
    """The shade of a fraction: 0 for none, 1 to 5 in steps of 20%, 6 for all.

    Examples:
        >>> level(0.0), level(0.01), level(0.5), level(0.99), level(1.0)
        (0, 1, 3, 5, 6)
    """
    return 0 if share <= 0 else min(1 + int(share * 5 + 1e-9), 6)


def ink(shade: str) -> str:
    """Black or white, whichever has more contrast on a shade.

    Examples:
        >>> ink("#fde725"), ink("#440154")
        ('#000000', '#ffffff')
    """
    parts = (int(shade[at : at + 2], 16) / 255 for at in (1, 3, 5))
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    light = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    # The contrast ratio of WCAG 2: to black on the left, to white on the right.
    return BLACK if (light + 0.05) / 0.05 >= 1.05 / (light + 0.05) else WHITE


def share_of(span: Span, layer: int | None = None) -> float:
    """The fraction of heads that keep a token, in one layer or in all."""
    return span.kept if layer is None else span.layers[layer]


def visible(text: str) -> str:
    r"""Replace invisible characters: an arrow before each newline, symbols for tabs and control characters.

    Examples:
        >>> visible("a" + chr(10) + chr(27) + "b")
        'a↵\n␛b'
    """
    return "".join("↵\n" if letter == "\n" else _sign(letter) for letter in text)


def _sign(letter: str) -> str:
    if letter in _SIGNS:
        return _SIGNS[letter]
    if ord(letter) < 32:
        return chr(0x2400 + ord(letter))
    if unicodedata.bidirectional(letter) in _DIRECTIONS:  # it would reverse the characters after it
        return "·"
    return "\ufffd" if unicodedata.category(letter) in ("Cc", "Cs") or letter in "\u2028\u2029" else letter


def cells(text: str) -> int:
    """The number of terminal columns of a text.

    Examples:
        >>> cells("ab"), cells("中")
        (2, 2)
    """
    return sum(_cell(letter) for letter in text)


def _cell(letter: str) -> int:
    if unicodedata.combining(letter) or unicodedata.category(letter) == "Cf":
        return 0
    return 2 if unicodedata.east_asian_width(letter) in "WF" else 1


def wrapped(spans: Sequence[Span], width: int) -> list[list[Piece]]:
    """Break a text into lines, between words if possible.

    The lines of a text with very short ones, such as a list, are joined: its newlines are shown as arrows only.

    Args:
        spans: The tokens of the text.
        width: Columns of a line.
    """
    shown = [(visible(span.text), span) for span in spans]
    if runs_on(spans):
        shown = [(text.replace("\n", ""), span) for text, span in shown]
    lines: list[list[Piece]] = [[]]
    for text, span in shown:
        for number, part in enumerate(text.split("\n")):
            if number:
                lines.append([])
            for piece in _cut(part, width):
                _add(lines, (piece, span), width)
    return lines if lines[-1] else lines[:-1]


def runs_on(spans: Sequence[Span]) -> bool:
    """Whether the lines of a text are so short that they are joined."""
    text = "".join(span.text for span in spans)
    return len(text) < MIN_LINE * text.count("\n")


def _cut(text: str, width: int) -> Iterable[str]:
    """The parts of a token that each fit on a line."""
    start = 0
    taken = 0
    for at, letter in enumerate(text):
        if taken + _cell(letter) > width:
            yield text[start:at]
            start = at
            taken = 0
        taken += _cell(letter)
    if text[start:]:
        yield text[start:]


def _add(lines: list[list[Piece]], piece: Piece, width: int) -> None:
    """Append a piece to the last line, or move the word that it continues to a new line."""
    last = lines[-1]
    if sum(cells(text) for text, _ in last) + cells(piece[0]) <= width:
        last.append(piece)
        return
    start = len(last)
    if not _begins(piece[0], last[-1][0] if last else ""):
        inside = range(1, len(last))
        start = max((at for at in inside if _begins(last[at][0], last[at - 1][0])), default=len(last))
    word = [*last[start:], piece]
    if sum(cells(text) for text, _ in word) > width:  # one long word is broken
        start = len(last)
        word = [piece]
    del last[start:]
    lines.append(word)


def _begins(text: str, before: str) -> bool:
    """Whether a word begins with `text`."""
    return text[:1] in (" ", "⇥") or before[-1:] in (" ", "↵", "⇥")
