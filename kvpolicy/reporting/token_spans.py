"""The tokens of a text, each with the fraction of layers and heads that keep it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvpolicy.reporting.report import cache_of
from kvpolicy.reporting.sources import CacheSource, HandleSource
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
