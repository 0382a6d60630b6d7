"""`kvpolicy inspect`: its numbers are those of the cache; its output in a terminal, and its page."""

from __future__ import annotations

import html
import importlib
import io
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import kvpolicy
from kvpolicy.cli.app import main
from kvpolicy.cli.generation import held
from kvpolicy.cli.inspection import MARKS, inspect_prompt
from kvpolicy.cli.inspection_html import page
from kvpolicy.reporting.token_spans import level
from tests.cli.conftest import Facts, Run, Tiny
from tests.conformance.models import build
from tests.html_pages import Page
from tests.modules import forget

PROMPT = "\n".join(
    ["def f(x):", "    # tiger=4821 and a few words more", '    return x + 1  # <b>"a"</b> & more', "", "", "?tiger="]
)
POLICY = "squeeze+snapkv@0.4"
LOOK = ["inspect", PROMPT, "--policy", POLICY]


def cache_of(tiny: Tiny, policy: str) -> Any:
    model, tokenizer = tiny
    with torch.no_grad(), kvpolicy.attach(model, policy) as handle:
        model(tokenizer(PROMPT, return_tensors="pt").input_ids)
    return handle.cache


@pytest.mark.parametrize("policy", [POLICY, "h2o@0.4"])
def test_numbers_are_those_of_the_cache(
    policy: str, tiny: Tiny, tmp_path: Path, facts: Facts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(PROMPT))
    found = facts(f"inspect --policy {policy}")
    cache = cache_of(tiny, policy)
    ids = tiny[1](PROMPT, return_tensors="pt").input_ids
    assert found["prompt"] == found["seen"] == ids.shape[1]
    assert (found["nbytes"], found["full_nbytes"]) == (cache.nbytes, cache.full_nbytes)
    for layer, slots in zip(found["layers"], cache.policy_layers, strict=True):
        assert layer["budget"] == int(slots.budget)
        assert layer["kept"] == [sum(place >= 0 for place in head) for head in slots.positions[0].tolist()]
    cosines = kvpolicy.profile(tiny[0], [ids], tmp_path / "profile.json")
    assert [layer["cosine"] for layer in found["layers"]] == pytest.approx(cosines)
    assert ("second" in found["measured"]) == (policy == "h2o@0.4")
    for token in found["tokens"]:
        held = [[token["position"] in head for head in slots.positions[0].tolist()] for slots in cache.policy_layers]
        assert token["layers"] == pytest.approx([sum(heads) / 4 for heads in held])
    assert "".join(token["text"] for token in found["tokens"]) == f"<s>{PROMPT}"


def test_without_importance(facts: Facts, run: Run) -> None:
    found = facts("inspect tiger=4821 --policy h2o@0.5 --no-importance")
    assert found["measured"] == "" and {layer["cosine"] for layer in found["layers"]} == {None}
    assert "was not measured" in run("inspect tiger=4821 --policy h2o@0.5 --no-importance")


def test_generated_tokens(facts: Facts) -> None:
    found = facts("inspect tiger=4821 --policy full --new 4")
    assert found["seen"] == found["prompt"] + 3 == len(found["tokens"])
    assert all(token["kept"] == 1 for token in found["tokens"])


@pytest.mark.parametrize("layer", [None, 1])
@pytest.mark.parametrize("columns", [60, 120])
def test_marks_below_the_text(columns: int, layer: int | None, tiny: Tiny, run: Run) -> None:
    out = run([*LOOK, *([] if layer is None else ["--layer", str(layer)])], columns=columns)
    assert "\x1b" not in out and max(map(len, out.splitlines())) <= columns
    lines = out[out.index("<s>") :].splitlines()
    marks = "".join(mark.ljust(len(text)) for text, mark in zip(lines[::2], [*lines[1::2], ""], strict=False))
    cache = cache_of(tiny, POLICY)
    wanted = ""
    layers = cache.policy_layers if layer is None else [cache.policy_layers[layer]]
    ids = tiny[1](PROMPT).input_ids
    for position, token in enumerate(ids):
        held = [position in head for slots in layers for head in slots.positions[0].tolist()]
        shown = tiny[1].decode([token]).replace("\n", "↵")
        wanted += MARKS[level(sum(held) / len(held))] * len(shown)
    assert "".join(lines[::2]) == f"<s>{PROMPT}".replace("\n", "↵")
    assert marks == wanted and len(set(marks)) > 2


