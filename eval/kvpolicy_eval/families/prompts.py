"""Prompts of random tokens, and pictures of random numbers for models that do not run without one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvpolicy_eval.families.entries import IMAGE, Entry

PROMPT = 40
"""Tokens of a prompt: more than a sliding window of the models."""
STEPS = 5
SECOND_TURN = 5
AFTER = 2
_LARGEST = 95
"""Ids of tokens that no config uses for something special are from 3 to below this."""
_PICTURE = 121
"""The token of a picture."""

Inputs = dict[str, Tensor]


class Turns(NamedTuple):
    """What follows a prompt: each item is what one forward takes, [1, tokens] ids.

    Attributes:
        steps: Single tokens.
        second: A second turn of several tokens.
        after: Single tokens behind it.
    """

    steps: list[Tensor]
    second: Tensor
    after: list[Tensor]

    @property
    def pieces(self) -> list[Tensor]:
        """All in their order."""
        return [*self.steps, self.second, *self.after]


def tokens(count: int, seed: int) -> Tensor:
    """Random tokens, [1, count]."""
    return torch.randint(3, _LARGEST, (1, count), generator=torch.Generator().manual_seed(seed))


def prompt(entry: Entry) -> Inputs:
    """The inputs of a prompt of one row."""
    make = _PICTURES.get(entry.name) if entry.kind == IMAGE else None
    return {"input_ids": tokens(PROMPT, 1)} | ({} if make is None else make())


def turns() -> Turns:
    """The turns behind the prompt."""
    singles = [tokens(1, 10 + place) for place in range(STEPS + AFTER)]
    return Turns(singles[:STEPS], tokens(SECOND_TURN, 7), singles[STEPS:])


def padded() -> tuple[list[Inputs], Inputs]:
    """Two rows, each alone, and both in a batch with padding at the left."""
    rows = [tokens(PROMPT, 1), tokens(PROMPT - 11, 8)]
    ids = torch.zeros(2, PROMPT, dtype=torch.long)
    mask = torch.zeros(2, PROMPT, dtype=torch.long)
    for row, own in enumerate(rows):
        ids[row, PROMPT - own.shape[1] :] = own[0]
        mask[row, PROMPT - own.shape[1] :] = 1
    return [{"input_ids": own} for own in rows], {"input_ids": ids, "attention_mask": mask}


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


def _with_picture(places: int, *shape: int, **more: Tensor) -> Callable[[], dict[str, Any]]:
    """Makes a prompt with the tokens of a picture, and the picture."""

    def make() -> dict[str, Any]:
        ids = tokens(PROMPT, 1)
        ids[:, 2 : 2 + places] = _PICTURE
        return {"input_ids": ids, "pixel_values": _random(*shape), **more}

    return make


_QUESTION = tokens(5, 9)
_PLACES = torch.tensor([[0, 0] + [1] * 4 + [0] * (PROMPT - 6)])
_PICTURES: dict[str, Callable[[], dict[str, Any]]] = {
    "blip": lambda: {"pixel_values": _random(1, 3, 32, 32)},
    "blip-2": _with_picture(4, 1, 3, 32, 32),
    "instructblip": _with_picture(4, 1, 3, 32, 32, qformer_input_ids=_QUESTION),
    "instructblipvideo": _with_picture(16, 1, 4, 3, 32, 32, qformer_input_ids=_QUESTION),
    "kosmos-2": lambda: {"pixel_values": _random(1, 3, 32, 32), "image_embeds_position_mask": _PLACES},
    "idefics": lambda: {
        "pixel_values": _random(1, 1, 3, 32, 32),
        "image_attention_mask": torch.ones(1, PROMPT, 1),
    },
}
"""Prompts of the models of pictures that do not run on text alone."""
