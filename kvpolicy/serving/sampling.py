"""The next token of one row: chosen as `generate` would, with random numbers of the row's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvpolicy.serving.grammars import Matcher


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """What a request asks of the choice of tokens, beyond temperature and `top_p`.

    Attributes:
        seed: The random seed, or None.
        top_k: Sample from so many most likely tokens; 0 for all, None for what the model's generation config says.
        min_p: Sample from tokens with at least this part of the largest probability.
        repetition_penalty: Divides the logits of tokens that occur in the prompt or the answer.
        frequency_penalty: Subtracted from a token's logit for each time that it occurs in the answer.
        presence_penalty: Subtracted once if it occurs in the answer.
        logprobs: Most likely tokens whose log probabilities are returned beside that of each token; None for neither.
    """

    seed: int | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logprobs: int | None = None

    def configure(self, config: Any) -> None:
        """Set what `generate` has options for, in a generation config of transformers."""
        if config.do_sample:  # generate warns of what has no effect
            config.top_k = config.top_k if self.top_k is None else self.top_k
            config.min_p = config.min_p if self.min_p is None else self.min_p
        else:
            config.temperature = config.top_p = config.top_k = config.min_p = None
        if self.repetition_penalty is not None:
            config.repetition_penalty = self.repetition_penalty


class LogProb(NamedTuple):
    """The log probability of a chosen token, before temperature and penalties.

    Attributes:
        token: Its id.
        value: Its log probability.
        top: Ids and log probabilities of the most likely tokens.
    """

    token: int
    value: float
    top: list[tuple[int, float]]


class Sampler:
    """Chooses the tokens of one answer, which do not depend on what other rows do.

    Args:
        sampling: What the request asks for.
        prompt: Token ids of the prompt.
        new: The most tokens of the answer.
        processors: The logits processors of transformers for this request.
        is_greedy: Whether the most likely token is taken.
        device: Where logits are.
        matcher: The tokens that the format of the answer allows; None for all.

    Attributes:
        logprobs: The log probabilities of the tokens so far, if the request asks for them.

    Examples:
        >>> sampler = Sampler(Sampling(frequency_penalty=2.0), [0], 2, [], is_greedy=True)
        >>> logits = torch.tensor([0.0, 1.0, 2.0])
        >>> sampler(logits, 2), sampler(logits, 2)
        (2, 1)
    """

    def __init__(
        self,
        sampling: Sampling,
        prompt: Sequence[int],
        new: int,
        processors: Sequence[Any],
        *,
        is_greedy: bool,
        device: torch.device | str = "cpu",
        matcher: Matcher | None = None,
    ) -> None:
        """Nothing is chosen."""
        self.logprobs: list[LogProb] = []
        self._sampling = sampling
        self._processors = processors
        self._is_greedy = is_greedy
        self._matcher = matcher
        self._penalizes = bool(sampling.frequency_penalty or sampling.presence_penalty)
        is_raw = not processors and not self._penalizes and matcher is None
        self._is_plain = is_greedy and is_raw and sampling.logprobs is None
        if self._is_plain:
            return
        self._text = torch.zeros(1, len(prompt) + new, dtype=torch.int64, device=device)
        self._text[0, : len(prompt)] = torch.tensor(prompt, device=device)
        self._start = self._end = len(prompt)
        # With a seed, the first random numbers are those of `torch.manual_seed`, and so of `generate` behind it.
        self._generator = torch.Generator(device)
        if sampling.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(sampling.seed)

    def __call__(self, logits: Tensor, best: int) -> int:
        """Choose the next token.

        Args:
            logits: [V].
            best: The token of the largest one.
        """
        if self._is_plain:
            return best
        raw = logits.float()
        scores = self._penalized(raw)
        if self._matcher is not None:  # first, so that the most likely tokens are those of the allowed ones
            scores = self._matcher.restrict(scores)
        scores = scores[None]
        for processor in self._processors:
            scores = processor(self._text[:, : self._end], scores)
        if self._is_greedy:
            token = int(scores.argmax(-1))
        else:
            token = int(torch.multinomial(scores.softmax(-1), 1, generator=self._generator))
        if self._matcher is not None:
            self._matcher.take(token)
        if self._sampling.logprobs is not None:
            self.logprobs.append(_log_prob(raw, token, self._sampling.logprobs))
        if self._end < self._text.shape[1]:
            self._text[0, self._end] = token
            self._end += 1
        return token

    def _penalized(self, logits: Tensor) -> Tensor:
        """A copy of logits [V], less the penalties of the answer's tokens."""
        if not self._penalizes:
            return logits.clone()
        count = torch.zeros_like(logits)
        new = self._text[0, self._start : self._end]
        count.scatter_add_(0, new, torch.ones_like(new, dtype=count.dtype))
        asked = self._sampling
        return logits - asked.frequency_penalty * count - asked.presence_penalty * (count > 0)


def _log_prob(logits: Tensor, token: int, count: int) -> LogProb:
    all_of_them = logits.log_softmax(-1)
    top = all_of_them.topk(min(count, len(all_of_them)))
    return LogProb(token, float(all_of_them[token]), list(zip(top.indices.tolist(), top.values.tolist(), strict=True)))
