"""The map of the field: complete, and true of the registry and of kvpress."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvpolicy import registry
from kvpolicy.cli.strategy_docs import read as read_docstring
from kvpolicy_eval.catalog import field
from kvpolicy_eval.catalog.lists import front_matter

ROOT = Path(__file__).parents[3]
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


def test_rows_say_what_the_entries_say() -> None:
    rows = {entry.name: entry.row() for entry in ENTRIES}
    assert rows["H2O"] == [
        "[H2O](https://arxiv.org/abs/2306.14048)",
        "2023",
        "selector",
        "here",
        "[`h2o`](methods/h2o.md)",
    ]
    assert rows["CapPress"][3:] == ["adapter", "[`KVPressScorer(CapPress())`](extend/kvpress.md)"]
    assert rows["vAttention"][3] == "not here: driver"
    assert rows["EMS"][4].endswith(". Nearest: [`h2o+merge`](methods/merge.md)")
    assert rows["KVgradPress"][:2] == ["[KVgradPress](https://openreview.net/forum?id=cg1wTCJjjk)", ""]
    assert rows["CAMPress"][1] == "2024" and rows["RandomPress"][0] == "RandomPress"
    text = field.table_of([entry for entry in ENTRIES if entry.name in ("H2O", "EMS", "CapPress")])
    assert text.endswith("\n\n3 entries: 1 here, 1 adapter, 1 not here.")


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
