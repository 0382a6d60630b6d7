"""Training sequences as token ids, with a kind for each token that sets its weight in the loss.

The formats are those of `kvpolicy_lm_eval.data.prompts`; here a sequence is filled
up to a length in tokens and asks many questions, for more signal per step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.random import Generator
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from kvpolicy_eval.train.tokenizer import PASSKEY, token_id
from kvpolicy_lm_eval.data.words import CATEGORIES, LABELS, WORDS

NOISE, ANSWER, TEXT, FORMAT = range(4)
LOSS_WEIGHTS = (0.02, 1.0, 0.2, 0.05)
"""Weight in the loss by kind: unpredictable tokens, answers, source text, punctuation."""

_MEMBERS = len(WORDS) // len(CATEGORIES)


class Vocabulary:
    """Token ids of all parts of the formats.

    Args:
        tokenizer: The embedded tokenizer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        """Look up all ids."""

        def ids(parts: Iterable[str]) -> list[int]:
            encoded = [tokenizer.encode(part, add_special_tokens=False) for part in parts]
            assert all(len(token_ids) == 1 for token_ids in encoded), "every part of a format must be one token"
            return [token_ids[0] for token_ids in encoded]

        self.words = ids(WORDS)
        self.digits = ids("0123456789")
        self.labels = ids(LABELS)
        self.equal, self.newline, self.ask, self.colon = ids("=\n?:")
        self.hidden = ids("\n#")
        self.assign = ids([" =", " "])
        self.passkey = ids([PASSKEY])[0]
        self.bos = token_id(tokenizer, "<s>")
        self.eos = token_id(tokenizer, "</s>")


@dataclass(slots=True)
class Row:
    """A sequence under construction: token ids and the kind of each."""

    ids: list[int]
    kinds: list[int] = field(default_factory=lambda: [NOISE])

    def add(self, ids: Sequence[int], kinds: Sequence[int] | int) -> None:
        """Append tokens with a kind each, or with the same kind for all."""
        self.ids += ids
        self.kinds += [kinds] * len(ids) if isinstance(kinds, int) else kinds

    def __len__(self) -> int:
        """Number of tokens."""
        return len(self.ids)


