"""Conversations drawn at random, layer by layer, against the reference."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Literal, get_args, get_origin, get_type_hints

import pytest
import torch

from kvpolicy import Policy
from kvpolicy.registry import lookup
from tests.conformance.bench import Bench, draw
from tests.conformance.calibration import write
from tests.conformance.policies import BASES, CODECS, MERGERS, SELECTORS, WRAPPERS, by_name, is_refused, parameters
from tests.sampling import product

ATTENTIVE = ["h2o", "snapkv", "probe", "a2sf", "keyformer", "kvzap"]
"""Selectors that hold attention, which some wrappers ask for."""


def draw_selector(dice: Random, *, wrap: bool = True, of: Sequence[str] = BASES) -> str:
    """The words of a selector with options drawn at random; without `wrap`, of one `of` these."""
    name = dice.choice(SELECTORS if wrap else of)
    options = {
        "streaming": [f"sinks={dice.randint(0, 4)}"],
        "h2o": [f"recent={dice.choice(['0.0', '0.3', '0.5', '1.0'])}"],
        "snapkv": [
            f"window={dice.randint(1, 9)}",
            f"kernel={dice.choice([1, 3, 5, 7])}",
            f"pool={dice.choice(['avg', 'max'])}",
        ],
        "kvzip": [f"chunk={dice.choice([1, 3, 8, 64])}", f"sinks={dice.randint(0, 4)}"],
        "compactor": [
            f"sinks={dice.randint(0, 4)}",
            f"recent={dice.randint(1, 4)}",
            f"block={dice.choice([1, 3, 8, 64])}",
            f"sketch={dice.choice([2, 5])}",
            f"blend={dice.choice(['auto', '0.0', '0.7'])}",
        ],
        "kvcrush": [
            f"split={dice.choice(['0.0', '0.2', '0.5', '0.75'])}",
            f"seed={dice.randint(0, 9)}",
            f"anchor={dice.choice(['random', 'mean', 'alternate', 'zeros', 'ones'])}",
            f"buckets={dice.choice(['rank', 'distance'])}",
            f"pick={dice.choice(['first', 'random', 'best'])}",
            f"quantile={dice.choice(['0.1', '0.5', '0.8'])}",
            f"page={dice.choice([0, 0, 2, 5])}",
        ],
        "qfilters": [by_name("qfilters").partition(":")[2]],
        "triattention": [
            by_name("triattention").partition(":")[2].partition(":")[0],
            f"every={dice.choice([1, 6, 64])}",
        ],
        "kvzap": [by_name("kvzap").partition(":")[2].rpartition(":")[0], f"window={dice.choice([1, 3, 9])}"],
        "lagkv": [f"sinks={dice.randint(0, 4)}", f"lag={dice.choice([1, 3, 8])}"],
        "cur": [
            f"sinks={dice.randint(0, 4)}",
            f"window={dice.choice([1, 4, 16])}",
            f"every={dice.choice([1, 5, 64])}",
            f"of={dice.choice(['product', 'keys', 'values', 'mean'])}",
        ],
        "a2sf": [f"factor={dice.choice(['0.1', '0.9', '1.0'])}", f"recent={dice.randint(1, 5)}"],
        "rkv": [
            f"window={dice.randint(1, 5)}",
            f"mix={dice.choice(['0.0', '0.5', '1.0'])}",
            f"kernel={dice.choice([1, 3])}",
            f"every={dice.choice([1, 6, 64])}",
        ],
        "vase": [
            f"window={dice.randint(1, 5)}",
            f"large={dice.choice(['0.0', '0.3', '1.0'])}",
            f"sinks={dice.randint(0, 4)}",
            f"kernel={dice.choice([1, 3])}",
            f"every={dice.choice([1, 6, 64])}",
        ],
        "keyformer": [
            f"recent={dice.choice(['0.0', '0.3', '1.0'])}",
            f"tau_init={dice.choice(['0.3', '1.0'])}",
            f"steps={dice.choice([1, 7, 100])}",
        ],
        "defensive": [
            f"window={dice.randint(1, 9)}",
            f"kernel={dice.choice([1, 3, 5])}",
            f"mass={dice.choice(['0.0', '0.5', '1.0'])}",
        ],
        "dropkv": [f"window={dice.randint(1, 9)}", f"kernel={dice.choice([1, 3])}"],
        "critical": [f"split={dice.choice(['0.0', '0.4', '1.0'])}", f"epsilon={dice.choice(['0.0', '0.01'])}"],
        "caote": [f"fast={dice.choice(['true', 'false'])}", f"every={dice.choice([1, 4, 64])}"],
        "chunk": [f"size={dice.choice([1, 3, 8])}"],
        "fair": [f"at={dice.choice(['auto', '4', '3_9_14'])}", f"parts={dice.choice([1, 2, 5])}"],
    }.get(name, [])
    if name in WRAPPERS:
        bases = BASES if name in ("kvcrush", "chunk", "fair") else ATTENTIVE
        return ":".join([name, *options]) + "/" + draw_selector(dice, wrap=False, of=bases)
    return ":".join([name, *options, f"decode={dice.choice(['evict', 'evict', 'grow'])}"])


WRAPS = ("lowrank", "think")
"""Codecs over other codecs."""

_OPTIONS: dict[str, dict[str, list[object]]] = {
    "tokenwise": {
        "key_bits": [2, 3, 4, 8, "fp8", "auto"],
        "value_bits": [2, 3, 4, 8, "fp8", "auto"],
        "group_size": [2, 4, 8],
        "normalize": ["true", "false"],
    },
    "bfp": {"mantissa": [3, 4, 5, 6, 8], "block_channels": [1, 3, 8], "exact_values": ["true", "false"]},
    "kvquant": {"bits": [2, 3, 4], "outliers": [0.0, 0.1, 0.3], "sinks": [0, 1, 4], "norm": ["true", "false"]},
    "rotate": {"bits": [2, 3, 4], "value_bits": ["auto", 2, 4], "group_size": [2, 8], "sinks": [0, 1, 5]},
    "turboquant": {"bits": [2, 4], "key_bits": ["auto", 2, 4], "seed": [0, 3]},
    "csr": {
        "nnz": [4],
        "value_chunks": [1, 2, 4],
        "key_space": ["unrotated", "rotated"],
        "prompt_atoms": [0, 1, 3],
        "index": ["int16", "packed"],
        "solver": ["mp", "refit", "omp"],
        "outlier_atoms": [0, 1, 3],
    },
    "lowrank": {
        "rank": [1, 4, 8],
        "value_rank": ["auto", 2],
        "key_space": ["unrotated", "rotated"],
        "basis": ["keys"],
    },
    "kvarn": {
        "key_bits": [2, 3, 4],
        "value_bits": [2, 3, 4],
        "group_size": [1, 3, 4, 8],
        "iterations": [1, 3],
        "sinks": [0, 2, 5],
    },
    "oscar": {
        "bits": [2, 3, 4],
        "key_bits": ["auto", 4],
        "group_size": [4, 128],
        "key_clip": [0.7, 1.0],
        "value_clip": [0.9],
        "sinks": [0, 3],
    },
    "think": {"ratio": [0.0, 0.4, 0.7], "window": [1, 4, 32]},
    "mikv": {"high": [0.0, 0.2, 0.75, 1.0], "high_bits": [8, 16], "bits": [2, 3, 4], "group_size": [2, 8]},
}


def _choices(name: str) -> dict[str, list[object]]:
    """The parameters of a method that have few values, and these values as a spec has them."""
    hints = get_type_hints(lookup(name)[1])
    choices: dict[str, list[object]] = {}
    for key, hint in hints.items():
        if get_origin(hint) is Literal:
            choices[key] = [*get_args(hint)]
        elif hint is bool:
            choices[key] = ["true", "false"]
    return choices


def draw_codec(dice: Random) -> str:
    """The words of a codec with options drawn at random."""
    name = dice.choice([*CODECS, "plain", "kivi"])
    sizes = f"group_size={dice.choice([1, 2, 3, 4, 8])}:residual_length={dice.choice([0, 1, 4, 9])}"
    if name == "plain":
        return name
    if name == "kivi":
        return f"kivi:bits={dice.choice([2, 4, 8])}:key_bits={dice.choice([4, 8, 'auto'])}:{sizes}"
    if name == "gear":
        backbone = dice.choice(["kivi", "kcvt"])
        bits = f"{dice.choice([2, 4, 8])}:key_bits={dice.choice([4, 8, 'auto'])}"
        size = f"group_size={dice.choice([2, 3, 4])}:residual_length={dice.choice([0, 1, 4, 9])}"
        return f"gear:rank=0:bits={bits}:backbone={backbone}:sparse={dice.choice(['0.0', '0.1', '0.3'])}:{size}"
    if name == "staircase":
        return f"staircase:tokens_8bit={dice.randint(1, 9)}:tokens_4bit={dice.randint(1, 9)}:{sizes}"
    if name == "zipcache":
        return f"zipcache:high={dice.choice(['0.0', '0.3', '1.0'])}:bits=3:recode_every={dice.randint(1, 9)}"
    options = {key: dice.choice(values) for key, values in (_OPTIONS.get(name) or _choices(name)).items()}
    sizes = {"residual_length": dice.choice([0, 1, 4]), "block_size": dice.randint(1, 6)}
    own = {key: size for key, size in sizes.items() if key in parameters(name)}
    base = dice.choice(["", "kivi:bits=4:group_size=4", "tokenwise:group_size=4", "bfp"]) if name in WRAPS else ""
    if base:
        own = {"residual_length": sizes["residual_length"]} if base.startswith("kivi") else own
        base = "/" + ":".join([base, *(f"{key}={size}" for key, size in own.items())])
    else:
        options |= own
    if name in ("csr", "kvquant", "lowrank", "oscar"):
        options["dictionary" if name == "csr" else "calibration"] = write(name)
    return ":".join([name, *(f"{key}={value}" for key, value in options.items())]) + base


def draw_merger(dice: Random) -> str:
    """The words of a merger with options drawn at random."""
    name = dice.choice([name for name in MERGERS if name != "drop"])
    options = {
        "blend": [f"least={dice.choice(['0.0', '0.3', '0.6'])}"],
        "d2o": [f"decay={dice.choice(['0.1', '0.5', '1.0'])}"],
        "keepkv": [f"window={dice.choice([1, 4, 32])}", f"least={dice.choice(['-1.0', '0.3', '0.8'])}"],
        "kvmerger": [f"least={dice.choice(['-1.0', '0.3', '0.75'])}"],
        "merge": [f"by={dice.choice(['keys', 'position'])}", f"least={dice.choice(['-1.0', '0.3', '0.9'])}"],
        "regress": [
            f"window={dice.choice([1, 5, 32])}",
            f"queries={dice.choice(['window', 'replay'])}",
            f"ridge={dice.choice(['0.01', '1.0'])}",
            f"sinks={dice.randint(0, 4)}",
            f"recent={dice.choice([0, 3, 32])}",
        ],
        "zsmerge": [f"slots={dice.randint(1, 5)}", f"alpha={dice.choice(['0.01', '0.7', '1.0'])}"],
    }.get(name, [])
    return ":".join([name, *options])


def converse(seed: int, *, idle: bool = False, merges: bool = False) -> None:
    """A prompt, then steps and continuations, padded anywhere, under budgets that may rise.

    Args:
        seed: Of everything.
        idle: Whether continuations may bring some rows nothing but padding.
        merges: Whether evicted tokens are merged.
    """
    dice = Random(seed)
    selector = draw_selector(dice)
    codec = draw_codec(dice)
    if any(is_refused(name, codec.partition(":")[0]) for name in selector.replace(":", "/").split("/")):
        codec = "plain"
    merger = draw_merger(Random(-1 - seed)) if merges else "drop"  # the same conversation, with and without
    policy = Policy.parse(f"{selector}+{merger}+{codec}@0.5")
    batch = dice.randint(1, 3)
    floor = policy.selector.min_tokens
    heads, group = dice.choice([(1, 1), (2, 2), (1, 3), (3, 1)])
    sizes = [dice.randint(2, 40), *(dice.choice([1, 1, 1, 1, dice.randint(2, 12)]) for _ in range(dice.randint(3, 25)))]
    bench = Bench(
        policy, [floor + dice.randint(0, 14) for _ in range(batch)], new=sum(sizes), layer_idx=dice.randint(0, 3)
    )
    for number, size in enumerate(sizes):
        valid = torch.ones(batch, size, dtype=torch.bool)
        if number == 0 or dice.random() < 0.3:
            for row in range(batch):
                valid[row, : dice.randint(0, size - (number == 0 or (size > 1 and not idle)))] = dice.random() < 0.5
        if size > 1 and dice.random() < 0.5:
            some = valid.any(-1).tolist()  # a share rises only where tokens come
            bench.budgets = [
                budget + dice.randint(0, 4) * more for budget, more in zip(bench.budgets, some, strict=True)
            ]
        q, k, v = draw(size, 1000 * seed + number, batch=batch, heads=heads, group=group, sharp=dice.choice([0.5, 2.0]))
        bench.forward(q, k, v, None if bool(valid.all()) else valid)
    bench.check()


@product("seed", range(150), sample=[(seed,) for seed in range(25)])
def test_some(seed: int) -> None:
    converse(seed)


@product("seed", range(150), sample=[(seed,) for seed in range(25)])
def test_merges(seed: int) -> None:
    converse(seed, idle=seed % 2 == 0, merges=True)


@pytest.mark.parametrize("seed", [71, 102, 287, 308])
def test_rows_that_get_nothing(seed: int) -> None:
    """A row that only gets padding stays as it is."""
    converse(seed, idle=True)


@product("seed", range(150, 3000), sample=[])
def test_many(seed: int) -> None:
    converse(seed, idle=seed % 2 == 0, merges=seed % 5 > 1)
