"""Log-likelihoods under a policy: a context is prefilled and compressed, and answers are scored on the kept tokens.

Every forward pass has at least two columns; a single token is padded. A forward pass of one column would be a decode
step, in which the cache compresses differently, and scores would depend on the other rows of the batch.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from kvpolicy.hf.cache_names import cache_argument
from kvpolicy.hf.rotary_lookup import least_with_angles
from kvpolicy.hf.text_angles import angles_of
from kvpolicy.text.errors import KVPolicyError
from kvpolicy_lm_eval.prefixes import Tokens, group_by_prefix

T = TypeVar("T")

Answer = tuple[float, bool]
"""The log-likelihood of an answer, and whether greedy decoding would generate it."""


class Piece(NamedTuple):
    """The part of a request after the prefilled prefix.

    Attributes:
        request: The index of the request.
        tokens: Its tokens after the prefix; they end with the answer.
        scored: The number of tokens of the answer.
    """

    request: int
    tokens: Tokens
    scored: int


Request = tuple[Any, list[int], list[int]]
"""A key, and the tokens of a context and of the answer that is scored behind it."""

Groups = dict[Tokens, list[Piece]]
"""The pieces of each prefix, the longest prefix first. The empty prefix has the requests without a prefix."""


def tokens_of(request: Request) -> int:
    """Tokens of the context and the answer of a request."""
    return len(request[1]) + len(request[2])


def split(requests: Sequence[Request], max_length: int, holdback: int) -> Groups:
    """Split requests into prefixes, which are compressed, and pieces, which are scored on them.

    Args:
        requests: The requests.
        max_length: The context length of the model. Longer requests are truncated on the left, as in lm-eval.
        holdback: The number of tokens at the end of a context that are fed with the answer.
    """
    groups: defaultdict[Tokens, list[Piece]] = defaultdict(list)
    for index, (_, context, answer) in enumerate(requests):
        if not 0 < len(answer) <= max_length:
            raise KVPolicyError(
                f"An answer must have between 1 and {max_length} tokens to be scored, got {len(answer)}; try a larger "
                "max_length."
            )
        tokens = tuple((context + answer)[-(max_length + 1) :])
        cut = max(len(tokens) - len(answer) - holdback, 0)
        groups[tokens[:cut]].append(Piece(index, tokens[cut:], len(answer)))
    return {prefix: groups[prefix] for prefix in sorted(groups, key=len, reverse=True)}


def by_angles(groups: Groups, config: Any) -> list[tuple[int, Groups]]:
    """Requests whose texts have the same angles of rotary embeddings, where these depend on the length.

    Returns:
        The shortest text with the angles of each group, and its requests.
    """
    found: defaultdict[int, Groups] = defaultdict(dict)
    for prefix, pieces in groups.items():
        for piece in pieces:
            fed = len(prefix) + len(piece.tokens) - 1
            found[least_with_angles(config, fed)].setdefault(prefix, []).append(piece)
    return sorted(found.items(), reverse=True)


def with_prefixes(groups: Groups) -> list[Piece]:
    """Return the pieces with their prefixes prepended, the longest first."""
    pieces = [Piece(p.request, prefix + p.tokens, p.scored) for prefix, some in groups.items() for p in some]
    return sorted(pieces, key=lambda piece: len(piece.tokens), reverse=True)


def reported_lengths(groups: Groups, rolling: bool) -> list[int]:
    """Return the tokens in each cache that is reported: those of a prefix, or all that are fed if there is none."""
    without_prefix = with_prefixes(groups if rolling else {(): groups.get((), [])})
    prefixes = [] if rolling else [len(prefix) for prefix in groups if prefix]
    return [len(piece.tokens) - 1 for piece in without_prefix] + prefixes


def split_behind(
    groups: Groups, least: int, holdback: int, known: Sequence[int | None]
) -> tuple[list[tuple[Tokens, list[Piece]]], Groups]:
    """Split requests by prefixes that their contexts have in common.

    At least one token of a context is fed with its answer, as is what is held back.

    Args:
        groups: The requests, by the prefixes that would be compressed for each alone.
        least: The fewest tokens of a common prefix.
        holdback: The number of tokens at the end of a context that are fed with the answer.
        known: The tokens that the context of each request shared before, 0 for none; None if it is new.

    Returns:
        Prefixes with the pieces behind them, and the requests that share none.
    """
    every = [(prefix, piece) for prefix, pieces in groups.items() for piece in pieces]
    limits = [max(len(prefix) + min(holdback - 1, 0), 0) for prefix, _ in every]
    contexts = [prefix[:limit] for (prefix, _), limit in zip(every, limits, strict=True)]
    found = group_by_prefix(contexts, least, [known[piece.request] for _, piece in every])
    shared: list[tuple[Tokens, list[Piece]]] = []
    alone: Groups = {}
    for common, members in found:
        if not common:
            for prefix, piece in (every[member] for member in members):
                alone.setdefault(prefix, []).append(piece)
            continue
        size = len(common)
        pieces = [
            Piece(piece.request, prefix[size:] + piece.tokens, piece.scored)
            for prefix, piece in (every[member] for member in members)
        ]
        shared.append((common, pieces))
    return shared, {prefix: alone[prefix] for prefix in sorted(alone, key=len, reverse=True)}


def batches(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """Some items in groups of `size`; the last one may have fewer."""
    return (items[i : i + size] for i in range(0, len(items), size))


@dataclass(frozen=True, kw_only=True, slots=True)
class Scorer:
    """Scores pieces on caches under a policy.

    Args:
        model: A causal language model that the policy is attached to.
        new_cache: Creates an empty cache, given the prompt lengths, [B].
        on_filled: Is called with the number of rows and the cache, when the cache holds the tokens to report.
        pad: The token id of padding, which no valid token attends to.
        device: The device of the inputs.
        autocast: The dtype of the forward passes; None for the model's.
        softmax_dtype: The dtype of the log-probabilities; None for that of the logits.
    """

    model: Any
    new_cache: Callable[[Tensor], Any]
    on_filled: Callable[[int, Any], None]
    pad: int
    device: torch.device
    autocast: torch.dtype | None = None
    softmax_dtype: torch.dtype | None = None

    def shared(self, prefixes: Sequence[Tokens], groups: Groups, batch: int) -> Iterator[tuple[int, Answer]]:
        """Prefill and compress `prefixes` as one batch, then score their pieces in batches of size `batch`."""
        ids, mask = self._stack(prefixes, left=True)
        length = mask.sum(-1)
        cache = self.new_cache(length)
        first = self.forward(ids, mask, (mask.cumsum(-1) - 1).clamp(min=0), cache, last=True)
        self.on_filled(len(prefixes), cache)
        pairs = [(row, piece) for row, prefix in enumerate(prefixes) for piece in groups[prefix]]
        pairs.sort(key=lambda pair: len(pair[1].tokens), reverse=True)
        for start in range(0, len(pairs), batch):
            rows = torch.tensor([row for row, _ in pairs[start : start + batch]], device=self.device)
            pieces = [piece for _, piece in pairs[start : start + batch]]
            # Scoring adds tokens to the cache, so each batch but the last works on a copy.
            batch_cache = copy.deepcopy(cache) if start + batch < len(pairs) else cache
            batch_cache.batch_select_indices(rows)
            yield from self._continue(pieces, first[rows], mask[rows], length[rows], batch_cache)

    def behind(self, prefix: Tokens, pieces: Sequence[Piece], batch: int) -> Iterator[tuple[int, Answer]]:
        """Prefill and compress a prefix once, then score what follows it, in rows that share it, `batch` at a time."""
        ids, mask = self._stack([prefix], left=True)
        length = mask.sum(-1)
        cache = self.new_cache(length)
        first = self.forward(ids, mask, (mask.cumsum(-1) - 1).clamp(min=0), cache, last=True)
        self.on_filled(1, cache)
        longest_first = sorted(pieces, key=lambda piece: len(piece.tokens), reverse=True)
        for start in range(0, len(pieces), batch):
            some = longest_first[start : start + batch]
            rows = [0] * len(some)
            yield from self._continue(some, first[rows], mask[rows], length[rows], cache.fork(rows, shared=True))

    def forward(self, ids: Tensor, mask: Tensor, positions: Tensor, cache: Any, last: bool = False) -> Tensor:
        """Run the model; return the logits of all columns, [B, T, V], or of the last one, [B, 1, V]."""
        dtype = self.autocast
        with torch.no_grad(), torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not None):
            out = self.model(
                input_ids=ids,
                attention_mask=mask,
                position_ids=positions,
                **cache_argument(self.model, cache),
                use_cache=True,
                logits_to_keep=1 if last else 0,
            )
        return out.logits[:, -1:] if last else out.logits

    def _continue(
        self, pieces: Sequence[Piece], first: Tensor, mask: Tensor, length: Tensor, cache: Any
    ) -> Iterator[tuple[int, Answer]]:
        """Score pieces on the cache of their prefixes; `first` are the logits at the end of the prefixes, [B, 1, V]."""
        fed = [piece.tokens[:-1] for piece in pieces]
        logits = first
        if any(fed):
            ids, new = self._stack(fed)
            # Padding gets a position of its row, since the largest one decides the angles of some models.
            positions = length[:, None] + new.cumsum(-1) - 1
            logits = self.forward(ids, torch.cat([mask, new], 1), positions, cache)
            logits = torch.cat([first, logits], 1)
        targets, _ = self._stack([piece.tokens for piece in pieces], width=logits.shape[1])
        return _sums(pieces, *self._pick(logits, targets), start=0)

    def stream(self, pieces: Sequence[Piece], chunk: int) -> Iterator[tuple[int, Answer]]:
        """Score pieces from an empty cache; they are fed in chunks of `chunk` tokens, at least 2, and compressed."""
        longest = max(len(piece.tokens) - 1 for piece in pieces)
        width = longest + (longest % chunk == 1)  # one column of padding, so that no chunk has a single column
        rows, valid = self._stack([piece.tokens[:-1] for piece in pieces], width=width)
        targets, _ = self._stack([piece.tokens[1:] for piece in pieces], width=width)
        positions = (valid.cumsum(-1) - 1).clamp(min=0)
        cache = self.new_cache(valid.sum(-1))
        picked: list[tuple[Tensor, Tensor]] = []
        for start in range(0, width, chunk):
            end = min(start + chunk, width)
            logits = self.forward(rows[:, start:end], valid[:, :end], positions[:, start:end], cache)
            picked.append(self._pick(logits, targets[:, start:end]))
        self.on_filled(len(pieces), cache)
        logps = torch.cat([part for part, _ in picked], 1)
        hits = torch.cat([part for _, part in picked], 1)
        yield from _sums(pieces, logps, hits, start=1)

    def _pick(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log-probability of each target, and whether it is the most probable token, both [B, T]."""
        logp = F.log_softmax(logits, -1, dtype=self.softmax_dtype)
        return logp.gather(-1, targets[..., None]).squeeze(-1), logits.argmax(-1) == targets

    def _stack(self, rows: Sequence[Tokens], left: bool = False, width: int = 2) -> tuple[Tensor, Tensor]:
        """Pad rows to the same length, at least `width`; return token ids and the attention mask, both [B, T]."""
        width = max(width, *(len(row) for row in rows))
        ids = torch.full((len(rows), width), self.pad, device="cpu")
        mask = torch.zeros_like(ids)
        for index, row in enumerate(rows):
            columns = slice(width - len(row), width) if left else slice(0, len(row))
            ids[index, columns] = torch.tensor(row, dtype=torch.long, device="cpu")
            mask[index, columns] = 1
        return ids.to(self.device), mask.to(self.device)


