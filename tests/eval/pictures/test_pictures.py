"""The docs' pictures: drawn from what the engine keeps, the same each time, one on each method's page."""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path
from typing import Any

import matplotlib
import pytest
import torch
from matplotlib.colors import to_hex
from torch import Tensor

import kvpolicy
from kvpolicy.engine.state import slot_tensors
from kvpolicy_eval.methods.plan import measured, methods, page_of, paged
from kvpolicy_eval.pictures import allocators, codecs, idea, selectors
from kvpolicy_eval.pictures import scene as scenes
from kvpolicy_eval.pictures.__main__ import main
from kvpolicy_eval.pictures.catalog import pictures
from kvpolicy_eval.pictures.crush import crush_distances
from kvpolicy_eval.pictures.scene import kept, scene
from kvpolicy_eval.pictures.selectors import PICTURES as SELECTORS
from kvpolicy_eval.pictures.selectors import headline, image
from kvpolicy_eval.pictures.style import BLUE, DARK, INK, ORANGE, PALE, svg
from kvpolicy_eval.pictures.tensors import originals
from tests.conformance.policies import WRAPPERS

DOCS = Path(__file__).parents[3] / "docs"
HEADINGS = ["Formula", "Source and differences", "Cost and limits", "Measured", "Citation"]
OPTIONS = "Options"
"""Heading behind the formula, on pages that say more of options than their docstrings do."""
LAYER = scenes.RETRIEVES


@pytest.fixture(scope="module")
def attention() -> Tensor:
    """The whole matrix of attention of one layer, mean over the query heads of each KV head, [H, P, P]."""
    model, _ = scenes.embedded()
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        rows = model(scene().ids, output_attentions=True).attentions[LAYER][0]
    model.set_attn_implementation("sdpa")
    return rows.unflatten(0, (model.config.num_key_value_heads, -1)).mean(1)


def shares(scores: Tensor, budget: int, newest: int) -> Tensor:
    """Share of the heads that keep each position, where the highest of `scores` [H, P] stay."""
    scores = scores.clone()
    scores[:, scores.shape[1] - newest :] = torch.inf
    return torch.zeros_like(scores).scatter_(1, scores.topk(budget).indices, 1.0).mean(0)


def cache_of(policy: str) -> kvpolicy.PolicyCache:
    """What a cache holds of the scene."""
    model, _ = scenes.embedded()
    with kvpolicy.attach(model, policy), torch.inference_mode():
        cache = kvpolicy.PolicyCache(model)
        model(scene().ids, cache=cache)
    return cache


def test_h2o_and_tova_are_drawn_where_attention_is_highest(attention: Tensor) -> None:
    assert kept("h2o@0.25").share[LAYER].tolist() == shares(attention.sum(1), 62, 31).tolist()
    newest = attention[:, -1].mean(0, keepdim=True)
    assert kept("tova@0.25").share[LAYER].tolist() == shares(newest, 62, 1).tolist()
    assert torch.allclose(kept("tova@1.0").score[LAYER], newest[0], atol=1e-6)