def test_colors_if_the_terminal_has_them(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("FORCE_COLOR", "1")
    out = run(LOOK)
    assert "\x1b[" in out and "Marks:" not in out
    assert re.sub(r"\x1b\[[0-9;]*m", "", out).replace("↵\n", "↵").endswith("?tiger=\n")
    monkeypatch.setenv("NO_COLOR", "1")
    out = run(LOOK)
    assert "\x1b" not in out and "Marks:" in out


@pytest.mark.parametrize("command", ["inspect", "generate"])
def test_characters_that_the_output_cannot_encode(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    assert main([command, PROMPT, "--policy", "full", "--new", "20"]) == 0
    out.flush()
    text = out.buffer.getvalue().decode("ascii")  # pyright: ignore[reportAttributeAccessIssue]
    assert ("####" in text and "?tiger=" in text) if command == "inspect" else text.endswith("\n")


def test_the_page_is_self_contained(tiny: Tiny, tmp_path: Path, run: Run) -> None:
    path = tmp_path / "page.html"
    assert str(path) in run([*LOOK, "--html", str(path)])
    text = path.read_text(encoding="utf-8")
    found = Page(text)
    cache = cache_of(tiny, POLICY)
    assert not re.search(r"https?:|@import|url\((?!['\"]?#)", text)
    assert all(ref.startswith(("#", "data:")) for ref in found.refers)
    assert {ref[1:] for ref in found.refers if ref[0] == "#"} <= set(found.ids)
    assert set(re.findall(r"url\(#([^)]+)\)", text)) <= set(found.ids)
    assert len(found.ids) == len({*found.ids})
    said = {name: html.unescape(value) for name, value in re.findall("<dt>(.*?)</dt><dd>(.*?)</dd>", text)}
    assert [*said][:3] == ["kept", "bytes", "importance"]
    assert said["bytes"] == held(cache.nbytes, cache.full_nbytes)
    assert "fill: currentColor" in text and "#222222" not in text  # the ink of plots on paper
    assert found.tags["svg"] == 3 and found.tags["b"] == 0 and found.tags["script"] == 1
    assert found.shown == f"<s>{PROMPT}".replace("\n", "↵\n")
    for position, token in enumerate(found.spans):
        shares = [sum(position in head for head in slots.positions[0].tolist()) / 4 for slots in cache.policy_layers]
        assert token["data-k"] == "".join(str(level(share)) for share in (sum(shares) / 8, *shares))
        assert token["class"] == f"t k{token['data-k'][0]}"
        kept = [f"layer {at}: {share * 4:.0f} of 4 heads" for at, share in enumerate(shares) if share]
        assert token["title"].splitlines()[2:] == kept


@pytest.mark.parametrize("importance", [True, False])
def test_the_plot_has_every_layer_of_a_hybrid_model(
    importance: bool, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = pytest.importorskip("kvpolicy.reporting.plots.layers")
    given: list[Any] = []
    draw = layers.layer_similarity
    monkeypatch.setattr(layers, "layer_similarity", lambda rows, **words: given.extend(rows) or draw(rows, **words))
    ids = torch.arange(3, 40)[None]
    seen = inspect_prompt(build("gemma2"), tiny[1], ids, "squeeze+snapkv@0.5", importance=importance)
    if importance:
        seen = replace(seen, layers=(*seen.layers[:2], replace(seen.layers[2], cosine=None)))
    text = page(replace(seen, note="less < more"))
    assert "<dt>note</dt><dd>less &lt; more</dd>" in text
    assert seen.unmanaged and all(
        f'<th>{index}</th><td colspan="4">unmanaged: sliding window of {window:,} tokens</td>' in text
        for index, window in seen.unmanaged.items()
    )
    cosines = [layer.cosine for layer in seen.layers]
    wanted = [[None, cosines[0], None, cosines[1], None, None]] if importance else []
    assert [[None if value != value else value for value in row] for row in given] == wanted


def test_the_page_without_matplotlib(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    importlib.import_module("kvpolicy.reporting.plots")
    forget(monkeypatch, "kvpolicy.reporting.plots")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    path = tmp_path / "page.html"
    run([*LOOK, "--html", str(path)])
    found = Page(path.read_text(encoding="utf-8"))
    assert found.tags["svg"] == 0 and "pip install 'kvpolicy[plots]'" in path.read_text(encoding="utf-8")
    assert len(found.spans) > 20


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("a --policy nonsense", "got 'nonsense'"),
        ("a=1 --policy full --layer 8", "--layer must be a layer under the policy (0-7), got 8; try 0."),
        ("a=1 --policy full --html FOLDER/no/page.html", "--html must be a file in a folder that exists, got"),
        ("a=1 --policy full --html FOLDER", "must be a file, got the folder"),
        ("a=1 --policy streaming:sinks=1@64B", "budget must be at least"),
        ("a --model FOLDER", "cannot be loaded"),
        ("a --new 2048", "2,048 positions"),
    ],
)
def test_error_messages(line: str, message: str, tmp_path: Path, run: Run) -> None:
    assert message in run(f"inspect {line.replace('FOLDER', str(tmp_path))}", 2)