class Sampler:
    """Draws training sequences from a seeded generator.

    Args:
        vocabulary: Token ids of the formats.
        text: Ids of the training sources, one long array.
        rng: Source of all randomness; its state is part of a checkpoint.
    """

    def __init__(self, vocabulary: Vocabulary, text: np.ndarray, rng: Generator) -> None:
        """Store the arguments."""
        self.v = vocabulary
        self.text = text
        self.rng = rng

    def _keys(self, count: int) -> list[int]:
        return [self.v.words[i] for i in self.rng.choice(len(WORDS), count, replace=False)]

    def _value(self, digits: int) -> list[int]:
        if digits == 0:
            return [self.v.words[self.rng.integers(len(WORDS))]]
        return [self.v.digits[d] for d in self.rng.integers(0, 10, digits)]

    def _chunk(self, length: int) -> list[int]:
        start = int(self.rng.integers(0, len(self.text) - length))
        return self.text[start : start + length].tolist()

    def _record(self, row: Row, key: int, value: list[int]) -> None:
        row.add([key, self.v.equal, *value, self.v.newline], [NOISE, FORMAT, *[NOISE] * len(value), FORMAT])

    def _records(self, row: Row, keys: list[int], values: list[list[int]], spare: int) -> None:
        """Append records; source text of about `spare` tokens is inserted between them, in up to 16 parts.

        A long sequence has room for more records than there are keys, so text fills what is left.
        """
        parts = max(1, min(16, spare // 24)) if spare >= 24 else 0
        before = np.sort(self.rng.integers(0, len(keys), parts)).tolist() if parts else []
        for number, (key, value) in enumerate(zip(keys, values, strict=True)):
            for _ in range(before.count(number)):
                row.add([*self._chunk(spare // parts - 1), self.v.newline], TEXT)
            self._record(row, key, value)

    def _question(self, row: Row, key: int, value: list[int], mark: int | None = None) -> None:
        mark = self.v.equal if mark is None else mark
        kinds = [NOISE, NOISE, FORMAT, *[ANSWER] * len(value), FORMAT]
        row.add([self.v.ask, key, mark, *value, self.v.newline], kinds)

    def recall(self, length: int, digits: int, asked: float | None = None) -> Row:
        """Records, followed by questions about them in random order.

        Args:
            length: Tokens to fill.
            digits: Digits of a value; 0 makes the value a word.
            asked: Share of the tokens that are questions; random by default.
        """
        record = max(digits, 1) + 3  # tokens of a record
        question = max(digits, 1) + 4  # tokens of a question with its answer
        share = self.rng.uniform(0.3, 0.6) if asked is None else asked
        room = (length - 1 - max(1, int(length * share / question)) * question) // record
        count = min(room, len(WORDS))
        if self.rng.random() < 0.5:
            count = int(self.rng.integers(max(2, count // 3), count + 1))
        keys = self._keys(count)
        values = [self._value(digits) for _ in keys]
        row = Row([self.v.bos])
        self._records(row, keys, values, max(0, room - len(WORDS)) * record)
        while len(row) + question <= length:
            for i in self.rng.permutation(count)[: -(-(length - len(row)) // question)]:
                self._question(row, keys[i], values[i])
        return row

    def needles(self, length: int, digits: int, passkey: bool = False) -> Row:
        """Source text with hidden records, each of which is queried once at the end."""
        digits = max(digits, 1)
        count = 1 if passkey else int(self.rng.integers(1, 2 + length // 64))
        keys = [self.v.passkey] if passkey else self._keys(count)
        values = [self._value(digits) for _ in keys]
        body = self._chunk(length - 2 - count * (2 * digits + 10))
        cuts = np.sort(self.rng.integers(0, len(body) + 1, count)).tolist()
        row = Row([self.v.bos])
        for start, end, key, value in zip([0, *cuts], cuts, keys, values, strict=False):
            row.add(body[start:end], TEXT)
            row.add([*self.v.hidden, key], NOISE)
            row.add(self.v.assign, FORMAT)
            row.add([*value, self.v.newline], NOISE)
        row.add(body[cuts[-1] :], TEXT)
        row.add([self.v.newline], NOISE)
        for i in self.rng.permutation(count):
            self._question(row, keys[i], values[i])
        return row

    def few_shot(self, length: int) -> Row:
        """Labeled words at the start, and questions about other words of the same categories far after them.

        Each block of questions asks about a category once, and blocks are
        separated by filler, so that an answer must be retrieved from far back.
        """
        classes = int(self.rng.integers(2, 4 + min(3, length // 128)))
        chosen = self.rng.choice(len(CATEGORIES), classes, replace=False)
        labels = [self.v.labels[i] for i in self.rng.choice(len(self.v.labels), classes, replace=False)]
        row = Row([self.v.bos])
        seen = set[int]()
        for c in self.rng.permutation(np.repeat(np.arange(classes), 2 if length < 128 else 3)).tolist():
            word = self._member(int(chosen[c]))
            kind = ANSWER if c in seen else NOISE
            row.add([word, self.v.colon, labels[c], self.v.newline], [NOISE, FORMAT, kind, FORMAT])
            seen.add(c)
        blocks = 1 + int(self.rng.integers(0, 1 + min(4, length // 96)))
        filler = (length - len(row)) // blocks - 5 * classes
        for _ in range(blocks):
            self._fill(row, filler)
            for c in self.rng.permutation(classes):
                self._question(row, self._member(int(chosen[c])), [labels[c]], self.v.colon)
        return row

    def _member(self, category: int) -> int:
        return self.v.words[category * _MEMBERS + int(self.rng.integers(_MEMBERS))]

    def _fill(self, row: Row, length: int) -> None:
        """Append about `length` tokens of source text or, one time in three, of records."""
        if length < 1:
            return
        if self.rng.random() < 2 / 3:
            row.add(self._chunk(length), TEXT)
            row.ids[-1] = self.v.newline
            return
        for key in self._keys(min(length // 7, len(WORDS))):
            self._record(row, key, self._value(4))

    def hot_keys(self, length: int, digits: int) -> Row:
        """Records with repeated questions about a few of them, then fresh records, then the hot ones again."""
        record = max(digits, 1) + 3  # tokens of a record
        question = max(digits, 1) + 4  # tokens of a question with its answer
        hot = int(self.rng.integers(2, 5)) if length >= 128 else 2
        count = max(hot + 1, int(length * self.rng.uniform(0.1, 0.3)) // record)
        count = min(count, len(WORDS) // 2)
        fresh = int(length * self.rng.uniform(0.15, 0.45)) // record
        keys = self._keys(min(count + fresh, len(WORDS)))
        spare = (count + fresh - len(keys)) * record
        values = [self._value(digits) for _ in keys]
        asked = self.rng.choice(count, hot, replace=False)
        row = Row([self.v.bos])
        for key, value in zip(keys[:count], values[:count], strict=True):
            self._record(row, key, value)
        tail = len(keys[count:]) * record + spare + hot * question
        while len(row) + question + tail <= length:
            i = int(self.rng.choice(asked)) if self.rng.random() < 0.85 else int(self.rng.integers(count))
            self._question(row, keys[i], values[i])
        self._records(row, keys[count:], values[count:], spare)
        for i in self.rng.permutation(asked):
            self._question(row, keys[i], values[i])
        return row

    def source(self, length: int) -> Row:
        """Source text without records."""
        row = Row([self.v.bos])
        row.add(self._chunk(length - 1), TEXT)
        return row

    def row(self, task: str, length: int, digits: int) -> Row:
        """Draw one sequence of a task named in `phases.FOCUS`."""
        match task:
            case "recall":
                return self.recall(length, digits)
            case "recall_far":
                return self.recall(length, digits, asked=0.15)
            case "needles":
                return self.needles(length, digits)
            case "passkey":
                return self.needles(length, 5, passkey=True)
            case "few_shot":
                return self.few_shot(length)
            case "hot_keys":
                return self.hot_keys(length, digits)
            case _:
                return self.source(length)

    def batch(self, task: str, size: int, length: int, digits: dict[int, float]) -> tuple[Tensor, Tensor]:
        """Draw `size` sequences of a task, truncated or padded to `length`: ids and kinds, each [B, T] int64."""
        ids = np.full((size, length), self.v.eos, np.int64)
        kinds = np.zeros((size, length), np.int64)
        for b in range(size):
            digit = int(self.rng.choice(list(digits), p=list(digits.values())))
            row = self.row(task, length, digit)
            end = min(len(row), length)
            ids[b, :end] = row.ids[:end]
            kinds[b, :end] = row.kinds[:end]
        return torch.from_numpy(ids), torch.from_numpy(kinds)


def encode_text(tokenizer: PreTrainedTokenizerFast, texts: Iterable[str], eos: int) -> np.ndarray:
    """Concatenate the ids of all texts, [N] int32, with EOS after each."""
    parts: list[int] = []
    for text in texts:
        parts += [*tokenizer.encode(text, add_special_tokens=False, verbose=False), eos]
    return np.array(parts, dtype=np.int32)
