"""Prompts in the form of RULER, drawn from a seeded `random.Random` without a download.

RULER (arXiv:2404.06654) tests long contexts with needles in a haystack, chains of variables, frequent words and
questions about documents. Instructions, questions and the options of its 13 tasks are RULER's. A prompt is divided as
in kvpress: what is compressed, the question, and the first words of the answer.

Differences, which make scores comparable between policies, but not with those of RULER's own prompts: the haystack of
essays is English prose of the held-out text, keys and words are those of `kvpolicy_lm_eval.data.words`, and the
documents of `qa_1` and `qa_2` are about made-up towns instead of articles of Wikipedia.
"""

from __future__ import annotations

import string
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from random import Random
from typing import Literal, NamedTuple
from uuid import UUID

from kvpolicy_lm_eval.data.text import sentences
from kvpolicy_lm_eval.data.words import WORDS

Haystack = Literal["noise", "prose", "needles"]
Token = Literal["words", "numbers", "uuids"]

NEW_TOKENS = {"niah": 128, "vt": 30, "cwe": 120, "fwe": 50, "qa": 32}
"""Tokens of an answer, by the first part of the name of a task."""

_NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
_CHAIN = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{}\n"
_LIST = (
    "Below is a numbered list of words. In these words, some appear more often than others. "
    "Memorize the ones that appear most often.\n{}\n"
)
_COMMON = "Question: What are the 10 most common words in the above list? "
_COMMON_PREFIX = "Answer: The top 10 words that appear most often in the list are:"
_CODED = (
    "Read the following coded text and track the frequency of each coded word. "
    "Find the three most frequently appeared coded words. {}\n"
)
_CODED_QUESTION = (
    "Question: Do not provide any explanation. Please ignore the dots '....'. "
    "What are the three most frequently appeared words in the above coded text? "
)
_CODED_PREFIX = "Answer: According to the coded text above, the three most frequently appeared words are:"
_BRIEF = (
    "Answer the question based on the given documents. Only give me the answer and do not output any other words.\n\n"
)
_DOCUMENTS = _BRIEF + "The following are given documents.\n\n{}\n\n"

_LONG_LIST = 400
"""Entries from which on the words of a list are there as often as in RULER."""
_CHAINED = 5
"""Variables of a chain."""
_LETTERS = 6
"""Letters of a coded word."""
_DECAY = 2.0
"""Exponent with which the frequency of coded words falls with their rank."""
_ZETA = 1.6449340668482264
"""Sum of `rank ** -_DECAY` over all ranks."""


class Divided(NamedTuple):
    """A prompt in its parts.

    Attributes:
        context: What is compressed.
        question: What is fed afterwards.
        prefix: The first words of the answer.
        answers: What the rest of the answer must contain: all of them, or one for the tasks `qa_1` and `qa_2`.
    """

    context: str
    question: str
    prefix: str
    answers: list[str]


def needles(
    rng: Random,
    size: int,
    haystack: Haystack,
    key: Token = "words",
    value: Token = "numbers",
    keys: int = 1,
    values: int = 1,
    queries: int = 1,
) -> Divided:
    """Ask for the values of keys that are hidden in a haystack.

    Args:
        rng: Source of randomness.
        size: Sentences of the haystack.
        haystack: What hides the needles: a sentence that repeats, English prose, or needles that are not asked for.
        key: Kind of the keys.
        value: Kind of the values.
        keys: Keys with needles.
        values: Values of a key.
        queries: Keys that are asked for.
    """
    told = max(keys, queries)
    others = size if haystack == "needles" else 0
    names: dict[str, None] = {}
    while len(names) < told + others:  # a key that is hidden twice would have two answers
        names[_token(rng, key)] = None
    table = {name: [_token(rng, value) for _ in range(values)] for name in [*names][:told]}
    hidden = [_needle(value, name, one) for name, found in table.items() for one in found]
    rng.shuffle(hidden)
    text = [_needle(value, name, _token(rng, value)) for name in [*names][told:]]
    if haystack == "noise":
        text = [_NOISE] * size
    elif haystack == "prose":
        first = rng.randrange(len(sentences()))
        text = [sentences()[(first + number) % len(sentences())] for number in range(size)]
    for needle in hidden:
        text.insert(rng.randrange(len(text) + 1), needle)
    asked = rng.sample(sorted(table), queries)
    named = ", ".join(asked[:-1]) + f", and {asked[-1]}" if len(asked) > 1 else asked[0]
    kind = value.removesuffix("s")
    single = queries * values == 1
    hint = f"A special magic {kind} is hidden" if single else f"Some special magic {value} are hidden"
    about = f"the special magic {kind if single else value} for {named} mentioned in the provided text"
    body = (" " if haystack == "prose" else "\n").join(text)
    return Divided(
        f"{hint} within the following text. Make sure to memorize it. "
        f"I will quiz you about the {kind if single else value} afterwards.\n{body}\n",
        f"What {'is' if single else 'are all'} {about}? ",
        f"The{about.removeprefix('the')} {'is' if single else 'are'}",
        [one for name in asked for one in table[name]],
    )


