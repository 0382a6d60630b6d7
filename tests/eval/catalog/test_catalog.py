"""Lists of methods and the map of the field are complete, and true of the registry and of kvpress."""

from __future__ import annotations

import ast
import copy
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvpolicy import registry
from kvpolicy.cli.strategy_docs import read as read_docstring
from kvpolicy_eval.catalog import field
from kvpolicy_eval.catalog.__main__ import main
from kvpolicy_eval.catalog.lists import front_matter, index, places
from kvpolicy_eval.catalog.places import Place

ROOT = Path(__file__).parents[3]


def test_every_list_is_current(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT)
    assert main(["--check"]) == 0, "run python -m kvpolicy_eval.catalog: " + capsys.readouterr().out


def test_a_changed_list_is_noticed_and_written_again(tmp_path: Path) -> None:
    for place in places(ROOT):
        file = tmp_path / place.path
        file.parent.mkdir(parents=True, exist_ok=True)
        right = (ROOT / place.path).read_text(encoding="utf-8")
        assert place.text in right, place.name
        file.write_text(right.replace(place.text, place.text[: len(place.text) // 2] + "\n"), encoding="utf-8")
        assert not place.is_current(tmp_path), place.name
        place.write(tmp_path)
        assert place.is_current(tmp_path), place.name
        assert file.read_text(encoding="utf-8") == right


@pytest.mark.parametrize("path", ["page.md", "module.py"])
def test_a_place_that_is_missing_is_one_sentence(path: str, tmp_path: Path) -> None:
    (tmp_path / path).write_text("<!-- generated:other --><!-- /generated -->\n# generated: other\n# /generated\n")
    with pytest.raises(ValueError, match=f"{path} has no place for methods"):
        Place(path=path, name="methods", text="").write(tmp_path)


PAGE = "---\nwhat it does: {}\n{}---\n\n# kivi\n"
SHARED = "---\nplain:\n  what it does: stores a | plain\n  source: a book\n---\n\n# Defaults\n"


def _made(folder: Path, more: str = "") -> None:
    (folder / "docs" / "methods").mkdir(parents=True)
    for name in registry.CODECS:
        text = PAGE.format(f"stores a | {name}", more if name == "kivi" else "")
        (folder / "docs" / "methods" / f"{name}.md").write_text(text, encoding="utf-8")
    (folder / "docs" / "methods" / "defaults.md").write_text(SHARED, encoding="utf-8")


def test_a_row_is_the_front_matter_and_the_source_of_the_docstring(tmp_path: Path) -> None:
    _made(tmp_path, "source: a poem\n")
    lines = index(tmp_path, "codec").splitlines()
    assert lines[0] == "| name | what it does | source |" and len(lines) == 2 + len(registry.CODECS)
    assert lines[2] == r"| [`plain`](defaults.md#plain) | stores a \| plain | a book |"
    assert r"| [`kivi`](kivi.md) | stores a \| kivi | a poem |" in lines
    gear = "GEAR, [arXiv:2403.05527](https://arxiv.org/abs/2403.05527)"
    assert rf"| [`gear`](gear.md) | stores a \| gear | {gear} |" in lines


@pytest.mark.parametrize(
    ("page", "front", "message"),
    [
        ("kivi", PAGE.format("x", "what it costs: much\n"), "has no column 'what it costs'"),
        ("kivi", "---\nsource: a book\n---\n", "must have 'what it does'"),
        ("kivi", "# kivi\n", "must begin with front matter"),
        ("defaults", SHARED.replace("plain:", "all:"), r"defaults\.md must have an entry for 'plain'"),
    ],
)
def test_a_wrong_front_matter_is_one_sentence(page: str, front: str, message: str, tmp_path: Path) -> None:
    _made(tmp_path)
    (tmp_path / "docs" / "methods" / f"{page}.md").write_text(front, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        index(tmp_path, "codec")


def test_a_page_that_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        main([])
    assert stopped.value.code == 2
    assert f"docs/methods/{next(iter(registry.ALLOCATORS))}.md" in capsys.readouterr().err


def test_api_pages_show_the_options_and_defaults_of_every_constructor() -> None:
    griffe = pytest.importorskip("griffe")
    from kvpolicy_eval.catalog import signatures

    loader = griffe.GriffeLoader(extensions=griffe.load_extensions(signatures.Strategies))
    package = loader.load("kvpolicy")
    for _, cls in map(registry.lookup, registry.names()):
        shown = package[f"{cls.__module__}.{cls.__qualname__}".removeprefix("kvpolicy.")].members["__init__"]
        _, *parameters = shown.parameters
        taken = inspect.signature(cls).parameters
        assert [one.name for one in parameters] == [*taken], cls
        for one in parameters:
            text = str(one.default)
            default = taken[one.name].default
            is_constant = text.endswith(".SAME")  # by its name
            is_base = repr(default) == "<factory>"
            assert text.endswith("()") if is_base else is_constant or ast.literal_eval(text) == default, (cls, one.name)


FIELD = field.load()
ENTRIES = (*FIELD.systems, *FIELD.presses)

PROMISED = """SqueezeAttention, KVCrush, CSR, H2O, SnapKV, StreamingLLM, PyramidKV, TOVA, Scissorhands, Keyformer,
A2SF, D2O, KVMerger, Elastic Cache, LOOK-M, EMS, RazorAttention, DuoAttention, ThinK, MatryoshkaKV, CSKV,
Effectively Compress KV Heads, MiniCache, TidalDecode, Double Sparsity, RetrievalAttention, A2ATS, ShadowKV, ReKV,
ZipVL, Attention-Gate, Locret, LoCoCo, CacheGen, CacheBlend, Cache-Craft, PIE, Hydragen, Prepacking, BatchLLM,
TriForce, RAPID, EasySpec, KV Prediction, Block Transformer, SCBench, Challenges in Deploying Long-Context
Transformers, InstInfer, FastSwitch, vAttention, KIVI, GEAR, KVQuant, RotateKV, ZipCache, MiKV, Accurate Block
Quantization, SAQ"""
"""Systems that the page promises to have."""


def test_every_promised_system_is_there() -> None:
    assert set(" ".join(PROMISED.split()).split(", ")) <= {entry.name for entry in FIELD.systems}


def test_the_page_for_people_from_kvpress_names_presses_that_there_are() -> None:
    page = ROOT / "docs" / "guide" / "from-kvpress.md"
    named = set(re.findall(r"\b[A-Z]\w+Press\b", page.read_text(encoding="utf-8")))
    assert len(named) > 10
    assert named - {"ScorerPress"} <= {entry.name for entry in FIELD.presses}  # the base class of scorers


def test_every_method_of_a_paper_is_there() -> None:
    """A method that is added to the registry, with a paper in its docstring or on its page, needs an entry."""
    pages = ROOT / "docs" / "methods"
    names = [name for table in registry.BUILT_IN.values() for name in table]
    of_papers = {
        name
        for name in names
        if front_matter(pages, name).get("source", read_docstring(registry.lookup(name)[1]).arxiv) not in ("", "none")
    }
    assert {"h2o", "adakv", "regress", "staircase", "quest"} < of_papers  # by a docstring, and by the page alone
    # `merge` has the law of two papers, whose own mergers are other methods, and `retrieval` is nearer to the paper of
    # `centroids`.
    assert of_papers - {"merge", "centroids"} <= FIELD.methods()


def test_a_paper_of_a_method_is_that_of_its_entry() -> None:
    """`exact` is a baseline of the paper that its docstring names, and not that paper's method."""
    for name in FIELD.methods() - {"exact"}:
        arxiv = read_docstring(registry.lookup(name)[1]).arxiv
        entries = {entry.arxiv for entry in FIELD.systems if name in field.part_names(entry.policy)}
        assert not arxiv or arxiv in entries, name


def test_the_presses_are_those_of_the_installed_kvpress() -> None:
    kvpress = pytest.importorskip("kvpress")
    exported = {name for name in kvpress.__all__ if name.endswith("Press")} - {"BasePress", "ScorerPress"}
    assert {entry.name for entry in FIELD.presses} == exported
    for entry in FIELD.presses:
        assert entry.status != "adapter" or hasattr(getattr(kvpress, entry.name), "score"), entry.name


def test_a_link_leads_to_a_page() -> None:
    for entry in ENTRIES:
        for target in [found.partition(")")[0].partition("#")[0] for found in entry.row()[-1].split("](")[1:]]:
            assert (ROOT / "docs" / target).is_file(), (entry.name, target)


def _content() -> dict[str, Any]:
    path = ROOT / "eval" / "kvpolicy_eval" / "catalog" / "field.yaml"
    return copy.deepcopy(yaml.safe_load(path.read_text(encoding="utf-8")))


def _system(content: dict[str, Any], name: str) -> dict[str, Any]:
    return next(entry for entry in content["systems"] if entry["name"] == name)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("H2O", {"status": "planned"}, "status of H2O in field.yaml must be one of here, variant"),
        ("H2O", {"kind": "policy"}, "kind of H2O in field.yaml must be one of"),
        ("H2O", {"arxiv": "2306.1404"}, "arxiv of H2O in field.yaml must be like"),
        ("H2O", {"year": 2023}, "arxiv of H2O in field.yaml must be .* without year"),
        ("H2O", {"policy": ""}, "policy or feature of H2O .* given if it is here"),
        ("H2O", {"feature": "x", "page": "index.md"}, "policy and feature of H2O .* one at a time"),
        ("H2O", {"nearest": "tova"}, "nearest of H2O .* left out"),
        ("H2O", {"policy": "h20"}, "must have a registered name, got 'h20'"),
        ("H2O", {"decode": "grow"}, "H2O in field.yaml has the unknown key 'decode'"),
        ("PIE", {"page": ""}, "page of PIE .* given beside feature"),
        ("EMS", {"note": ""}, "note of EMS .* given"),
        ("EMS", {"policy": "h2o"}, "policy or feature of EMS"),
        ("EMS", {"nearest": "heavy"}, "must have a registered name, got 'heavy'"),
    ],
)
def test_a_wrong_entry_is_one_sentence(name: str, change: dict[str, Any], message: str) -> None:
    content = _content()
    _system(content, name).update(change)
    with pytest.raises(ValueError, match=message):
        field.read(content)


def test_a_name_occurs_once_and_every_press_is_there() -> None:
    content = _content()
    content["systems"].append(_system(content, "H2O"))
    with pytest.raises(ValueError, match=r"H2O must occur once in field\.yaml"):
        field.read(content)
    content = _content()
    content["kvpress"]["exported"].append("AaPress")
    with pytest.raises(ValueError, match="must be those of its list `exported`; see AaPress"):
        field.read(content)
