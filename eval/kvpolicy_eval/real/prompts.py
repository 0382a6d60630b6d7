r"""Tasks in plain English for models that were trained on it.

| task | document | asked for |
|---|---|---|
| `facts` | sentences about people: where they live, what they do, what they like | the city of one of them |
| `needles` | English prose, with a few sentences about people in it | the city of one of them |
| `list` | a list of things | the next item, after three that are given |
| `few` | twice the prose, with two people in it | the city of one of them |
| `code` | the same prose, with the numbers of two things in it | the number of one of them |
| `line` | the same prose | how one of its sentences goes on, after its first half |
| `rows` | lines of words that have nothing to do with each other | the last two words of a line, after its first two |
| `labels` | words with the letters of their categories | the letter of another word |
| `chat` | the prose of `few`, in the chat template of the model | the city of one of the people |

Prompts are drawn from a seeded `random.Random`, so that every policy and every run gets the same ones. A document ends
with a full stop or an item, and a question begins with a line break, so that a tokenizer does not join the two.

>>> prompt = facts(0)
>>> prompt.document[:70]
'George is a doctor and likes bread. George lives in Chicago. The vase '
>>> prompt.question, prompt.answer
('\n\nQuestion: Where does Mark live?\nAnswer: Mark lives in', 'Vienna')
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import NamedTuple

from kvpolicy_lm_eval.data.modes import Placed
from kvpolicy_lm_eval.data.text import prose as prose
from kvpolicy_lm_eval.data.text import sentences as sentences
from kvpolicy_lm_eval.data.words import CATEGORIES, WORDS

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
FEW = 2
"""People, or things with a number, in the prose of a given length."""
LETTERS = 4
"""Categories of words with letters."""
TOKENS = 1024
"""Rough length of these documents."""
_SENTENCE = 22
_ROW = 8
_LABELED = 5
"""Tokens of a sentence, a line of four words, and a word with its letter."""

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
        chat: Whether document and question are the message of a user.
    """

    document: str
    question: str
    answer: str
    chat: bool = False

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


def few(number: int, tokens: int = TOKENS) -> Asked:
    """Where two people live, in sentences that stand anywhere in long English prose."""
    rng = Random(f"few {number}")
    names = rng.sample(_words("name"), FEW)
    cities = rng.sample(_words("city"), FEW)
    told = [f"{name} lives in {city}." for name, city in zip(names, cities, strict=True)]
    return _where(_among_prose(told, rng, tokens), names, cities, rng)


def code(number: int, tokens: int = TOKENS) -> Asked:
    """The numbers of two things, in sentences that stand anywhere in long English prose."""
    rng = Random(f"code {number}")
    things = rng.sample(_words("thing"), FEW)
    codes = [str(found) for found in rng.sample(range(1000, 10000), FEW)]
    told = [f'The code of the {thing} is "{found}".' for thing, found in zip(things, codes, strict=True)]
    asked = rng.randrange(FEW)
    # In quotes, a number has no space before it, which some tokenizers make a token of its own.
    question = f'\n\nQuestion: What is the code of the {things[asked]}?\nAnswer: The code of the {things[asked]} is "'
    return Asked(_among_prose(told, rng, tokens), question, codes[asked])


def line(number: int, tokens: int = TOKENS) -> Asked:
    """How a sentence goes on, after its first half, which stands once in the document: its next two words."""
    rng = Random(f"line {number}")
    text = _long_prose(rng, tokens)
    document = " ".join(text)
    while True:
        words = rng.choice(text).split()
        half = len(words) // 2
        given = " ".join(words[:half])
        answer = " ".join(words[half : half + 2])
        if half >= 4 and document.count(given) == 1 and answer.isascii():
            return Asked(document, f"\n\nThe same sentence again:\n\n{given}", answer)


def rows(number: int, tokens: int = TOKENS) -> Asked:
    """Lines of four words, of which the last two are asked for, after the first two. No word begins two of them."""
    rng = Random(f"rows {number}")
    keys = rng.sample(WORDS, min(tokens // _ROW, len(WORDS)))
    lines = [(key, *rng.sample(WORDS, 3)) for key in keys]
    asked = rng.choice(lines)
    document = "Lines:\n" + "\n".join(" ".join(words) for words in lines)
    return Asked(document, f"\n\nOne of these lines again:\n{' '.join(asked[:2])}", " ".join(asked[2:]))


def labels(number: int, tokens: int = TOKENS) -> Asked:
    """Words with the letters of their categories; another word of one of these categories is asked for."""
    rng = Random(f"labels {number}")
    categories = rng.sample(sorted(CATEGORIES), LETTERS)
    letters = rng.sample("ABCD", LETTERS)
    members = [(word, letter) for name, letter in zip(categories, letters, strict=True) for word in CATEGORIES[name]]
    word, answer = members.pop(rng.randrange(len(members)))
    shown = [rng.choice(members) for _ in range(tokens // _LABELED)]
    document = "\n".join(f"{word}: {letter}" for word, letter in shown)
    return Asked(document, f"\n{word}:", answer)


def chat(number: int, tokens: int = TOKENS) -> Asked:
    """The same as `few` in the chat template, in which the answer begins with the question's words."""
    return few(number, tokens)._replace(chat=True)


def _long_prose(rng: Random, tokens: int) -> list[str]:
    source = sentences()
    count = min(tokens // _SENTENCE, len(source))
    first = rng.randrange(len(source) - count + 1)
    return list(source[first : first + count])


def _among_prose(told: list[str], rng: Random, tokens: int) -> str:
    """Prose with sentences at random places."""
    text = _long_prose(rng, tokens)
    for sentence in told:
        text.insert(rng.randrange(len(text) + 1), sentence)
    return " ".join(text)


TASKS = {
    "facts": facts,
    "needles": needles,
    "list": listed,
    "few": few,
    "code": code,
    "line": line,
    "rows": rows,
    "labels": labels,
    "chat": chat,
}
"""Tasks with an answer, by name."""
SIZED = ("few", "code", "line", "rows", "labels", "chat")
"""Those whose documents have about a given number of tokens."""
PROSE = "prose"
"""Name of the text that is predicted."""
GENERATED = "generated"
"""Name of the text that the model generates, of which every prediction is compared."""
ALL = (*TASKS, PROSE, GENERATED)
"""What is measured by default."""


def draw(task: str, number: int, tokens: int) -> Asked:
    """A prompt of a task.

    Args:
        task: Its name.
        number: Which prompt.
        tokens: Rough length of the document, where a task has no fixed one.
    """
    function: Callable[..., Asked] = TASKS[task]
    return function(number, tokens) if task in SIZED else function(number)
