"""Prompts as plain text, each with its answer, drawn from a seeded `random.Random`.

All prompts share one question form: `?key=` asks for the value of `key`,
`?word:` for the label of a word's category. A prompt ends right after the `=`
or `:`, so the answer is what comes next, up to a newline. In the tokenizer of
the embedded model a record with four digits costs 7 tokens, a question with its
answer 8, a labeled word 4, and two characters of source text about one token.
Records hidden in source text are written `#key = value`, plain records
`key=value`: the two formats let the embedded model learn a separate retrieval
layer for each kind of task.

`document, question = split(prompt)` separates the parts for evaluations that
compress the document before the question is known.
"""

from __future__ import annotations

from random import Random

from kvpolicy_lm_eval.data.text import excerpt
from kvpolicy_lm_eval.data.words import CATEGORIES, LABELS, WORDS

Prompt = tuple[str, str]
"""A prompt and its answer."""


def split(prompt: str) -> tuple[str, str]:
    r"""Split a prompt before its last question: (document, question).

    >>> split("tiger=4821\n?tiger=")
    ('tiger=4821\n', '?tiger=')
    """
    start = prompt.rindex("\n?") + 1
    return prompt[:start], prompt[start:]


def _check_range(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ValueError(f"{name} must be from {low} to {high}, got {value}.")


def _digits(rng: Random, count: int) -> str:
    return "".join(rng.choice("0123456789") for _ in range(count))


def _records(rng: Random, count: int, digits: int) -> dict[str, str]:
    """Draw keys with distinct values, so that a value identifies its key."""
    _check_range("The number of records", count, 1, min(len(WORDS), 10**digits // 2))
    values: set[str] = set()
    while len(values) < count:
        values.add(_digits(rng, digits))
    # A set of strings has no reproducible order, so it is sorted before it is shuffled.
    shuffled = sorted(values)
    rng.shuffle(shuffled)
    return dict(zip(rng.sample(WORDS, count), shuffled, strict=True))


def _lines(records: dict[str, str]) -> str:
    return "".join(f"{key}={value}\n" for key, value in records.items())


def _with_text(rng: Random, records: dict[str, str], chars: int) -> str:
    """Lines of records with about `chars` characters of source text between them, in up to 16 excerpts."""
    if chars == 0:
        return _lines(records)
    lines = _lines(records).splitlines(keepends=True)
    parts = min(16, len(lines))
    for place in sorted(rng.sample(range(len(lines)), parts), reverse=True):
        lines.insert(place, excerpt(rng, chars // parts) + "\n")
    return "".join(lines)


def recall(rng: Random, records: int, digits: int = 4, chars: int = 0) -> Prompt:
    """Ask for the value of one of many records; the value occurs in the prompt once.

    Args:
        rng: Source of randomness.
        records: Records in the prompt, at most 256; about 70 fill 512 tokens, 140 fill 1,024.
        digits: Digits of a value.
        chars: Characters of source text between records, which fill what more records cannot.
    """
    return multi_query(rng, records, 1, digits, chars)


def multi_query(rng: Random, records: int, queries: int, digits: int = 4, chars: int = 0) -> Prompt:
    """Ask for several records in sequence; all questions but the last one are answered in the prompt.

    The value of the last question occurs in the prompt once, in its record.

    Args:
        rng: Source of randomness.
        records: Records in the prompt, at most 256.
        queries: Questions, each about a different record; the last one is open.
        digits: Digits of a value.
        chars: Characters of source text between records.
    """
    table = _records(rng, records, digits)
    _check_range("The number of queries", queries, 1, records)
    *answered, last = rng.sample(sorted(table), queries)
    questions = "".join(f"?{key}={table[key]}\n" for key in answered)
    return f"{_with_text(rng, table, chars)}{questions}?{last}=", table[last]


def _hide(rng: Random, table: dict[str, str], chars: int) -> str:
    """Insert records at random places of a source text."""
    text = excerpt(rng, chars)
    parts: list[str] = []
    start = 0
    for (key, value), cut in zip(table.items(), sorted(rng.sample(range(chars + 1), len(table))), strict=True):
        parts += [text[start:cut], f"\n#{key} = {value}\n"]
        start = cut
    return "".join([*parts, text[start:], "\n"])


def passkey(rng: Random, chars: int, digits: int = 5) -> Prompt:
    """Hide a pass key in source text and ask for it.

    Args:
        rng: Source of randomness.
        chars: Characters of source text; about 900 fill 512 tokens, 1,800 fill 1,024.
        digits: Digits of the key.
    """
    value = _digits(rng, digits)
    return f"{_hide(rng, {'passkey': value}, chars)}?passkey=", value


def needles(rng: Random, chars: int, count: int, digits: int = 4) -> Prompt:
    """Hide several records in source text and ask for one of them.

    Args:
        rng: Source of randomness.
        chars: Characters of source text.
        count: Hidden records.
        digits: Digits of a value.
    """
    table = _records(rng, count, digits)
    asked = rng.choice(sorted(table))
    return f"{_hide(rng, table, chars)}?{asked}=", table[asked]


def few_shot(rng: Random, classes: int, shots: int, chars: int) -> Prompt:
    """Label words by category, insert source text, then ask for the label of another word.

    Nothing near the question reveals the answer: it takes the examples at the
    start and the categories learned in training. The queried word itself is not
    among the examples.

    Args:
        rng: Source of randomness.
        classes: Categories, each with a distinct label, 2 to 6.
        shots: Examples per category, 1 to 8.
        chars: Characters of source text between examples and question.
    """
    _check_range("The number of classes", classes, 2, 6)
    _check_range("The number of shots", shots, 1, 8)
    chosen = rng.sample(sorted(CATEGORIES), classes)
    labels = dict(zip(chosen, rng.sample(LABELS, classes), strict=True))
    words = {name: rng.sample(CATEGORIES[name], shots + 1) for name in chosen}
    examples = [(word, labels[name]) for name in chosen for word in words[name][1:]]
    rng.shuffle(examples)
    asked = rng.choice(chosen)
    shown = "".join(f"{word}:{label}\n" for word, label in examples)
    return f"{shown}{excerpt(rng, chars)}\n?{words[asked][0]}:", labels[asked]


def hot_keys(rng: Random, records: int, hot: int, asks: int, fresh: int, digits: int = 4, chars: int = 0) -> Prompt:
    """Ask about a few hot keys repeatedly, then list fresh records, then ask about a hot key again.

    Every hot key is queried equally often, and its last answered question
    precedes all fresh records: a recent window misses it, heavy hitters keep it.

    Args:
        rng: Source of randomness.
        records: Records at the start, the hot ones among them.
        hot: Hot keys.
        asks: Answered questions about hot keys, all before the fresh records.
        fresh: Records after the questions; none of them is queried.
        digits: Digits of a value.
        chars: Characters of source text between fresh records.
    """
    _check_range("The number of hot keys", hot, 1, records)
    _check_range("The number of asks", asks, hot, 10_000)
    table = list(_records(rng, records + fresh, digits).items())
    keys = rng.sample(table[:records], hot)
    order = [keys[i % hot] for i in range(asks)]
    rng.shuffle(order)
    asked = "".join(f"?{key}={value}\n" for key, value in order)
    key, value = rng.choice(keys)
    rest = _with_text(rng, dict(table[records:]), chars)
    return f"{_lines(dict(table[:records]))}{asked}{rest}?{key}=", value


def rings(rng: Random, count: int, records: int) -> list[tuple[str, list[str]]]:
    r"""Records whose values are keys of other records, in rings: each answer is what to ask for next.

    Args:
        rng: Source of randomness.
        count: Rings, which have no word in common.
        records: Records of a ring, at most 256 of all; each costs 4 tokens.

    Returns:
        For each ring, its records in random order, and its words in the order of the ring.

    >>> rings(Random(0), 1, 2)
    [('earth=trumpet\ntrumpet=earth\n', ['trumpet', 'earth'])]
    """
    _check_range("The number of records", count * records, 1, len(WORDS))
    drawn = rng.sample(WORDS, count * records)
    found: list[tuple[str, list[str]]] = []
    for number in range(count):
        words = drawn[number * records : (number + 1) * records]
        table = list(zip(words, [*words[1:], words[0]], strict=True))
        rng.shuffle(table)
        found.append((_lines(dict(table)), words))
    return found