def _needle(kind: Token, key: str, value: str) -> str:
    return f"One of the special magic {kind} for {key} is: {value}."


def _token(rng: Random, kind: Token) -> str:
    if kind == "words":
        return "-".join(rng.sample(WORDS, 2))
    if kind == "numbers":
        return str(rng.randrange(10**6, 10**7))
    return str(UUID(int=rng.getrandbits(128), version=4))


def variables(rng: Random, size: int) -> Divided:
    """Ask for all variables of a chain of assignments, after an example of the same form.

    Args:
        rng: Source of randomness.
        size: Lines of noise.
    """
    example = _chain(rng, 3, letters=3)
    asked = _chain(rng, size, letters=5)
    shown = f"{example.context}{example.question}{example.prefix}{' '.join(example.answers)}\n\n\n"
    return asked._replace(context=shown + asked.context)


def _chain(rng: Random, size: int, letters: int) -> Divided:
    names: list[str] = []
    while len(names) < _CHAINED:
        name = "".join(rng.choices(string.ascii_uppercase, k=letters))
        names += [name] if name not in names else []
    value = rng.randrange(10_000, 99_999)
    lines = [
        f"VAR {names[0]} = {value}",
        *(f"VAR {new} = VAR {old}" for old, new in pairwise(names)),
    ]
    text = [_NOISE] * size
    # The assignments keep their order: each name is told before it is used.
    for place, line in zip(
        sorted(rng.choices(range(size + 1), k=_CHAINED), reverse=True), reversed(lines), strict=True
    ):
        text.insert(place, line)
    return Divided(
        _CHAIN.format("\n".join(text)),
        f"Question: Find all variables that are assigned the value {value} in the text above. ",
        f"Answer: According to the chain(s) of variable assignment in the text above, {_CHAINED} variables are "
        f"assgined the value {value}, they are: ",
        names,
    )