def score_texts(
    requests: Sequence[Request], scorer: Scorer, max_length: int, chunk: int, batch: int
) -> Iterator[tuple[int, Answer]]:
    """Score whole texts, which are fed in chunks.

    Args:
        requests: The texts; what precedes them is their context.
        scorer: Scores on caches under the policy.
        max_length: The context length of the model.
        chunk: Tokens per forward pass.
        batch: Rows of a batch.

    Yields:
        The index of each request, and its answer.
    """
    for least, groups in by_angles(split(requests, max_length, 0), scorer.model.config):
        with angles_of(scorer.model, least):
            for some in batches(with_prefixes(groups), batch):
                yield from scorer.stream(some, chunk)


class Prefixes(NamedTuple):
    """The prefixes that contexts share.

    Attributes:
        least: The fewest tokens of a prefix.
        known: The tokens that the context of each request shared before, 0 for none; None if it is new.
        on_found: Is called with the tokens that contexts share, 0 for none, by the indices of their requests.
    """

    least: int
    known: Sequence[int | None]
    on_found: Callable[[dict[int, int]], None]


def score_answers(
    requests: Sequence[Request],
    scorer: Scorer,
    whole: Scorer,
    max_length: int,
    holdback: int,
    batch: int,
    prefixes: Prefixes | None = None,
) -> Iterator[tuple[int, Answer]]:
    """Score answers behind their compressed contexts, and those without a context to compress.

    Args:
        requests: The requests.
        scorer: Scores on caches under the policy.
        whole: Scores on caches from which nothing is evicted.
        max_length: The context length of the model.
        holdback: The number of tokens at the end of a context that are fed with the answer.
        batch: Rows of a batch.
        prefixes: Which prefixes contexts share; None if they share none.

    Yields:
        The index of each request, and its answer.
    """
    for least, groups in by_angles(split(requests, max_length, holdback), scorer.model.config):
        with angles_of(scorer.model, least):
            without_prefix = groups.pop((), [])
            if prefixes is not None:
                shared, groups = split_behind(groups, prefixes.least, holdback, prefixes.known)
                found = [*shared, ((), [piece for pieces in groups.values() for piece in pieces])]
                prefixes.on_found({piece.request: len(prefix) for prefix, pieces in found for piece in pieces})
                for prefix, pieces in shared:
                    yield from scorer.behind(prefix, pieces, batch)
            for some in batches(list(groups), batch):
                yield from scorer.shared(some, groups, batch)
            # The other answers are scored before anything is compressed.
            for some in batches(without_prefix, batch):
                yield from whole.stream(some, 2 * max_length)


def _sums(pieces: Sequence[Piece], logps: Tensor, hits: Tensor, start: int) -> Iterator[tuple[int, Answer]]:
    """Sum the log-probabilities of each answer; column 0 predicts the token at index `start` of the piece."""
    for row, piece in enumerate(pieces):
        end = len(piece.tokens) - start
        answer = slice(end - piece.scored, end)
        yield piece.request, (float(logps[row, answer].double().sum()), bool(hits[row, answer].all()))
