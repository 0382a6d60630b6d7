"""Log-likelihoods under a policy: prefill and compress a context, score answers on what is left of it.

Every forward here has at least two columns, one of them padding where there is one token only: the cache then treats
a lone token as it treats several, and no score depends on what else is in the batch.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kvpolicy.spec.errors import KVPolicyError

Answer = tuple[float, bool]
"""The log-likelihood of an answer, and whether greedy decoding would give it."""

Tokens = tuple[int, ...]


class Piece(NamedTuple):
    """What of one request follows the prefilled prefix.

    Attributes:
        place: The request's place in the list of requests.
        tokens: Its tokens after the prefix, the answer last.
        scored: How many of them, at the end, are the answer.
    """

    place: int
    tokens: Tokens
    scored: int


Groups = dict[Tokens, list[Piece]]
"""The pieces of each prefix, the longest prefix first; the empty prefix where nothing can be prefilled apart."""


def split(requests: Sequence[tuple[Any, list[int], list[int]]], max_length: int, holdback: int) -> Groups:
    """Cut requests into prefixes to compress and pieces to score on them.

    Args:
        requests: (key, context, answer) each.
        max_length: Tokens the model can see; more are cut off on the left, as lm-eval does.
        holdback: Tokens at the end of a context that are fed with the answer, after the compression.
    """
    groups: defaultdict[Tokens, list[Piece]] = defaultdict(list)
    for index, (_, context, answer) in enumerate(requests):
        if not 0 < len(answer) <= max_length:
            raise KVPolicyError(f"An answer has {len(answer)} tokens; 1 to {max_length} can be scored.")
        tokens = tuple((context + answer)[-(max_length + 1) :])
        cut = max(len(tokens) - len(answer) - holdback, 0)
        groups[tokens[:cut]].append(Piece(index, tokens[cut:], len(answer)))
    return {prefix: groups[prefix] for prefix in sorted(groups, key=len, reverse=True)}


def whole(groups: Groups) -> list[Piece]:
    """Give the pieces with their prefixes in front, the longest first."""
    pieces = [Piece(p.place, prefix + p.tokens, p.scored) for prefix, some in groups.items() for p in some]
    return sorted(pieces, key=lambda piece: len(piece.tokens), reverse=True)


def held_lengths(groups: Groups, rolling: bool) -> list[int]:
    """List the tokens of each cache that is reported: a prefix, or all that is fed where there is none."""
    alone = whole(groups if rolling else {(): groups.get((), [])})
    prefixes = [] if rolling else [len(prefix) for prefix in groups if prefix]
    return [len(piece.tokens) - 1 for piece in alone] + prefixes


@dataclass(frozen=True, kw_only=True, slots=True)
class Scorer:
    """Scores pieces on caches of a policy.

    Args:
        model: A causal LM that the policy is attached to.
        cache: Makes an empty cache for prompts of the lengths given, [B].
        held: Is called with the number of rows and the cache once this holds what is to be reported.
        pad: Token id for padding; never seen by a valid token.
        device: Where inputs go.
        autocast: Data type to run forwards in, None for the model's.
        softmax_dtype: Data type of log-probabilities, None for that of the logits.
    """

    model: Any
    cache: Callable[[Tensor], Any]
    held: Callable[[int, Any], None]
    pad: int
    device: torch.device
    autocast: torch.dtype | None = None
    softmax_dtype: torch.dtype | None = None

    def shared(self, prefixes: Sequence[Tokens], groups: Groups, batch: int) -> Iterator[tuple[int, Answer]]:
        """Prefill and compress `prefixes` in one batch, then score their pieces, `batch` at a time."""
        ids, mask = self._stack(prefixes, left=True)
        length = mask.sum(-1)
        cache = self.cache(length)
        first = self._forward(ids, mask, (mask.cumsum(-1) - 1).clamp(min=0), cache, last=True)
        self.held(len(prefixes), cache)
        pairs = [(row, piece) for row, prefix in enumerate(prefixes) for piece in groups[prefix]]
        pairs.sort(key=lambda pair: len(pair[1].tokens), reverse=True)
        for start in range(0, len(pairs), batch):
            rows = torch.tensor([row for row, _ in pairs[start : start + batch]], device=self.device)
            pieces = [piece for _, piece in pairs[start : start + batch]]
            own = copy.deepcopy(cache) if start + batch < len(pairs) else cache
            own.batch_select_indices(rows)
            yield from self._continue(pieces, first[rows], mask[rows], length[rows], own)

    def _continue(
        self, pieces: Sequence[Piece], first: Tensor, mask: Tensor, length: Tensor, cache: Any
    ) -> Iterator[tuple[int, Answer]]:
        """Score pieces on their prefixes' caches; `first` [B, 1, V] are the logits at the prefixes' ends."""
        fed = [piece.tokens[:-1] for piece in pieces]
        logits = first
        if any(fed):
            ids, new = self._stack(fed)
            positions = length[:, None] + torch.arange(ids.shape[1], device=self.device)
            logits = self._forward(ids, torch.cat([mask, new], 1), positions, cache)
            logits = torch.cat([first, logits], 1)
        targets, _ = self._stack([piece.tokens for piece in pieces], width=logits.shape[1])
        return _sums(pieces, *self._pick(logits, targets[:, : logits.shape[1]]), start=0)

    def stream(self, pieces: Sequence[Piece], chunk: int) -> Iterator[tuple[int, Answer]]:
        """Feed pieces from an empty cache, `chunk` (at least 2) tokens at a time, under the budget in between."""
        longest = max(len(piece.tokens) - 1 for piece in pieces)
        width = longest + (longest % chunk == 1)  # no chunk of one column
        rows, valid = self._stack([piece.tokens[:-1] for piece in pieces], width=width)
        targets, _ = self._stack([piece.tokens[1:] for piece in pieces], width=width)
        cache = self.cache(valid.sum(-1))
        picked: list[tuple[Tensor, Tensor]] = []
        for start in range(0, width, chunk):
            end = min(start + chunk, width)
            positions = torch.arange(start, end, device=self.device).expand(len(pieces), -1)
            logits = self._forward(rows[:, start:end], valid[:, :end], positions, cache)
            picked.append(self._pick(logits, targets[:, start:end]))
        self.held(len(pieces), cache)
        logps, hits = (torch.cat(parts, 1) for parts in zip(*picked, strict=True))
        yield from _sums(pieces, logps, hits, start=1)

    def _pick(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Take the targets' log-probabilities, and whether each is the likeliest, both [B, T]."""
        logp = F.log_softmax(logits, -1, dtype=self.softmax_dtype)
        return logp.gather(-1, targets[..., None]).squeeze(-1), logits.argmax(-1) == targets

    def _stack(self, rows: Sequence[Tokens], left: bool = False, width: int = 2) -> tuple[Tensor, Tensor]:
        """Pad rows to one length of at least `width`: ids and mask, [B, T]."""
        width = max(width, *(len(row) for row in rows))
        ids = torch.full((len(rows), width), self.pad)
        mask = torch.zeros_like(ids)
        for i, row in enumerate(rows):
            where = slice(width - len(row), width) if left else slice(0, len(row))
            ids[i, where], mask[i, where] = torch.tensor(row, dtype=torch.long), 1
        return ids.to(self.device), mask.to(self.device)

    def _forward(self, ids: Tensor, mask: Tensor, positions: Tensor, cache: Any, last: bool = False) -> Tensor:
        """Run the model on `cache`: logits of every column, or of the last, [B, T or 1, V]."""
        dtype = self.autocast
        with torch.no_grad(), torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not None):
            out = self.model(
                input_ids=ids,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1 if last else 0,
            )
        return out.logits[:, -1:] if last else out.logits


def _sums(pieces: Sequence[Piece], logps: Tensor, hits: Tensor, start: int) -> Iterator[tuple[int, Answer]]:
    """Sum over each piece's answer; column 0 predicts the token at `start` of the piece."""
    for row, piece in enumerate(pieces):
        end = len(piece.tokens) - start
        answer = slice(end - piece.scored, end)
        yield piece.place, (float(logps[row, answer].double().sum()), bool(hits[row, answer].all()))