def common_words(rng: Random, size: int) -> Divided:
    """Ask for the ten words of a list that are there most often, after an example of the same form.

    Args:
        rng: Source of randomness.
        size: Entries of the list, at least 30.
    """
    example = _counted(rng, max(size // 5, 30))
    asked = _counted(rng, max(size, 30))
    shown = f"{example.context}{example.question}{example.prefix} {_numbered(example.answers)}\n"
    return asked._replace(context=shown + asked.context)


def _counted(rng: Random, size: int) -> Divided:
    """A list with ten common words and many others: 30 and 3 times each, as in RULER, where there is room for it."""
    if size < _LONG_LIST:
        often = max(size // 20, 2)
        seldom = 1
    else:
        # Each word is there more often where all of them do not fill the list.
        seldom = max(3, -(-size // (len(WORDS) + 90)))
        often = 10 * seldom
    others = min((size - 10 * often) // seldom, len(WORDS) - 10)
    words = rng.sample(WORDS, 10 + others)
    entries = words[:10] * often + words[10:] * seldom
    rng.shuffle(entries)
    return Divided(_LIST.format(_numbered(entries)), _COMMON, _COMMON_PREFIX, words[:10])


def _numbered(words: list[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, 1))


def frequent_words(rng: Random, size: int) -> Divided:
    """Ask for the three coded words that are there most often; the one that is there more often still is dots.

    Args:
        rng: Source of randomness.
        size: Words of the text, about, and at least 60.
    """
    size = max(size, 60)
    vocabulary = ["..."]
    while len(vocabulary) < 80:
        word = "".join(rng.choices(string.ascii_lowercase, k=_LETTERS))
        vocabulary += [word] if word not in vocabulary else []
    text = [word for rank, word in enumerate(vocabulary, 1) for _ in range(int(size * rank**-_DECAY / _ZETA))]
    rng.shuffle(text)
    return Divided(_CODED.format(" ".join(text)), _CODED_QUESTION, _CODED_PREFIX, vocabulary[1:4])


def documents(rng: Random, size: int, hops: int) -> Divided:
    """Ask about one of many short documents.

    Args:
        rng: Source of randomness.
        size: Documents, of which up to 240 are about towns, and the others are prose.
        hops: Documents that an answer takes: 1, or 2 where a town is told by its mayor.
    """
    towns = rng.sample(WORDS, min(max(size // 2, 2), 120))
    rivers, mayors = (rng.sample(WORDS, len(towns)) for _ in range(2))
    told = [
        line
        for town, river, mayor in zip(towns, rivers, mayors, strict=True)
        for line in (
            f"The town of {town.title()} lies on the river {river.title()}.",
            f"{mayor.title()} is the mayor of the town of {town.title()}.",
        )
    ]
    rest = [sentences()[rng.randrange(len(sentences()))] for _ in range(max(size - len(told), 0))]
    lines = [*told, *rest]
    rng.shuffle(lines)
    number = rng.randrange(len(towns))
    where = f"the town of {towns[number].title()}" if hops == 1 else f"the town whose mayor is {mayors[number].title()}"
    return Divided(
        _DOCUMENTS.format("\n\n".join(f"Document {place}:\n{line}" for place, line in enumerate(lines, 1))),
        f"{_BRIEF}Question: On which river does {where} lie? ",
        "Answer:",
        [rivers[number].title()],
    )


Draw = Callable[[Random, int], Divided]

TASKS: dict[str, Draw] = {
    "niah_single_1": partial(needles, haystack="noise"),
    "niah_single_2": partial(needles, haystack="prose"),
    "niah_single_3": partial(needles, haystack="prose", value="uuids"),
    "niah_multikey_1": partial(needles, haystack="prose", keys=4),
    "niah_multikey_2": partial(needles, haystack="needles"),
    "niah_multikey_3": partial(needles, haystack="needles", key="uuids", value="uuids"),
    "niah_multivalue": partial(needles, haystack="prose", values=4),
    "niah_multiquery": partial(needles, haystack="prose", queries=4),
    "vt": variables,
    "cwe": common_words,
    "fwe": frequent_words,
    "qa_1": partial(documents, hops=1),
    "qa_2": partial(documents, hops=2),
}
"""Prompts of a task by its name, from a source of randomness and a size."""


def new_tokens(task: str) -> int:
    """Tokens of an answer.

    >>> new_tokens("niah_single_1"), new_tokens("vt")
    (128, 30)
    """
    return NEW_TOKENS[task.split("_")[0]]


def prompts(task: str, length: int, docs: int, seed: int, count: Callable[[str], int]) -> list[Divided]:
    """Prompts that with their answers take at most a number of tokens, and not much less.

    Args:
        task: Name of the task.
        length: Tokens of a prompt and its answer.
        docs: How many prompts; the first ones do not depend on it.
        seed: Source of randomness.
        count: Counts the tokens of a text.

    Raises:
        ValueError: If the smallest prompt is longer.
    """
    draw = TASKS[task]
    room = length - new_tokens(task)

    def made(number: int, size: int) -> tuple[Divided, int]:
        """The prompt of a size, and its tokens."""
        found = draw(Random(f"ruler {task} {seed} {number}"), size)
        return found, count(found.context + found.question + found.prefix)

    first = max(_largest(lambda size: made(0, size)[1] <= room), 1)
    drawn: list[Divided] = []
    for number in range(docs):
        found, tokens = made(number, first)
        size = max(first * room // tokens, 1) if number else first  # its sentences have other lengths
        found, tokens = made(number, size)
        while tokens > room and size > 1:
            size -= max(size // 64, 1)
            found, tokens = made(number, size)
        if tokens > room:
            raise ValueError(f"length must be more than a prompt of {task} takes, got {length}; try {2 * length}.")
        drawn.append(found)
    return drawn


def _largest(fits: Callable[[int], bool]) -> int:
    """The largest size that fits, 0 if none does; a size that does not fit is followed by others that do not.

    >>> _largest(lambda size: size <= 37)
    37
    """
    high = 1
    while fits(high):
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low
