"""The commands that compare codecs: their words, their bits, their lines."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

import kvpolicy
from kvpolicy import Policy
from kvpolicy.distortion import coded_layer
from kvpolicy.registry import names
from kvpolicy_eval import bits, frontier
from kvpolicy_eval.codecs import CODECS, short_windows, with_ranking
from kvpolicy_eval.distortion import Pages
from kvpolicy_eval.standins import stand_in
from kvpolicy_eval.table import Examiner

HEADS, DIM = 2, 128


def test_every_codec_is_compared() -> None:
    assert {codec.split(":")[0] for codec in CODECS} == set(names("codec"))


@pytest.mark.parametrize("codec", [codec for codec in CODECS if codec != "plain"])
def test_short_windows(codec: str) -> None:
    """Fewer exact tokens, and the same number of bits."""
    long, short = (Policy.parse(with_ranking(words)).codec for words in (codec, short_windows(codec)))
    assert type(long) is type(short)
    if "zipcache" not in codec:
        assert short.layout(10_000).exact < long.layout(10_000).exact


@pytest.mark.parametrize("tokens", [1024, 4096, pytest.param(32768, marks=pytest.mark.slow)])
@pytest.mark.parametrize("codec", CODECS)
def test_bytes_are_those_of_the_plan(codec: str, tokens: int, tmp_path: Path) -> None:
    policy = Policy.parse(with_ranking(codec, "window"))
    policy = dataclasses.replace(policy, codec=stand_in(policy.codec, tmp_path, HEADS, DIM, atoms=64))
    x = torch.randn(1, HEADS, tokens, DIM, generator=torch.Generator().manual_seed(0))
    held = coded_layer(policy.codec, x, x, selector=policy.selector).held()
    plan = kvpolicy.plan(bits.shape(HEADS, DIM), policy, prompt=tokens, dtype=torch.float32)
    assert held == plan.layers[0].nbytes


def test_bits_are_those_of_the_formulas() -> None:
    """Of a coded token alone: bits, and 32 more for each group's scale and zero."""
    found = {
        row[0]: row[4]
        for row in bits.rows(bits.shape(8, 128), ["kivi:bits=2", "tokenwise", "csr:nnz=8", "kvquant:bits=3"])
    }
    assert found == {
        "`kivi:bits=2`": "3.000",
        "`tokenwise`": "4.250",
        "`csr:nnz=8`": "2.000",
        "`kvquant:bits=3`": "3.312",
    }


def test_a_line_of_the_frontier() -> None:
    """The same bytes hold more tokens of fewer bits."""
    examiner = Examiner(1, 512, torch.bfloat16)
    pages = Pages(examiner.model, examiner.tokenizer)
    plain, four = (frontier.line(examiner, pages, codec, 0.1, "window") for codec in ("plain", "tokenwise"))
    assert int(four[2]) > 1.5 * int(plain[2])
    assert plain[4] == "" and 0 < float(four[4]) < 0.05
    assert float(plain[-1]) > 1 and float(four[-1]) > 1
