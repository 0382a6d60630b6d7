"""KVzip: keep the tokens that the model needs to repeat the context."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from kvpolicy.protocols import SMALLEST_HEAD, DecodeMode, HeadShape, Selector, State, View
from kvpolicy.selectors.common import first_tokens, keep_always
from kvpolicy.statistics import Replay, Results, Statistic
from kvpolicy.text.errors import KVPolicyError, KVPolicyTypeError
from kvpolicy.text.strategy import least, strategy

_TEXTS = ("instruction", "later", "reply")


class Replayed(NamedTuple):
    """The score of each slot, [B, H, S] fp32, as minus its reciprocal; 0 for a token that was not replayed."""

    score: Tensor


@strategy
class KVzip(Selector):
    """Keep the tokens that the model attends to when it repeats the context.

    After a prompt, the context is run through the model once more, in chunks, and is not stored. A token's score is the
    largest attention that it receives from this replay. No question takes part in the scores, so that the cache serves
    questions that come later. Later prompts and generated tokens are not replayed, and rank above what is.

    Args:
        chunk: Tokens of the context that are replayed at a time.
        sinks: First tokens of a row, which are in the softmax of every chunk and always kept; at most half the budget
            is kept so.
        instruction: Token ids before the first chunk, such as a request to repeat the context, written with dashes
            between them; by default none, so that the context alone is replayed.
        later: Token ids before every later chunk, followed by the last `overlap` tokens of the chunk before; by
            default as `instruction`.
        reply: Token ids between those and the chunk, such as the template of an answer.
        overlap: How many tokens of the chunk before a later instruction repeats; none without an instruction.
        plus: Multiply attention by the norm of the token's value behind the output projection, and divide it by the
            norm of the input of attention, behind its normalization, at the replayed token (KVzip+).
        decode: `evict`: generated tokens replace the tokens of lowest score, and then the oldest generated ones.
            `grow`: they are kept in addition to the budget, as in the paper.

    Raises:
        KVPolicyError: If a number is out of range, or token ids are not written as numbers with dashes between them.
        KVPolicyTypeError: If token ids are no string.

    Examples:
        >>> from kvpolicy import Policy
        >>> Policy.parse("kvzip:chunk=512:instruction=91-7@0.3").replay.first
        (91, 7)

    Source:
        KVzip (arXiv:2505.23416), Section 3, and its authors' code; `plus` is KVzip+ of kvpress. Differences:

        - Layers and heads keep equally many tokens unless an allocator says otherwise, as with the authors' option
          `uniform`. Their figures cut all scores of all layers and heads at one threshold.
        - `attach` has no tokenizer, so the instruction is token ids and empty by default.
        - Sinks are a number of tokens, 4 as in kvpress. The authors exempt the whole system prompt.
        - Chunks have 2,048 tokens, as in kvpress (the authors' code: 2,000). They are counted from the first token of a
          row, sinks included, and sinks are in the softmax once.
        - The newest token is always kept.
        - The softmax is fp32. The code has it in the dtype of the model.
        - Ties go to the earlier position. The code drops all that tie at the threshold.
        - Padded rows are divided into chunks as they would be alone.
    """

    chunk: int = least(1, 2048)
    sinks: int = least(0, 4)
    instruction: str = ""
    later: str = ""
    reply: str = ""
    overlap: int = least(0, 8)
    plus: bool = False
    decode: DecodeMode = "evict"
    compares_heads: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name in _TEXTS:
            _ids(name, getattr(self, name))

    @property
    def statistics(self) -> tuple[Statistic[Any], ...]:
        """A replay of the context."""
        instruction, later, reply = (_ids(name, getattr(self, name)) for name in _TEXTS)
        replay = Replay(
            chunk=self.chunk,
            sinks=self.sinks,
            first=instruction,
            later=later or instruction,
            reply=reply,
            overlap=self.overlap,
            norms=self.plus,
        )
        return (replay,)

    def alloc(
        self, batch: int, heads: int, slots: int, device: torch.device | str, head: HeadShape = SMALLEST_HEAD
    ) -> State:
        return Replayed(torch.zeros(batch, heads, slots, dtype=torch.float32, device=device))

    def observe(self, state: Replayed, seen: Results, view: View) -> State:
        """Rank the tokens that were replayed; others keep the rank that they have."""
        scores = seen.get(Replay)
        if scores is None:
            return state
        largest = view.ranks.largest(scores)
        # The reciprocal has the order of the scores and the precision of each, and leaves 0 and above to the tokens
        # that were not replayed.
        score = -largest.clamp_min(torch.finfo(torch.float32).tiny).reciprocal()
        return Replayed(torch.where(largest < 0, state.score, score))

    def priority(self, state: Replayed, view: View) -> Tensor:
        """Replayed tokens by score, above them others by position; sinks and the newest token are always kept."""
        # The score of others is 0, to which their position is added: one operation converts and chooses.
        priority = torch.addcmul(state.score, state.score >= 0, view.positions)
        return view.keep_newest(keep_always(priority, first_tokens(view, self.sinks)))

    def attention(self, state: Replayed) -> Tensor:
        """The largest attention of the replay, and 1 for tokens that were not replayed: [B, H, N]."""
        scored = state.score < 0
        return torch.where(scored, -state.score.masked_fill(~scored, -1).reciprocal(), 1)


def _ids(name: str, text: str) -> tuple[int, ...]:
    """Token ids written with dashes between them."""
    if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise KVPolicyTypeError(f"KVzip.{name} must be a string of token ids, got {text!r}; try '128000-882'.")
    parts = text.split("-") if text else []
    if not all(part.isascii() and part.isdigit() and len(part) < 10 for part in parts):
        raise KVPolicyError(f"KVzip.{name} must be token ids with dashes between them, got {text!r}; try 128000-882.")
    return tuple(map(int, parts))
