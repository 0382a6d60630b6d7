"""Scores of SCBench's subsets, each between 0 and 1, as `scbench/compute_scores.py` of its code computes them.

Deliberate difference: of `many_shot`, that code asks whether the answer contains any character of the right one. Here
it has to contain the right option, such as `(B)`, or the whole right answer if it does not begin with an option.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

Score = Callable[[str, Sequence[str]], float]
"""The score of an answer, given what is right."""

_NUMBER = re.compile(r"\d+\.\d+|\d+")
_OPTION = re.compile(r"\([A-Z]\)")
_MARKS = str.maketrans(dict.fromkeys("\n\"'.,?!{}", " "))
_SAYING = ("answer is:", "answer:", "answer is", "option is")
_LETTERS = "ABCD"


def contains(answer: str, right: Sequence[str]) -> float:
    """Whether the answer contains the right one."""
    return float(right[0] in answer)


def contains_any_case(answer: str, right: Sequence[str]) -> float:
    """Whether the answer contains the right one in upper or lower case."""
    return float(right[0].upper() in answer.upper())


def contains_option(answer: str, right: Sequence[str]) -> float:
    """Whether the answer contains the right option in parentheses."""
    option = _OPTION.match(right[0])
    return contains_any_case(answer, [option[0]] if option else right)


def share_contained(answer: str, right: Sequence[str]) -> float:
    """The fraction of the right texts that the answer contains, rounded to two digits as in the benchmark."""
    return round(sum(one.lower() in answer.lower() for one in right) / len(right), 2)


def first_number(answer: str, right: Sequence[str]) -> float:
    """Whether the first number of the answer is the right integer; what is behind its point is cut off."""
    found = _NUMBER.search(answer)
    return float(found is not None and int(float(found[0])) == int(right[0]))


def choice(answer: str, right: Sequence[str]) -> float:
    """Whether the answer is the right option or its letter.

    What counts is its first character if it is a letter of an option, else what follows a phrase such as "answer is",
    else its first word that is one.
    """
    said = answer.strip()
    if said[:1] and said[0] in _LETTERS:
        return float(said[0] in right)
    if said in right:
        return 1.0
    plain = " ".join(said.translate(_MARKS).split())
    for phrase in _SAYING:
        _, found, rest = plain.partition(phrase)
        if found:
            return float(rest[1:].startswith(tuple(right)))  # one character follows the phrase
    letters = [word for word in plain.split() if word in _LETTERS]
    return float(bool(letters) and letters[0] in right)


SCORES: dict[str, Score] = {
    "kv": contains,
    "prefix_suffix": contains,
    "vt": share_contained,
    "qa_eng": contains_any_case,
    "choice_eng": choice,
    "many_shot": contains_option,
    "mf": first_number,
}
"""The score of each subset."""
