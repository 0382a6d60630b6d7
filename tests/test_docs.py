"""Every block of the README and of the site runs, parses or resolves; every link leads somewhere."""

from __future__ import annotations

import doctest
import functools
import importlib
import io
import json
import re
import shlex
import tomllib
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch
import yaml

from tests.doc_blocks import DOCS, FLAGS, LANGUAGES, ROOT, Block, blocks, pages, prose, run_python

if not DOCS.is_dir():
    pytest.skip("the docs are not installed", allow_module_level=True)

import kvpolicy
from kvpolicy.cli.app import USAGE
from kvpolicy.kernels import compiled
from tests.doc_commands import NOWHERE, check, simple_commands

PAGES = pages()
BLOCKS = [block for page in PAGES for block in blocks(page)]
RUN = {"list", "explain", "plan", "tiny"}
"""Subcommands of `kvpolicy` that are quick enough to be run wherever a page shows them."""
WINDOWS = "kvpolicy_eval.data.windows"
"""The module that writes a file for the commands behind it."""


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def of(language: str) -> list[Block]:
    return [block for block in BLOCKS if block.language == language]


def consoles() -> list[Any]:
    """Blocks of commands with their output, of which a tuning takes minutes."""
    return [
        pytest.param(block, id=block.place, marks=[pytest.mark.slow] * ("kvpolicy tune" in block.text))
        for block in of("console")
    ]


def with_python() -> list[Any]:
    """Pages, of which one waits for lm-eval's imports and is slow."""
    found = sorted({block.page for block in BLOCKS if block.language in ("python", "pycon")})
    return [pytest.param(page, marks=[pytest.mark.slow] * (page.name == "lm-eval.md")) for page in found]


@pytest.fixture(autouse=True)
def plain_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in {"COLUMNS": "80", "TERM": "dumb", "NO_COLOR": "1"}.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setattr("sys.stdin", io.StringIO())


def test_every_block_is_of_a_known_language_and_closed() -> None:
    assert not [f"{block.place}: {block.language!r}" for block in BLOCKS if block.language not in LANGUAGES]
    found = Counter(block.page for block in BLOCKS)
    fences = {page: len(re.findall(r"^ *```", page.read_text(encoding="utf-8"), re.MULTILINE)) for page in PAGES}
    assert not [name(page) for page, count in fences.items() if count != 2 * found[page]], "a block is not closed"


@pytest.mark.parametrize("page", with_python(), ids=name)
def test_python_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with torch.compiler.set_stance("force_eager"):  # what compiles whole is tested in tests/engine/test_compile.py
        assert run_python(page)


