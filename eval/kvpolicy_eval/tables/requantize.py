"""Error of KIVI's keys when tokens of an encoded group are evicted.

Keys are synthetic: channels of unit variance and different offsets, stationary over the tokens. The ways to reuse the
slots of evicted tokens are compared by mean squared error:

- *fresh*: no reuse; a group is encoded once from full-precision keys.
- *compact*: half of the tokens are evicted; the rest of two groups is decoded and encoded as one, once or five times.
- *overwrite*: half of a group's tokens are evicted; new full-precision keys take their slots, clipped to the group's
  scale and zero point.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch
from torch import Tensor

from kvpolicy.codecs.kivi import KIVI
from kvpolicy.protocols import StageStore
from kvpolicy_eval.common.table import Grid, Section, Table

GROUPS = 512
CHANNELS = 128
BITS = (2, 4)
CASES = ("fresh", "compact once", "compact 5 times", "overwrite")


def draw(tokens: int, generator: torch.Generator) -> Tensor:
    """Keys of unit variance around each channel's offset, [1, 1, tokens, CHANNELS]."""
    offset = torch.linspace(-4, 4, CHANNELS)
    return offset + torch.randn(1, 1, tokens, CHANNELS, generator=generator)


def encode(codec: KIVI, keys: Tensor) -> StageStore:
    """Encode keys in order, group by group."""
    store = StageStore(codec.alloc(1, 1, keys.shape[2], CHANNELS, "cpu"))
    slots = torch.arange(keys.shape[2])[None, None]
    codec.write(store, keys, keys, slots, slots >= 0, slots < 0)
    return store


def decode(codec: KIVI, store: StageStore) -> Tensor:
    """All keys, [1, 1, tokens, CHANNELS]."""
    return codec.keys(store, slice(0, store.codes.keys.shape[2]))


def compact(codec: KIVI, keys: Tensor, times: int, generator: torch.Generator) -> float:
    """Error of the surviving keys after `times` rounds, each of which evicts half of all tokens."""
    decoded = decode(codec, encode(codec, keys))
    for _ in range(times):
        half = decoded.shape[2] // 2
        survivors = torch.randperm(decoded.shape[2], generator=generator)[:half].sort().values
        keys = keys[:, :, survivors]
        decoded = decode(codec, encode(codec, decoded[:, :, survivors]))
    return mean_squared_error(keys, decoded)


def overwrite(codec: KIVI, keys: Tensor, generator: torch.Generator) -> float:
    """Error of new keys that are written to the slots of each group's evicted half."""
    store = encode(codec, keys)
    new = draw(keys.shape[2] // 2, generator)
    slot = torch.arange(keys.shape[2])
    evicted = slot % codec.group_size < codec.group_size // 2
    slots = slot[evicted][None, None]
    codec.write(store, new, new, slots, slots >= 0, ~evicted[None, None])
    return mean_squared_error(new, decode(codec, store)[:, :, evicted])


def mean_squared_error(keys: Tensor, decoded: Tensor) -> float:
    """Mean squared error, which is relative because the variance of keys is 1."""
    return float((keys - decoded).square().mean())


def errors(bits: int, seed: int = 0) -> dict[str, float]:
    """The error of each case.

    Args:
        bits: Of the codes.
        seed: Of the keys and of the choice of evicted tokens.
    """
    codec = KIVI(bits=bits)  # pyright: ignore[reportArgumentType]
    generator = torch.Generator().manual_seed(seed)
    keys = draw(GROUPS * codec.group_size, generator)
    return {
        "fresh": mean_squared_error(keys, decode(codec, encode(codec, keys))),
        "compact once": compact(codec, keys, 1, generator),
        "compact 5 times": compact(codec, keys, 5, generator),
        "overwrite": overwrite(codec, keys, generator),
    }


def rows() -> list[list[str]]:
    """One row per number of bits."""
    measured = {bits: errors(bits) for bits in BITS}
    return [[str(bits), *(f"{by_case[case]:.3g}" for case in CASES)] for bits, by_case in measured.items()]


def measure(_: argparse.Namespace) -> Iterator[Section]:
    """The table."""
    yield Section("requantize", [Grid(["bits", *CASES], rows())])


TABLE = Table(measure=measure, places={"requantize": []})
