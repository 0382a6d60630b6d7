"""`kvpolicy explain`: its numbers are those of the plan, for every part, plug-ins included."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest

from kvpolicy import SlidingWindow, registry
from kvpolicy.cli.explanation import _per_layer
from tests.cli.conftest import Facts, Run
from tests.conformance.policies import ALLOCATORS, CODECS, COMPARING, GROUPING, MERGERS, RANKED, SELECTORS
from tests.sampling import each_once


def output(run: Run, line: str) -> str:
    """The output for a prompt of 4,096 tokens, whatever the model was trained for."""
    prompt = "" if "--prompt" in line else " --prompt 4096"
    return " ".join(run(f"explain {line}{prompt}").split())


def test_a_fraction_in_tokens_and_bits(run: Run) -> None:
    text = output(run, "squeeze+kvcrush/snapkv+kivi:bits=4@0.2 llama-2-70b")
    assert "0.2 of 4,096 tokens is 819 tokens per layer on average, 65,520 in 80 layers." in text
    assert "each KV head keeps 819 of 4,096 tokens: 204 representatives (0.25 of the budget)" in text
    assert "615 chosen by the base selector (always the newest 32, and the 583 of highest priority)" in text
    assert "an encoded number takes 5.00 bits (codes 4.00, scales 1.00)" in text
    assert "A layer of 819 tokens has a full-precision buffer of 57 slots, and 800 encoded slots." in text
    assert "53-79: 328 tokens." in text  # squeeze's example: 0.4 of 819.2
    assert "Total: 101 MiB, 0.063 of the full cache (1.56 GiB)" in text


def test_the_text_of_each_part(run: Run, facts: Facts) -> None:
    line = "explain kvcrush/snapkv+quest@0.2 tiny --prompt 512 --new 64"
    text = run(line)
    head, budget, *_, total = text.split("\n\n")
    assert " ".join(head.split()) == (
        "policy kvcrush+quest@0.2 model tiny in bfloat16: 8 layers with 4 KV heads of dimension 32, 512 B per token "
        "and layer input 1 row with 512 prompt tokens and 64 new tokens"
    )
    assert [each.split()[0] for each in head.splitlines() if each[0] != " "] == ["policy", "model", "input"]
    assert budget.startswith("Budget: 0.2\n  0.2 of 512 tokens is 102 tokens per layer on average, 816 in 8 layers.")
    joined = " ".join(text.split())
    found = facts(line)
    for part in found["parts"]:
        for depth, strategy in enumerate(part["strategies"]):
            name = f"{strategy['name']}: " if depth else ""
            assert " ".join(f"{name}{strategy['summary']} {strategy['idea']}".split()) in joined
    assert "Selector kvcrush over snapkv: which tokens are kept? Use part of" in joined
    assert "Parameters: read=256; page=auto; dense=2; recent=1; resort=256; host=false. Here: each decode" in joined
    share = found["cache"]["total"] / found["full_cache"]
    assert total.startswith("Total: 437 KiB, 0.190 of the full cache (2.25 MiB): exact") and round(share, 3) == 0.19


def test_few_budgets_are_listed_and_many_are_not() -> None:
    case: Any = SimpleNamespace(planned=SimpleNamespace(layers=[SimpleNamespace(layer_idx=at) for at in range(5)]))
    listed = "layer 0: 1 token; layer 1: 2 tokens; layer 2: 3 tokens; layers 3-4: 4 tokens"
    assert _per_layer([1, 2, 3, 4, 4], case) == listed
    assert _per_layer([1, 2, 3, 4, 5], case) == "1 token in layer 0, 5 in layer 4 (minimum 1, maximum 5)"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("streaming@0.5", "always the first 4, and the newest 2,044."),
        ("window@100", "100 tokens per layer on average, 800 in 8 layers."),
        ("window@100", "the newest 100. The selector uses no attention weights."),
        ("h2o:recent=0.25@0.5", "always the newest 512, and the 1,536 of highest priority"),
        ("snapkv:decode=grow@0.2", "each layer has 1,024 more slots"),
        ("snapkv:decode=grow@0.2", "each KV head keeps 819 of 4,096 tokens"),
        ("snapkv@9000", "9,000 tokens per layer on average, 72,000 in 8 layers. The prompt of 4,096 tokens fits."),
        ("full", "The whole prompt is kept: 4,096 tokens in each of 8 layers."),
        ("pyramid+window@0.2 mixtral-8x7b", "1,597 tokens in layer 0, 41 in layer 31"),
        ("window@1MiB", "1MiB for the whole cache, all bytes included, is 248 tokens per layer on average"),
        ("kivi:bits=8", "an encoded number takes 9.00 bits"),
        ("csr", "The calibrated tensors take"),
        ("uniform/adakv+h2o+tokenwise@0.2", "KV head has a full-precision buffer of 25 slots, and an encoded slot"),
        ("window@1e-300", "each KV head keeps 1 of 4,096 tokens"),
        (
            "squeeze:groups=5+window@0.2",
            "for cosines that increase linearly from 0.5 in the first layer to 0.95 in the last: "
            "layers 0-5: 983 tokens; layers 6-7: 327 tokens.",
        ),
        ("lava+snapkv@0.2", "and budgets depend on the result. If all layers are alike: 819 tokens in every layer."),
        ("window@99999999999999999", "Here: 5,120 tokens in every layer."),
        ("full+minicache", "an encoded number takes 9.33 bits"),
        ("full+minicache", "Layers 4 and 5, 6 and 7 share what they store, which the first of them holds."),
        ("lowrank:rank=12:ranks=energy", "By layer: rank 14, 14, 15, 9, 15, 11, 13, 15; value_rank 11, 12, "),
        ("lowrank:rank=12:ranks=energy", "an encoded number takes 6.00 bits"),
        ("pyramid+window+lowrank:rank=12:ranks=energy@1MiB", "Here: 1,121 tokens in layer 0, 29 in layer 7"),
        ("probe+zipcache", "Whenever the full-precision buffer is full, all tokens are encoded again."),
        ("streaming@0.5 tiny --prompt 1000000", "each KV head keeps 500,000 of 1,000,000 tokens"),
    ],
)
def test_effects(line: str, message: str, run: Run) -> None:
    assert message in output(run, line)


ROWS = [
    *each_once(ALLOCATORS, SELECTORS),
    *(("h2o", *row) for row in each_once(MERGERS, [name for name in CODECS if name not in GROUPING + RANKED])),
    *(("h2o", name) for name in RANKED),
    *(("snapkv", name) for name in [*COMPARING, *registry.names("reader")]),
    *(("streaming", name) for name in GROUPING),
    *((f"uniform/{name}", "h2o") for name in registry.names("head_allocator")),
    ("full",),
]
"""Each part in a policy."""


@pytest.mark.parametrize("policy", ["+".join(row) for row in ROWS])
def test_every_part_is_explained_with_the_bytes_of_the_plan(policy: str, facts: Facts) -> None:
    explained = facts(f"explain {policy} tiny --batch 3")
    planned = facts(f"plan tiny {policy} --batch 3")
    assert explained["cache"] == planned["cache"] and explained["layers"] == planned["layers"]
    told = {strategy["name"] for part in explained["parts"] for strategy in part["strategies"]}
    assert {*re.split("[+/]", policy)} <= told
    assert all(re.search(r"[0-9a-z]", sentence) for part in explained["parts"] for sentence in part["here"])


def test_no_part_is_left_out() -> None:
    assert {name for row in ROWS for name in re.split("[+/]", "+".join(row))} == {*registry.names()}


def test_a_bare_command_does_not_warn_of_its_own_defaults(run: Run) -> None:
    """Not even for a model of fewer positions than the usual prompt; a prompt that was asked for is warned of."""
    for line in ("explain", "plan", "explain full llama-2-70b"):
        assert "exceed" not in run(line)
    assert "exceed the" in run("plan tiny --prompt 128k")


def test_a_selector_that_cannot_rank_unseen_tokens(monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    def priority(*args: object) -> Any:
        raise AssertionError("nothing was seen")

    monkeypatch.setattr(SlidingWindow, "priority", priority)
    assert "the 819 of highest priority" in output(run, "window@0.2")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("nonsense", "got 'nonsense'"),
        ("tiny snapkv", "POLICY must be a policy spec, got the model 'tiny'; try kvpolicy explain POLICY tiny."),
        ("kivi@0.2", "must have a selector"),
        ("streaming@3", "at least 5 tokens"),
        ("window@0.2 no/such/model", "got no/such/model"),
        ("csr llama-2-70b", "made for another model"),
        ("window@1B", "budget must be at least"),
        ("full tiny --prompt many", "number of tokens from 1, such as 4096 or 128k, got 'many'. Try kvpolicy explain"),
        ("full tiny --dtype int8", "--dtype must be one of bfloat16, float16, float32, float64, got 'int8'"),
        ("full tiny --dtype Tensor", "--dtype must be one of bfloat16, float16, float32, float64, got 'Tensor'"),
    ],
)
def test_error_messages(line: str, message: str, run: Run) -> None:
    assert message in run(f"explain {line}", 2)


def test_an_empty_policy_is_no_model(run: Run) -> None:
    assert "must not be empty, got ''; try a spec such as 'snapkv@0.2'." in run(["explain", ""], 2)