@pytest.mark.parametrize("page", sorted({block.page for block in of("bash")}), ids=name)
def test_commands_are_taken_by_their_programs(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = [block for block in of("bash") if block.page == page]
    assert all([*simple_commands(block.text)] for block in mine)
    # `test_extend` runs those that try something, with the page's package installed
    shown = [block for block in mine if block.title != "try it"]
    for block, words in ((each, words) for each in shown for words in simple_commands(each.text)):
        check(words, block)
        if words[0] == "kvpolicy" and words[1] in RUN:
            run(words)


WRONG = [
    "kvpolicy plan tiny h2o --no-such-option",
    "kvpolicy-eval sweep",
    "lm_eval --model kvpolicy --model_args policy=h20 --tasks kvpolicy",
    "lm_eval --model kvpolicy --model_args policy=h2o --tasks kvpolicy_no_such",
    "torchrun --no-such-option script.py",
    "python -m kvpolicy_eval.tables accuracy --no-such-option",
    "python no_such_script.py",
    'pip install "kvpolicy[no-such-extra]"',
    "pytest tests/no_such_file.py",
    "no-such-program",
]


@pytest.mark.parametrize("line", WRONG)
def test_wrong_commands_would_be_found(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises((AssertionError, ValueError, USAGE)):
        for words in simple_commands(line):
            check(words, NOWHERE)


@pytest.mark.parametrize("block", consoles())
def test_commands_print_what_the_page_says(
    block: Block, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where commands write
    said = re.split(r"^\$ (.*(?:(?<=\\)\n.*)*)\n?", block.text, flags=re.MULTILINE)
    assert not said[0].strip() and len(said) > 1, f"{block.place}: a console begins with '$ command'"
    for line, wanted in zip(said[1::2], said[2::2], strict=True):
        for words in simple_commands(line):
            check(words, block)
            made = words[:3] == ["python", "-m", WINDOWS]
            if not made and (words[0] != "kvpolicy" or words[1] in ("bench", "calibrate")):
                continue
            capsys.readouterr()
            if made:
                importlib.import_module(WINDOWS).main(words[3:])
            else:
                run(words, wrong=bool(re.search(r"^kvpolicy: ", wanted, re.MULTILINE)))
            printed = capsys.readouterr()
            checker = doctest.OutputChecker()
            example = doctest.Example(line, wanted)
            seen = [printed.out, printed.err + printed.out]  # a terminal shows both
            right = any(checker.check_output(wanted, text, FLAGS) for text in seen)
            assert right, checker.output_difference(example, seen[1], FLAGS)


def run(words: list[str], *, wrong: bool = False) -> None:
    """Run `kvpolicy` here, with compiled functions; where a page shows its complaint, it must complain."""
    from kvpolicy.cli.app import main

    with compiled.switched(True):
        assert main(words[1:]) == (2 if wrong else 0), shlex.join(words)


@pytest.mark.parametrize("block", of("yaml"), ids=lambda block: block.place)
def test_yaml_is_a_sweep_or_yaml(block: Block, tmp_path: Path) -> None:
    found = yaml.safe_load(block.text)
    assert found
    if "policies" in found:
        from kvpolicy_eval.sweep.config import load

        path = tmp_path / "page.yaml"
        path.write_text(block.text, encoding="utf-8")
        assert load(str(path)).policies


@pytest.mark.parametrize("block", of("toml") + of("json"), ids=lambda block: block.place)
def test_toml_and_json_are_read(block: Block) -> None:
    read = json.loads if block.language == "json" else tomllib.loads
    assert read(block.text)


def check_citations(text: str) -> list[str]:
    """Check that BibTeX entries are whole; their keys."""
    entries = re.findall(r"^@\w+\{([\w:.-]+),\n(.*?)^\}$", text, re.MULTILINE | re.DOTALL)
    assert entries
    for _, fields in entries:
        keys = set(re.findall(r"^ +(\w+) *= *\{.+\},?$", fields, re.MULTILINE))
        assert {"title", "year"} <= keys  # authors are left out where nobody checked them
        assert fields.count("{") == fields.count("}")
    return [key for key, _ in entries]


def test_the_papers_of_methods_stand_in_one_file() -> None:
    for block in of("bibtex"):
        check_citations(block.text)
    keys = check_citations((DOCS / "assets" / "methods.bib").read_text(encoding="utf-8"))
    assert keys == sorted(set(keys))
    cited = [
        key
        for page in PAGES
        if page.parent.name == "methods"
        for key in re.findall(r"`([^`]+)`", page.read_text(encoding="utf-8").partition("\n## Citation\n")[2])
    ]
    assert {key for key in cited if re.fullmatch(r"[a-z]+\d{4}\w*", key)} == set(keys)


def links(page: Path) -> list[str]:
    text = re.sub(r"`[^`\n]*`", "", prose(page))
    inline = re.findall(r"\]\(<?([^)>\s]+)>?(?: \"[^\"]*\")?\)", text)
    return (
        inline + re.findall(r"^\[[^\]]+\]: (\S+)$", text, re.MULTILINE) + re.findall(r"(?:href|src)=\"([^\"]+)\"", text)
    )


def anchors(page: Path) -> set[str]:
    """As GitHub and Python-Markdown both make them, and those that a page sets itself."""
    found = re.findall(r"^#+ (.*?)(?: \{ *#([\w-]+).*\})?$", prose(page), re.MULTILINE)
    slugs = [own or re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower()) for title, own in found]
    slugs += re.findall(r"^::: (\S+)$", prose(page), re.MULTILINE)
    return {*slugs, *re.findall(r"(?:id|name)=\"([\w-]+)\"", prose(page))}


def test_links_lead_somewhere() -> None:
    known = functools.cache(anchors)
    for page, link in ((each, link) for each in PAGES for link in links(each)):
        parts = urlsplit(link)
        if parts.scheme:
            assert parts.scheme in ("https", "mailto") and "." in parts.netloc, f"{name(page)}: {link} is no address"
            continue
        target = (page.parent / parts.path).resolve() if parts.path else page
        if target.suffix == ".md" and target.with_suffix(".ipynb").exists():
            target = target.with_suffix(".ipynb")
        assert target.exists(), f"{name(page)} links to {link}, which is not there"
        if parts.fragment and target.suffix == ".md":
            assert parts.fragment in known(target), f"{name(page)} links to {link}, and there is no such heading"


@pytest.mark.network
@pytest.mark.parametrize("link", sorted({link for page in PAGES for link in links(page) if link.startswith("https:")}))
def test_addresses_answer(link: str) -> None:
    request = urllib.request.Request(link, headers={"User-Agent": "Mozilla/5.0"})
    with urllib.request.urlopen(request, timeout=20) as answer:
        assert answer.status == 200


def test_no_page_promises_another() -> None:
    unfinished = re.compile(r"(?i)coming soon|\bTODO\b|\bFIXME\b|\bTBD\b|under construction|lorem ipsum")
    for page in PAGES:
        text = prose(page)
        assert not unfinished.findall(text), name(page)
        assert len(re.findall(r"^# ", text, re.MULTILINE)) == 1, f"{name(page)}: one heading of the first rank"


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]
    listed = re.findall(r"^ +- (?:[^:\n]+: )?(\S+\.md)$", navigation, re.MULTILINE)
    assert len(listed) == len(set(listed))
    notebooks = [page.with_suffix(".md") for page in DOCS.rglob("*.ipynb")]  # which the site makes pages of
    assert set(listed) == {str(page.relative_to(DOCS)) for page in [*PAGES, *notebooks] if DOCS in page.parents}


def test_old_addresses_lead_to_pages() -> None:
    plugins = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("redirect_maps:\n")[2]
    pairs = re.findall(r"^ {8}(\S+\.md): (\S+)$", plugins, re.MULTILINE)
    assert len(pairs) > 20
    for old, new in pairs:
        page, _, heading = new.partition("#")
        assert not (DOCS / old).exists(), f"{old} is a page, so that nothing may be redirected from it"
        assert (DOCS / page).is_file() and (not heading or heading in anchors(DOCS / page)), f"{old} leads to {new}"


def decisions() -> list[str]:
    """The policies of the decision table."""
    text = (DOCS / "guide" / "policies.md").read_text(encoding="utf-8")
    rows = text.partition("<!-- decisions -->")[2].partition("<!-- /decisions -->")[0].splitlines()
    cells = [row.split("|")[2].strip() for row in rows if row.startswith("| ")]
    return [word for cell in cells[1:] for word in re.findall(r"`([^`]+)`", cell)]


def test_the_decision_table_has_the_situations() -> None:
    assert len(decisions()) >= 8


@pytest.mark.parametrize("words", decisions())
def test_every_policy_of_the_decision_table_runs(words: str) -> None:
    assert str(kvpolicy.Policy.parse(words)) == words, "a table writes a policy in its shortest words"
    model, tokenizer = kvpolicy.tiny()
    inputs = tokenizer("tiger=4821\nfalcon=1937\n" * 24 + "?tiger=", return_tensors="pt")
    with kvpolicy.attach(model, words) as handle:
        output = model.generate(**inputs, max_new_tokens=8, min_new_tokens=8, do_sample=False)
        assert output.shape[1] == inputs["input_ids"].shape[1] + 8
        assert handle.cache is not None and handle.plan is not None
        assert handle.cache.nbytes == handle.plan.nbytes
