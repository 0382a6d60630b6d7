"""What a notebook shows: a handle, a cache, a report, a plan and a policy as tables, and all on one line."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import pytest

import kvpolicy
from kvpolicy import Handle, Policy, SlidingWindow, registry
from kvpolicy.hf.embedded import config_of
from kvpolicy.text.tables import format_bytes
from tests.html_pages import Page


def html_of(thing: Any) -> str:
    return thing._repr_html_()


def table(thing: Any) -> list[list[str]]:
    return Page(html_of(thing)).tables[0]


def test_a_report_is_a_table_of_its_layers(coded: Handle) -> None:
    report = coded.report()
    head, *rows, last = table(report)
    kinds = [kind for kind in report.layers[0].nbytes if report.layers[0].nbytes[kind]]
    assert head == ["layer", "budget", "kept", "seen", *kinds, "total", "of full"]
    assert [row[0] for row in rows] == ["0", "1 to 3"], "the first layer has what the cache has once"
    for row, layer in zip(rows, report.layers, strict=False):
        total = sum(layer.nbytes.values())
        sizes = [format_bytes(layer.nbytes[kind]) for kind in kinds]
        share = f"{total / (report.full_nbytes // 4):.1%}"
        assert row[1:] == ["1 to 20", "1 to 20", "1 to 40", *sizes, format_bytes(total), share]
    assert last[0] == "all"
    assert last[-2:] == [format_bytes(report.nbytes), f"{report.nbytes / report.full_nbytes:.1%}"]


def test_layers_that_differ_have_lines_of_their_own(squeezed: Handle) -> None:
    _, *rows, _ = table(squeezed)
    assert len({tuple(row[1:]) for row in rows}) > 1
    spans = [re.findall(r"\d+", row[0]) for row in rows]
    assert [int(at) for span in spans for at in range(int(span[0]), int(span[-1]) + 1)] == [0, 1, 2, 3]
    assert table(squeezed) == table(squeezed.cache) == table(squeezed.report())
    assert "detached from LlamaForCausalLM" in html_of(squeezed)


def test_a_plan_of_many_layers_is_folded() -> None:
    plan = kvpolicy.plan(config_of("llama-2-70b"), "pyramid+h2o@0.2", prompt=1000)
    short, whole = Page(html_of(plan)).tables
    assert [row[0] for row in short] == ["layer", "all"] and short[1][-2] == format_bytes(plan.nbytes)
    assert [row[1] for row in whole[1:]] == [f"{layer.tokens:,}" for layer in plan.layers]
    assert "<summary>80 lines" in html_of(plan)
    even = kvpolicy.plan(config_of("llama-2-70b"), "squeeze+h2o@0.2", prompt=1000)
    assert [row[:2] for row in table(even)] == [["layer", "budget"], ["0", "200"], ["1 to 79", "200"], ["all", ""]]
    assert "measures them in the prompt" in html_of(even) and "on each of" not in html_of(even)
    assert "on each of 8 ranks" in html_of(kvpolicy.plan(config_of("llama-2-70b"), "h2o@0.2", tp=8))


def test_unmanaged_layers_are_shown(sliding: Handle) -> None:
    assert sliding.plan is not None
    for thing in (sliding.report(), sliding.plan):
        rows = table(thing)[1:-1]
        assert [(row[0], row[1] == "unmanaged") for row in rows] == [
            ("0 to 1", True),
            ("2", False),
            ("3 to 4", True),
            ("5", False),
        ]


def test_before_the_first_prompt_the_policy_is_shown(model: Any) -> None:
    with kvpolicy.attach(model, "squeeze+h2o@0.4") as handle:
        assert "attached to LlamaForCausalLM, no cache yet" in html_of(handle)
        for thing in (handle, kvpolicy.PolicyCache(model)):
            assert [row[:2] for row in table(thing)[1:3]] == [["allocator", "SqueezeAttention"], ["selector", "H2O"]]
        assert repr(handle) == "Handle(squeeze+h2o@0.4 on LlamaForCausalLM, no cache yet)"
        assert repr(kvpolicy.PolicyCache(model)) == "PolicyCache(squeeze+h2o@0.4, no prompt yet)"


def test_a_policy_says_what_its_parts_do() -> None:
    rows = table(Policy.parse("squeeze:keep_share=0.3+kvcrush/h2o+kivi:bits=4@64"))
    assert [row[0] for row in rows[1:]] == [*registry.kinds(), "budget"]
    assert rows[1][2].startswith("Move budget away from layers") and "share=0.3" in rows[1][3]
    assert "base=h2o" in rows[2][3] and "bits=4" in rows[4][3]
    assert rows[6][1:3] == ["64", "tokens per layer on average"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Loud(SlidingWindow):
    """Keep <b>all</b> & more."""

    name: str = "<script>"


def test_what_others_write_is_text() -> None:
    policy = Policy(selector=Loud(), budget=0.5)
    html = html_of(policy)
    assert "selector=Loud(" in repr(policy) == str(policy), "it has no words"
    assert "<b>" not in html and "<script>" not in html and "Keep &lt;b&gt;all&lt;/b&gt; &amp; more." in html
    Page(html)


def test_a_line_says_the_essential(squeezed: Handle, coded: Handle) -> None:
    assert squeezed.cache is not None
    share = f"{squeezed.cache.nbytes / squeezed.cache.full_nbytes:.1%} of the full cache"
    held = f"3 rows, {format_bytes(squeezed.cache.nbytes)}, {share}"
    assert repr(squeezed.cache) == f"PolicyCache(squeeze+h2o@0.4, {held})"
    assert repr(squeezed) == f"Handle(squeeze+h2o@0.4 on LlamaForCausalLM, {held}, detached)"
    for thing in (coded.report(), coded.plan):
        assert re.fullmatch(r"(Report|CachePlan)\(h2o\+kivi.*@0\.5, 4 layers, .* of the full cache\)", repr(thing))


@pytest.mark.parametrize("words", ["full", "kivi:bits=4", "squeeze+kvcrush/h2o+kivi:bits=4@0.2", "tova@512MiB"])
def test_a_policys_line_makes_it_again(words: str) -> None:
    policy = Policy.parse(words)
    assert eval(repr(policy)) == policy
