"""A text's tokens, each with the share of layers and heads that keep it: what every view of a text is made from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvpolicy.reporting.report import cache_of
from kvpolicy.reporting.sources import CacheSource, HandleSource
from kvpolicy.spec.errors import KVPolicyError
from kvpolicy.spec.validation import place_of

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Span:
    """One token of a text.

    Attributes:
        text: Its part of the text.
        position: Its place in the row, from 0, padding left out.
        kept: Share of all layers' KV heads that keep it.
        layers: The same of each layer under the policy.
        seen: False of a token that the cache was never given, such as the last one generated.
    """

    text: str
    position: int
    kept: float
    layers: tuple[float, ...]
    seen: bool = True


def spans(source: HandleSource | CacheSource, tokens: Sequence[str], *, row: int = 0) -> list[Span]:
    """Say of each token of a text which share of the KV heads keeps it, over all layers and in each.

    Args:
        source: The cache, or a handle for its newest one.
        tokens: Every token of the row as text, padding left out; see `pieces`.
        row: Which row of the batch.

    Raises:
        KVPolicyError: Where the cache is empty, has no such row, or has seen more tokens than are given.
        KVPolicyTypeError: Where the row is no whole number.

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
            f"The cache has seen {seen:,} tokens of row {row}, and {len(tokens):,} are given: "
            "give every token of the row, without padding."
        )
    none = (0.0,) * len(shares)
    by_token: list[tuple[float, ...]] = list(zip(*(layer.tolist() for layer in shares), strict=True))
    rows = by_token + [none] * (len(tokens) - seen)
    pairs = enumerate(zip(tokens, rows, strict=True))
    return [Span(text, at, sum(row) / len(row), row, at < seen) for at, (text, row) in pairs]


def shares_kept(cache: CacheSource, row: int = 0) -> tuple[list[Tensor], int]:
    """The share of KV heads that keep each position, [N] float64 of each layer, and how many tokens N were seen.

    Args:
        cache: A cache that has seen a prompt.
        row: Which row of the batch.

    Raises:
        KVPolicyError: Where the cache is empty, or has no such row.
        KVPolicyTypeError: Where the row is no whole number.
    """
    import torch

    row = place_of("row", row, cache.batch_size)
    seen = int(cache.policy_layers[0].length[row])
    shares: list[Tensor] = []
    for layer in cache.policy_layers:
        held = layer.positions[row].long().cpu()
        counts = torch.bincount(held[held >= 0], minlength=seen)
        shares.append(counts.double() / held.shape[0])
    return shares, seen


def pieces(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """Cut a text into its tokens: what each adds to the text before it.

    Where several tokens make one character, the last carries it and the others show their bytes, as `<E4>`.

    Args:
        tokenizer: Of transformers.
        ids: Of one row, without padding.

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
        if before:  # in its place: a tokenizer may drop the space that a text begins with
            start, both = _decode(tokenizer, before), _decode(tokenizer, [*before, *group])
            piece = both[len(start) :] if both.startswith(start) else text
        found += [*(_bytes(tokenizer, token) for token in group[:-1]), piece]
        before = group
    return found


def _whole(tokenizer: Any, ids: Sequence[int]) -> Iterator[tuple[list[int], str]]:
    """Groups of tokens whose text is whole; of bytes that make no character, each for itself."""
    group: list[int] = []
    for token in ids:
        group.append(int(token))
        text = _decode(tokenizer, group)
        if not text.endswith("\ufffd"):
            yield group, text
            group = []
        elif len(group) == 4:  # no character has more bytes
            yield group[:1], _bytes(tokenizer, group[0])
            group = group[1:]
    yield from (([token], _bytes(tokenizer, token)) for token in group)


def _decode(tokenizer: Any, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def _bytes(tokenizer: Any, token: int) -> str:
    """A token that is part of a character, by its bytes."""
    name = str(tokenizer.convert_ids_to_tokens(token))
    if name.startswith("<0x"):  # SentencePiece's bytes
        return f"<{name[3:5]}>"
    table = _byte_level()
    return f"<{' '.join(f'{table[c]:02X}' for c in name)}>" if all(c in table for c in name) else "\ufffd"


def _byte_level() -> dict[str, int]:
    """GPT-2's letters for bytes: printable ones are themselves, the others come after 255 in their order."""
    plain = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + at): byte for at, byte in enumerate(others)}
