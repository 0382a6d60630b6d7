"""Scores of heads by the probe of RazorAttention: which of them find an earlier copy of a random text."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from kvpolicy.calibration.listener import check_finite, listening
from kvpolicy.calibration.suitable import check_heads
from kvpolicy.protocols import View
from kvpolicy.statistics import AttentionRows, ReducedRows, Results
from kvpolicy.text.errors import KVPolicyError, KVPolicyWarning
from kvpolicy.text.validation import check_size

RANDOM = 2500
REPEATS = 4
"""Random tokens, and how often they stand in the text, as in the paper."""

ECHO = 0.01
INDUCTION = 0.14
"""Shares of all KV heads that retrieve by each score, as in the paper."""


_CLEAR = 0.1
"""Attention that a head gives to copies at least if it finds them, and twice what even attention gives."""


class EchoScores(NamedTuple):
    """Attention of the KV heads of a layer in a repeated text.

    Attributes:
        echo: Attention to the earlier copies of the same token, [H] fp64.
        induction: Attention to the tokens behind them, [H] fp64.
    """

    echo: Tensor
    induction: Tensor


def echo_scores(
    model: nn.Module, *, random: int | None = None, repeats: int = REPEATS, seed: int = 0, progress: bool = False
) -> dict[int, EchoScores]:
    """How much each KV head attends to earlier copies of a token, and to what followed them, without gradients.

    The text is the token that begins texts, if the config of the model names one, and `random` random tokens, which are
    repeated. From every token that is no part of the first copy, the attention to all earlier copies of it is summed,
    and that to the tokens which follow them. A score of a query head is the mean over these tokens, and the score of a
    KV head is the largest of its query heads. Attention is that of the model, with its softcap and its sinks.

    Args:
        model: A causal language model without a policy attached.
        random: Random tokens, which are distinct as far as the vocabulary has as many; None for 2,500, or as many as
            the model's positions have room for.
        repeats: How often they stand in the text.
        seed: Seed of the tokens.
        progress: Whether to show a progress bar.

    Returns:
        The scores of each layer that a policy manages, on the CPU, by the index of the layer.

    Raises:
        KVPolicyError: If the model is not supported, has a policy attached, has fewer positions than the text has
            tokens, or produces numbers that are not finite; or if there are fewer than 2 tokens or repeats.

    Examples:
        >>> import kvpolicy
        >>> scores = echo_scores(kvpolicy.tiny()[0], random=20, repeats=3)
        >>> len(scores), scores[0].echo.shape, scores[0].induction.shape
        (8, torch.Size([4]), torch.Size([4]))

    Source:
        RazorAttention (arXiv:2407.15891), and the choice of heads in mindspore-gs, from descriptions of both.
        Differences: the attention to several copies is added (where it is divided by their number, heads keep their
        order if they attend to copies alike); tokens are distinct, so that the same token is always a copy, and
        special tokens of the config are not drawn; the text is shortened to the positions of the model. Attention is
        computed a few queries at a time, and never held whole.
    """
    check_heads(model)
    random = random_tokens(model, random, repeats)
    ids, first = repeated_text(model, random, repeats, seed)
    taken: dict[int, Tensor] = {}

    def look(seen: Results, view: View) -> None:
        sums = seen[ReducedRows][0, :, :2].double().cpu()
        taken[view.layer_idx] = sums.unflatten(0, (view.positions.shape[1], -1))

    asks = (ReducedRows(_Echoes(first=first, random=random)),)
    with tqdm(total=1, desc="heads", disable=not progress) as bar, listening(model, asks, look) as run:
        run(ids)
        bar.update()
    queries = random * (repeats - 1)
    found: dict[int, EchoScores] = {}
    for layer, sums in taken.items():
        check_finite("scores", f"layer {layer}", sums)
        echo, induction = (sums / queries).amax(1).unbind(-1)
        found[layer] = EchoScores(echo, induction)
    return found


def ranked_scores(
    scores: Mapping[int, EchoScores], *, echo: float = ECHO, induction: float = INDUCTION
) -> dict[int, Tensor]:
    """One score of each KV head, by which heads can be compared, of its two scores.

    The score is 1 minus the smallest share of all heads that, divided between both scores in the ratio of `echo` to
    `induction`, contains the head. So the heads of a score above `1 - echo - induction` are the best `echo` of all
    heads by the one score and the best `induction` by the other.

    Args:
        scores: The scores of each layer.
        echo: Share of the heads that retrieve by the echo score.
        induction: Share of the heads that retrieve by the induction score.

    Returns:
        The scores of each layer, [H] fp64.

    Examples:
        >>> found = EchoScores(torch.tensor([0.1, 0.9, 0.2, 0.3]), torch.tensor([0.8, 0.1, 0.7, 0.6]))
        >>> ranked_scores({0: found}, echo=0.25, induction=0.25)[0].tolist()
        [1.0, 1.0, 0.5, 0.5]

    Source:
        RazorAttention keeps the best 1 % of the heads by the echo score and the best 14 % by the induction score.
        Difference: their ratio holds at any number of heads, so that `duo:sparsity` may be chosen. Where a head is
        among the best by both scores, `duo` fills its place with the next head. Of equal scores the earlier layer and
        the lower head rank first, as in `duo`.
    """
    check_shares(echo, induction)
    total = echo + induction
    layers = sorted(scores)
    heads = [len(scores[layer].echo) for layer in layers]
    best = torch.full((sum(heads),), math.inf, dtype=torch.float64, device="cpu")
    for share, name in ((echo, "echo"), (induction, "induction")):
        if not share:
            continue
        every = torch.cat([getattr(scores[layer], name).double() for layer in layers])
        rank = every.argsort(descending=True, stable=True).argsort().double()
        best = torch.minimum(best, rank / len(every) * (total / share))
    return dict(zip(layers, (1 - best).split(heads), strict=True))


def repeated_text(model: nn.Module, random: int, repeats: int, seed: int) -> tuple[Tensor, int]:
    """The token ids of the text, [n] int64, and the position of the first random one, which is 0 or 1."""
    config: Any = model.config.get_text_config()  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]
    named = [getattr(config, f"{name}_token_id", None) for name in ("bos", "eos", "pad")]
    several = (found if isinstance(found, list | tuple) else [found] for found in named if found is not None)
    special = {int(each) for found in several for each in found}
    usable = torch.tensor([token for token in range(int(config.vocab_size)) if token not in special], device="cpu")
    generator = torch.Generator().manual_seed(seed)
    rounds = -(-random // len(usable))
    drawn = torch.cat([usable[torch.randperm(len(usable), generator=generator, device="cpu")] for _ in range(rounds)])[
        :random
    ]
    begins = [] if not isinstance(named[0], int) else [named[0]]
    return torch.cat([torch.tensor(begins, dtype=torch.int64, device="cpu"), drawn.repeat(repeats)]), len(begins)


@dataclass(frozen=True)
class _Echoes:
    """Sums, over queries, the attention to copies (in place of the first token) and behind them (of the second).

    Attributes:
        first: Position of the first random token.
        random: Random tokens.
    """

    first: int
    random: int

    def reduce(self, rows: AttentionRows) -> Tensor:
        """See `RowReducer`. The text is one row, and its tokens are in order."""
        weights = rows.weights
        at = torch.arange(weights.shape[-1], device=weights.device)
        back = rows.queries[0, :, None] - at  # [W, N]: how far a token is behind the query
        sums = weights.new_zeros(*weights.shape[:2], weights.shape[-1])
        for place in (0, 1):
            copy = back + place  # how far the copy is behind, which a token is or follows
            # A copy before the first random token is none.
            seen = (copy >= self.random) & (copy % self.random == 0) & (at - place >= self.first)
            sums[..., place] = (weights * seen).sum((-2, -1))
        return sums


def random_tokens(model: nn.Module, random: int | None, repeats: int) -> int:
    """How many random tokens the text has, checked against the positions of the model."""
    repeats = check_size("repeats", repeats, 2)
    config: Any = model.config.get_text_config()  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]
    limit = getattr(config, "max_position_embeddings", None)
    most = (limit - 1) // repeats if isinstance(limit, int) else RANDOM
    if random is None:
        random = min(RANDOM, most)
    if check_size("random", random, 2) > most and isinstance(limit, int):
        raise KVPolicyError(
            f"The random tokens must be at most {most}, so that {repeats} copies fit into the {limit} positions of the "
            f"model, got {random}; try {most}, or fewer repeats."
        )
    return random


def warn_if_even(found: Mapping[int, EchoScores], random: int, repeats: int) -> None:
    """Warn of scores that are near those of a head that attends to every token alike: their order says little."""
    best = max((float(part.max()) for scores in found.values() for part in scores), default=0.0)
    even = sum((query // random) / (query + 1) for query in range(random, random * repeats)) / (random * (repeats - 1))
    if best < max(_CLEAR, 2 * even):
        warnings.warn(
            f"No head finds the copies of {random} random tokens: the best gives them {best:.3f} of its attention, "
            f"where even attention gives {even:.3f}, so expect scores that say little; try fewer random tokens, or the "
            "probe reach.",
            KVPolicyWarning,
            stacklevel=5,
        )


def check_shares(echo: float, induction: float) -> None:
    """Refuse shares that are out of range."""
    if not (0 <= echo <= 1 and 0 <= induction <= 1 and 0 < echo + induction <= 1):
        raise KVPolicyError(
            "The shares of heads by echo and induction must be from 0 to 1, and their sum more than 0 and at most 1, "
            f"got {echo} and {induction}; try {ECHO} and {INDUCTION}."
        )
