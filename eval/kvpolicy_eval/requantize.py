"""Measure what KIVI's keys lose when tokens of a coded group are evicted.

Keys are synthetic: channels of unit variance and different offsets, stationary over the tokens. Ways to use the
room of dead tokens are compared by their mean squared error:

- *fresh*: no reuse; a group is coded once from exact keys.
- *compact*: half of the tokens die; what is left of two groups is decoded and coded as one, once or five times.
- *overwrite*: half of a group's tokens die; new exact keys take their slots, with the group's scale and zero, clipped.

`python -m kvpolicy_eval.requantize` prints the table.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvpolicy.codecs.kivi import KIVI
from kvpolicy.protocols import StageStore

GROUPS, CHANNELS = 512, 128
BITS = (2, 4)
CASES = ("fresh", "compact once", "compact 5 times", "overwrite")


def draw(tokens: int, generator: torch.Generator) -> Tensor:
    """Keys, [1, 1, tokens, CHANNELS], of unit variance around each channel's offset."""
    offset = torch.linspace(-4, 4, CHANNELS)
    return offset + torch.randn(1, 1, tokens, CHANNELS, generator=generator)


def encode(codec: KIVI, keys: Tensor) -> StageStore:
    """Code keys in order, group by group."""
    store = StageStore(codec.alloc(1, 1, keys.shape[2], CHANNELS, "cpu"))
    slots = torch.arange(keys.shape[2])[None, None]
    codec.write(store, keys, keys, slots, slots >= 0, slots < 0)
    return store


def decode(codec: KIVI, store: StageStore) -> Tensor:
    """Every key, [1, 1, tokens, CHANNELS]."""
    return codec.keys(store, slice(0, store.codes.keys.shape[2]))


def compact(codec: KIVI, keys: Tensor, times: int, generator: torch.Generator) -> float:
    """Error of the survivors after `times` rounds in which half of all tokens die."""
    held = decode(codec, encode(codec, keys))
    for _ in range(times):
        half = held.shape[2] // 2
        alive = torch.randperm(held.shape[2], generator=generator)[:half].sort().values
        keys, held = keys[:, :, alive], decode(codec, encode(codec, held[:, :, alive]))
    return error(keys, held)


def overwrite(codec: KIVI, keys: Tensor, generator: torch.Generator) -> float:
    """Error of new keys that take the slots of each group's dead half."""
    store = encode(codec, keys)
    new = draw(keys.shape[2] // 2, generator)
    slot = torch.arange(keys.shape[2])
    dead = slot % codec.group_size < codec.group_size // 2
    slots = slot[dead][None, None]
    codec.write(store, new, new, slots, slots >= 0, ~dead[None, None])
    return error(new, decode(codec, store)[:, :, dead])


def error(keys: Tensor, held: Tensor) -> float:
    """Mean squared error over the variance, which is 1."""
    return float((keys - held).square().mean())


def measure(bits: int, seed: int = 0) -> dict[str, float]:
    """The error of each case.

    Args:
        bits: Of the codes.
        seed: Of the keys and of who dies.
    """
    codec = KIVI(bits=bits)  # pyright: ignore[reportArgumentType]
    generator = torch.Generator().manual_seed(seed)
    keys = draw(GROUPS * codec.group_size, generator)
    return {
        "fresh": error(keys, decode(codec, encode(codec, keys))),
        "compact once": compact(codec, keys, 1, generator),
        "compact 5 times": compact(codec, keys, 5, generator),
        "overwrite": overwrite(codec, keys, generator),
    }


def table() -> str:
    """The measurements in Markdown."""
    lines = ["| bits | " + " | ".join(CASES) + " |", "|---|" + "---|" * len(CASES)]
    for bits in BITS:
        found = measure(bits)
        lines.append(f"| {bits} | " + " | ".join(f"{found[case]:.3g}" for case in CASES) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
