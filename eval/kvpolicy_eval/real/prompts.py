r"""Tasks in plain English for models that were trained on it.

| task | document | asked for |
|---|---|---|
| `facts` | sentences about people: where they live, what they do, what they like | the city of one of them |
| `needles` | English prose, with a few sentences about people in it | the city of one of them |
| `list` | a list of things | the next item, after three that are given |

Prompts are drawn from a seeded `random.Random`, so that every policy and every run gets the same ones. A document ends
with a full stop or an item, and a question begins with a line break, so that a tokenizer does not join the two.

>>> prompt = facts(0)
>>> prompt.document[:70]
'George is a doctor and likes bread. George lives in Chicago. The vase '
>>> prompt.question, prompt.answer
('\n\nQuestion: Where does Mark live?\nAnswer: Mark lives in', 'Vienna')
"""

from __future__ import annotations

from random import Random
from typing import NamedTuple

from kvpolicy_lm_eval.data.modes import Placed
from kvpolicy_lm_eval.data.text import prose as prose
from kvpolicy_lm_eval.data.text import sentences as sentences
from kvpolicy_lm_eval.data.words import WORDS

PEOPLE = 30
"""People of a prompt, three sentences each: about 800 tokens."""
NEEDLES = 8
"""People in a document of prose."""
SENTENCES = 24
"""Sentences of prose around them: about 550 tokens."""
ITEMS = 120
"""Items of a list: about 400 tokens."""
GIVEN = 3
"""Items that are given again."""
COPIED = 1
"""Items that are asked for."""

_LISTS = """
name: Adam Alice Amy Anna Arthur Betty Brian Carl Clara Daisy David Diana Edgar Ella Emma Eric Eva Felix Flora Frank
name: George Grace Hannah Harry Helen Henry Ida Iris Jack Jane Jason Julia Karen Kevin Laura Leo Linda Lucy Maria Mark
name: Martin Mary Nora Oliver Olivia Oscar Paul Peter Rachel Ralph Robert Rosa Ruth Sam Sarah Simon Susan Thomas Victor
city: Athens Berlin Boston Cairo Chicago Delhi Denver Dublin Geneva Hamburg Houston Lima Lisbon London Madrid Miami
city: Milan Moscow Munich Naples Oslo Paris Prague Rome Seattle Sydney Tokyo Toronto Venice Vienna Warsaw Zurich
job: baker carpenter dentist doctor driver farmer gardener lawyer nurse painter pilot plumber singer tailor
food: apples bread cake cheese cherries fish honey lemons noodles olives pasta pizza rice salad soup
color: black blue brown golden gray green orange pink purple red silver white yellow
thing: basket bell blanket boat book bottle box button candle carpet chair clock coat cup door drum flag guitar hammer
thing: hat kettle key knife ladder lamp mirror pencil pillow plate ring rope shoe spoon table vase wheel
"""


def _words(kind: str) -> list[str]:
    lines = (line.split(":") for line in _LISTS.strip().splitlines())
    return [word for name, words in lines if name == kind for word in words.split()]


class Asked(NamedTuple):
    """A prompt in its parts.

    Attributes:
        document: What is known before the question.
        question: What follows it.
        answer: What is right.
    """

    document: str
    question: str
    answer: str

    def placed(self, mode: str) -> Placed:
        """The prompt with its question `inside` of what is compressed, or `after` it."""
        if mode == "inside":
            return Placed(self.document + self.question, "", self.answer)
        return Placed(self.document, self.question, self.answer)


def facts(number: int) -> Asked:
    """Where people live, among other sentences about them. No two of a prompt live in one city."""
    rng = Random(f"facts {number}")
    names = rng.sample(_words("name"), PEOPLE)
    cities = rng.sample(_words("city"), PEOPLE)
    jobs, foods, colors, things = map(_words, ("job", "food", "color", "thing"))
    told = [
        f"{name} is a {rng.choice(jobs)} and likes {rng.choice(foods)}. {name} lives in {city}. "
        f"The {rng.choice(things)} of {name} is {rng.choice(colors)}."
        for name, city in zip(names, cities, strict=True)
    ]
    return _where(" ".join(told), names, cities, rng)


def needles(number: int) -> Asked:
    """Where a few people live, in sentences that stand anywhere in English prose."""
    rng = Random(f"needles {number}")
    names = rng.sample(_words("name"), NEEDLES)
    cities = rng.sample(_words("city"), NEEDLES)
    source = sentences()
    first = rng.randrange(len(source) - SENTENCES)
    text = list(source[first : first + SENTENCES])
    for name, city in zip(names, cities, strict=True):
        text.insert(rng.randrange(len(text) + 1), f"{name} lives in {city}.")
    return _where(" ".join(text), names, cities, rng)


def _where(document: str, names: list[str], cities: list[str], rng: Random) -> Asked:
    """The question for the city of one of the people of a document."""
    asked = rng.randrange(len(names))
    question = f"\n\nQuestion: Where does {names[asked]} live?\nAnswer: {names[asked]} lives in"
    return Asked(document, question, cities[asked])


def listed(number: int) -> Asked:
    """A list, of which three items are given again and the next one is asked for. No item stands in it twice."""
    rng = Random(f"list {number}")
    lines = [f"- {word}" for word in rng.sample(WORDS, ITEMS)]
    first = rng.randrange(ITEMS - GIVEN - COPIED)
    asked = first + GIVEN
    given = "\n".join(lines[first:asked])
    answer = "\n".join(lines[asked : asked + COPIED]).removeprefix("- ")
    return Asked("A list of words:\n" + "\n".join(lines), f"\n\nA part of the same list:\n{given}\n-", answer)


TASKS = {"facts": facts, "needles": needles, "list": listed}
"""Tasks with an answer, by name."""
PROSE = "prose"
"""Name of the text that is predicted."""
