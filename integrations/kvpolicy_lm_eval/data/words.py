"""The 256 words of the prompts: 16 categories of 16, each a single token of the embedded tokenizer."""

from __future__ import annotations

_LISTS = """
animal: tiger lion zebra horse rabbit camel otter panda wolf bear monkey donkey goat sheep beaver badger
color: red blue green yellow purple orange violet crimson scarlet amber indigo ivory teal maroon beige turquoise
fruit: apple banana cherry grape lemon mango melon papaya peach pear plum kiwi lime fig guava apricot
tool: hammer saw drill wrench chisel pliers shovel rake axe ladder screwdriver level clamp file anvil trowel
metal: iron copper silver gold tin zinc lead nickel platinum bronze steel brass cobalt titanium mercury aluminum
body: head arm leg hand foot knee elbow shoulder finger nose ear eye mouth neck ankle wrist
city: paris london rome madrid berlin vienna tokyo cairo lima oslo dublin athens delhi moscow boston seattle
food: bread cheese butter rice pasta soup pizza salad cake honey sugar pepper salt bacon noodle waffle
cloth: shirt jacket coat hat scarf glove sock shoe boot belt dress skirt sweater trouser vest robe
vehicle: car truck bus train plane boat ship bicycle scooter tractor tram taxi ferry rocket canoe wagon
bird: eagle falcon hawk sparrow robin crow raven owl swan duck goose heron pigeon parrot finch stork
tree: oak pine maple birch cedar willow elm ash spruce fir poplar beech aspen walnut cypress palm
music: piano guitar violin flute drum trumpet cello harp banjo organ clarinet oboe tuba bassoon viola lute
planet: mars venus saturn jupiter neptune uranus pluto earth moon comet star galaxy nebula asteroid meteor orbit
home: chair table sofa lamp desk bed shelf mirror carpet curtain pillow blanket oven fridge clock vase
weather: rain snow wind storm cloud fog hail thunder frost sleet drizzle mist blizzard cyclone breeze sunshine
"""

CATEGORIES: dict[str, tuple[str, ...]] = {
    name: tuple(members.split()) for name, members in (line.split(":") for line in _LISTS.strip().splitlines())
}
"""Category name to its 16 words; few-shot prompts ask for the label of a word's category."""

WORDS: tuple[str, ...] = tuple(word for members in CATEGORIES.values() for word in members)
"""All words, ordered by category: the keys of records are drawn from these."""

LABELS: str = "ABCDEFGHJKLMNPQRSTUVWXYZ"
"""One-letter labels of few-shot prompts, without I and O, which resemble digits."""
