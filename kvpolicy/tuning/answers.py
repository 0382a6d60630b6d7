"""An answer that is run over the full cache of its prompt, with the attention of some layers replaced."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from kvpolicy.engine.attention import attend
from kvpolicy.hf.cache import PolicyCache
from kvpolicy.hf.cache_names import cache_argument
from kvpolicy.hf.passing_cache import PassingCache
from kvpolicy.statistics import Forward
from kvpolicy.statistics.windows import Past, ScoreTransform
from kvpolicy.tuning.peak import LOGITS, ROW_NBYTES, ROWS

T = TypeVar("T")

Attention = Callable[[Tensor, Tensor, Tensor, ScoreTransform], Tensor]
"""Attends from an answer's queries [1, Hq, M, D], keys and values [1, H, M, D]: [1, Hq, M, D]."""

Changes = Mapping[int, Attention]
"""The attention of some layers, by their indices in the model."""


class AnswerCache(PassingCache):
    """Cache that an answer's forward takes; each row is the answer with other changes."""

    def __init__(self, cache: PolicyCache, full: Mapping[int, Past], rows: Sequence[Changes]) -> None:
        """Read a prompt's cache.

        Args:
            cache: A cache that has seen the prompt.
            full: All of the prompt in each layer that a policy manages.
            rows: The changes of each row.
        """
        super().__init__(cache.layers, rows=len(rows))
        self._full = full
        self._changes = rows

    def attend(
        self,
        layer_idx: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        valid: Tensor | None,
        transform: ScoreTransform,
        forward: Forward | None = None,
    ) -> Tensor:
        """Attend from the answer to all of the prompt and causally to itself, or as a row's change says."""
        out = torch.empty_like(q)
        owner = self.owner(layer_idx)
        changed = [row for row, changes in enumerate(self._changes) if owner in changes]
        # Rows with no change so far are equal, so that one of them is computed for all.
        fresh = [row for row, changes in enumerate(self._changes) if min(changes, default=layer_idx) >= layer_idx]
        others = [row for row in range(len(self._changes)) if row not in changed and row not in fresh]
        same = [row for row in fresh if row not in changed]
        if same:
            out[same] = over(self._full[owner])(q[same[:1]], k[same[:1]], v[same[:1]], transform)
        if others:
            out[others] = over(self._full[owner])(q[others], k[others], v[others], transform)
        # Rows that share a change of this layer are computed together.
        shared: dict[Attention, list[int]] = {}
        for row in changed:
            shared.setdefault(self._changes[row][owner], []).append(row)
        for attention, some in shared.items():
            out[some] = attention(q[some], k[some], v[some], transform)
        return out


def over(past: Past) -> Attention:
    """Attention to some slots [1, H, S, D], in every row, and causally to the answer itself."""

    def run(q: Tensor, k: Tensor, v: Tensor, transform: ScoreTransform) -> Tensor:
        return attend(q, k, v, transform, _expanded(past.to(q.device), len(q)), None, False)[0]

    return run


def disturbed(past: Past, size: float, generator: torch.Generator) -> Attention:
    """Attention as `over`, with noise of relative norm `size` added to the output of each token and query head."""

    def run(q: Tensor, k: Tensor, v: Tensor, transform: ScoreTransform) -> Tensor:
        out = over(past)(q, k, v, transform)
        noise = torch.randn(out.shape, generator=generator, dtype=torch.float32, device="cpu").to(out.device)
        length = size * out.float().norm(dim=-1, keepdim=True) / noise.norm(dim=-1, keepdim=True)
        return (out.float() + noise * length).to(out.dtype)

    return run


def scored_tokens(answer: Tensor) -> Tensor:
    """The tokens of an answer [M] for which predictions are compared, [max(M - 1, 1)].

    The first token of an answer is predicted by the prompt, which no compression changes. The predictions of the others
    are compared, which all but the last of them make; of a single token, the prediction that it makes.

    Examples:
        >>> scored_tokens(torch.tensor([7, 8, 9])), scored_tokens(torch.tensor([7]))
        (tensor([7, 8]), tensor([7]))
    """
    return answer[: max(len(answer) - 1, 1)]


class Answer:
    """An answer over the full cache of its prompt, of which changes are measured."""

    def __init__(self, model: nn.Module, cache: PolicyCache, full: Mapping[int, Past], answer: Tensor) -> None:
        """Run the answer without a change.

        Args:
            model: The model, with the cache's policy attached.
            cache: A cache that has seen the prompt.
            full: All of the prompt in each layer that a policy manages.
            answer: Token ids, [M].
        """
        self._model: Any = model
        self._cache = cache
        self._full = full
        self._ids = scored_tokens(answer)
        self._unchanged = self._predictions([{}])

    def kls(self, rows: Iterable[tuple[T, Changes]]) -> Iterator[tuple[T, float]]:
        """Measure what changes, each made alone, do to the predictions of the answer.

        Args:
            rows: Changes, each with its name.

        Yields:
            The name, and KL(unchanged || changed) in nats, mean over `scored_tokens`.
        """
        layer = max(past.keys.nbytes + past.values.nbytes for past in self._full.values())
        most = min(max(LOGITS // self._unchanged.numel(), 1), max(ROW_NBYTES // layer, 1), ROWS)
        rows = iter(rows)
        while some := [*islice(rows, most)]:
            changed = self._predictions([changes for _, changes in some])
            kls = (self._unchanged.exp() * (self._unchanged - changed)).sum(-1).mean(-1).tolist()
            yield from zip((name for name, _ in some), kls, strict=True)

    def _predictions(self, rows: Sequence[Changes]) -> Tensor:
        """Logarithms of probabilities, [rows, M, vocabulary] fp64."""
        cache = AnswerCache(self._cache, self._full, rows)
        device = self._model.get_input_embeddings().weight.device
        ids = self._ids.to(device).expand(len(rows), -1)
        out = self._model(input_ids=ids, **cache_argument(self._model, cache), use_cache=True)
        return out.logits.double().log_softmax(-1)


def _expanded(past: Past, rows: int) -> Past:
    """The same slots for each of several rows."""
    return Past(*(None if t is None else t.expand(rows, *[-1] * (t.dim() - 1)) for t in past))  # pyright: ignore