def test_kvcrush_is_drawn_with_the_distances_that_decided() -> None:
    cache = cache_of("kvcrush@0.25")
    store: Any = cache.policy_layers[LAYER].store
    distance = crush_distances(23).tolist()
    drawn = torch.zeros(scene().length)
    for positions, marks in zip(store.tensors.positions[0].tolist(), store.tensors.state.mark[0].tolist(), strict=True):
        held = {place: mark for place, mark in zip(positions, marks, strict=True) if place >= 0}
        dropped = [place for place in range(scene().length) if not (place in held and not held[place])]
        order = sorted(dropped, key=lambda place: (distance[place], place))
        stand_in = {order[i * len(order) // 15] for i in range(15)}
        assert stand_in == {place for place, mark in held.items() if mark}
        drawn[list(stand_in)] += 1 / len(store.tensors.positions[0])
    assert kept("kvcrush@0.25").mark[LAYER].tolist() == drawn.tolist()


def test_a_color_says_how_many_heads_hold_a_token() -> None:
    found = kept("kvcrush@0.25")
    each = zip(found.share[LAYER].tolist(), found.mark[LAYER].tolist(), image(found)[LAYER] / 255, strict=True)
    both = {(share, mark): to_hex(color) for share, mark, color in each}
    assert both[1.0, 0.0] == BLUE.lower() and both[0.0, 0.0] == PALE
    full = image(kept("full"))
    assert {to_hex(color) for color in full.reshape(-1, 3) / 255} == {BLUE.lower()}
    alone = kept("kvcrush@0.25")._replace(share=torch.ones(1, 1), mark=torch.ones(1, 1))
    assert to_hex(image(alone)[0, 0] / 255) == ORANGE.lower()


def test_the_scene_is_what_the_captions_say() -> None:
    _, tokenizer = scenes.embedded()
    prompt = scene()
    text = tokenizer.decode(prompt.ids[0], skip_special_tokens=True)
    assert text.count("=") == scenes.RECORDS + 1
    first, last = prompt.fact
    asked = tokenizer.decode(prompt.ids[0, first : last + 1])
    assert asked == f"{text[text.rindex('?') + 1 :]}{prompt.answer}\n"
    assert tokenizer.decode(prompt.ids[0, prompt.question :]) == text[text.rindex("?") :]


@pytest.mark.parametrize("name", ["squeeze", "snapkv", "bfp"])
def test_drawn_again_it_is_the_same_to_the_byte(name: str, tmp_path: Path) -> None:
    first = svg(pictures()[name])
    kept.cache_clear()
    scenes.cache_under.cache_clear()
    originals.cache_clear()
    with matplotlib.rc_context({"font.size": 20.0, "svg.fonttype": "path"}):  # of whoever calls
        main([name, "--out", str(tmp_path)])
    assert (tmp_path / f"{name}.svg").read_bytes() == first
    assert b"<dc:date>" not in first


def test_a_picture_has_a_dark_form() -> None:
    """Rules for colors that the picture has: text and background are not those of a white page."""
    for path in sorted((DOCS / "pictures").glob("*.svg")):
        content = path.read_text(encoding="utf-8")
        _, _, rules = content.partition("@media (prefers-color-scheme: dark) {")
        assert f'[style*="fill: {INK}"]{{fill: {DARK[INK]} !important}}' in rules, f"draw {path.name} again"
        assert f"fill: {INK}" in content, path.name


def test_the_idea_is_drawn_from_one_run() -> None:
    stored, uncoded = idea.bytes_by_layer()
    budgets = kept(idea.POLICY).budgets
    cache = cache_of(idea.POLICY)
    assert [int(layer.budget[0]) for layer in cache.policy_layers] == budgets
    assert sum(sum(layer.values()) for layer in stored) == cache.nbytes
    assert all(sum(layer.values()) < size for layer, size in zip(stored, uncoded, strict=True))


def test_methods_without_a_picture_of_their_own_have_one() -> None:
    assert f"tova@{scenes.BUDGET}".encode() in svg(lambda: selectors.picture("tova"))
    assert b"pyramid: " in svg(lambda: allocators.picture("pyramid"))
    codec = svg(lambda: codecs.picture("tokenwise"))
    assert len(codec) < 100_000 and b"tokenwise:residual_length=8:block_size=8" in codec


def test_a_picture_that_is_not_there_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["h3o"])
    assert stopped.value.code == 2
    assert "no picture 'h3o'" in capsys.readouterr().err


class TestPages:
    def test_each_method_has_a_picture_that_its_page_shows(self) -> None:
        assert {*methods()} <= {*pictures()}
        for name in methods():
            assert 1_000 < (DOCS / "pictures" / f"{name}.svg").stat().st_size < 100_000, name
            page = (DOCS / "methods" / f"{page_of(name)}.md").read_text(encoding="utf-8")
            assert re.search(rf"!\[[^\]]{{20,}}\]\(\.\./pictures/{name}\.svg\)", page), name

    @pytest.mark.parametrize("name", ["snapkv", "tova", "window", "kvcrush", "probe"])
    def test_the_picture_that_is_there_is_of_this_engine(self, name: str) -> None:
        policy = f"{name}@{scenes.BUDGET}"
        texts = unescape((DOCS / "pictures" / f"{name}.svg").read_text(encoding="utf-8"))
        assert headline(policy, kept(policy)) in texts

    def test_pages_have_one_order(self) -> None:
        for name in paged():
            page = (DOCS / "methods" / f"{name}.md").read_text(encoding="utf-8")
            found = re.findall(r"^## (.+)$", page, re.MULTILINE)
            assert found in (HEADINGS, [*HEADINGS[:1], OPTIONS, *HEADINGS[1:]]), name
            beginning = page.partition("\n## ")[0]
            assert re.search(rf"\n# {name}\n\n\*\*", beginning) and f"/{name}.svg)" in beginning, name
            place = page.index(f"<!-- table:{'measured' if name in measured() else 'places'} -->")
            assert re.search(r"\| (policy|codec) \|", page[place : page.index("<!-- /table -->", place)]), name

    def test_the_index_says_what_statistics_take(self) -> None:
        index = (DOCS / "methods" / "index.md").read_text(encoding="utf-8")
        for name in [name for name in SELECTORS if name not in WRAPPERS]:
            state = kvpolicy.Policy.parse(name).selector.alloc(1, 1, 1, "cpu")
            row = re.search(rf"^\| \[`{name}`\].*$", index, re.MULTILINE)
            nbytes = sum(part.nbytes for part in slot_tensors(state))
            # What a selector holds per head follows; it does not grow with the slots.
            assert row and re.search(rf"\| {nbytes} bytes(, and [^|]+)? \|", row[0]), name
