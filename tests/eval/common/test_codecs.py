"""The codecs that tables compare, and the tables of bits and of the frontier."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

import kvpolicy
from kvpolicy import Policy
from kvpolicy.distortion import coded_store
from kvpolicy.planning.memory import DIGEST_NBYTES
from kvpolicy.registry import names
from kvpolicy.text.grammar import first_name
from kvpolicy_eval.common.accuracy import TaskEvaluator
from kvpolicy_eval.common.codecs import _SHORT, CODECS, groups_layers, selector_for, short_windows, with_ranking
from kvpolicy_eval.common.heldout import HeldOutText
from kvpolicy_eval.common.synthetic import one_layer_config, with_random_calibration
from kvpolicy_eval.tables import bits, frontier
from tests.sampling import product

HEADS = 2
DIM = 128


def test_every_codec_is_compared() -> None:
    assert {first_name(codec) for codec in CODECS} == set(names("codec"))


def test_short_windows() -> None:
    """Fewer tokens in full precision, and the same codec."""
    for codec in CODECS:
        long, short = (Policy.parse(with_ranking(spec)).codec for spec in (codec, short_windows(codec)))
        assert type(long) is type(short)
        if {field.name for field in dataclasses.fields(long)} & {*_SHORT}:  # pyright: ignore[reportArgumentType]
            assert short.layout(10_000).exact < long.layout(10_000).exact, codec


TOKENS = [1024, 4096, 32768]


ALONE = [codec for codec in CODECS if not groups_layers(codec)]
"""Codecs whose layers have the same bytes alone as in a cache."""


@product("codec,tokens", ALONE, TOKENS, sample=[(codec, TOKENS[number % 2]) for number, codec in enumerate(ALONE)])
def test_bytes_are_those_of_the_plan(codec: str, tokens: int, tmp_path: Path) -> None:
    policy = Policy.parse(with_ranking(codec, "window"))
    policy = dataclasses.replace(policy, codec=with_random_calibration(policy.codec, tmp_path, HEADS, DIM, atoms=64))
    x = torch.randn(1, HEADS, tokens, DIM, generator=torch.Generator().manual_seed(0))
    held = coded_store(policy.codec, x, x, selector=policy.selector).nbytes_by_kind()
    plan = kvpolicy.plan(one_layer_config(HEADS, DIM), policy, prompt=tokens, dtype=torch.float32)
    held["counters"] += DIGEST_NBYTES  # which a cache holds, and a layer by itself does not
    assert held == plan.layers[0].nbytes


def test_a_codec_that_groups_layers_is_measured_with_selectors_that_it_is_combined_with() -> None:
    for name in CODECS:
        for usual in ("snapkv", "window"):
            Policy.parse(f"{selector_for(name, usual)}+{name}@0.5")
    assert selector_for("minicache", "window") == "window" and selector_for("kivi", "snapkv") == "snapkv"


def test_bits_are_those_of_the_formulas() -> None:
    """Of encoded tokens alone: bits per element, and 32 bits for the scale and zero point of each group."""
    found = {
        row[0]: row[4]
        for row in bits.rows(one_layer_config(8, 128), ["kivi:bits=2", "tokenwise", "csr:nnz=8", "kvquant:bits=3"])
    }
    assert found == {
        "`kivi:bits=2`": "3.000",
        "`tokenwise`": "4.250",
        "`csr:nnz=8`": "2.000",
        "`kvquant:bits=3`": "3.312",
    }


@pytest.mark.slow
def test_a_line_of_the_frontier() -> None:
    """The same bytes hold more tokens of fewer bits."""
    evaluator = TaskEvaluator(1, 512, torch.bfloat16)
    text = HeldOutText(evaluator.model, evaluator.tokenizer)
    plain, four = (frontier.line(evaluator, text, codec, 0.1, "window") for codec in ("plain", "tokenwise"))
    assert int(four[2]) > 1.5 * int(plain[2])
    assert plain[4] == "" and 0 < float(four[4]) < 0.05
    assert float(plain[-1]) > 1 and float(four[-1]) > 1
