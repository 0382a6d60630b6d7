"""The tree keeps to its rules: sizes, directions of imports, pages, docstrings."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpolicy import registry

ROOT = Path(__file__).parent.parent
PACKAGES = {
    "kvpolicy": ROOT / "kvpolicy",
    "kvpolicy_lm_eval": ROOT / "integrations" / "kvpolicy_lm_eval",
    "kvpolicy_deepspeed": ROOT / "integrations" / "kvpolicy_deepspeed",
    "kvpolicy_eval": ROOT / "eval" / "kvpolicy_eval",
}
STRATEGIES = ("allocators", "selectors", "codecs")
ENGINE = {"attachment", "attention", "backend", "cache", "choose", "decode", "families", "falcon", "layer", "planning"}

if not PACKAGES["kvpolicy"].is_dir():
    pytest.skip("the tests stand alone, without the source tree", allow_module_level=True)


def _sources(*folders: Path) -> list[Path]:
    return sorted(path for folder in folders for path in folder.rglob("*.py"))


CODE = _sources(*PACKAGES.values())
EVERYTHING = [*CODE, *_sources(ROOT / "tests")]


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _imports(path: Path) -> Iterator[str]:
    """Every module that a file imports, wherever it does."""
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _importing(paths: list[Path], *modules: str) -> list[str]:
    """Which files import one of the modules, or what is in it."""
    starts = tuple(f"{module}." for module in modules)
    return [f"{_name(path)}: {name}" for path in paths for name in _imports(path) if f"{name}.".startswith(starts)]


def _public(body: list[ast.stmt]) -> Iterator[ast.FunctionDef | ast.ClassDef]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            yield node
            if isinstance(node, ast.ClassDef):
                yield from _public(node.body)


def test_files_stay_small() -> None:
    assert not [_name(path) for path in EVERYTHING if path.read_text(encoding="utf-8").count("\n") > 300]


def test_no_second_copy_is_imported() -> None:
    assert not _importing(EVERYTHING, "integrations", "eval")


def test_the_core_imports_no_integration() -> None:
    assert not _importing(
        _sources(PACKAGES["kvpolicy"]), "kvpolicy_lm_eval", "kvpolicy_deepspeed", "kvpolicy_eval", "lm_eval"
    )


def test_strategies_import_neither_transformers_nor_the_engine() -> None:
    strategies = _sources(*(PACKAGES["kvpolicy"] / kind for kind in STRATEGIES))
    assert not _importing(strategies, "transformers", *(f"kvpolicy.{module}" for module in ENGINE))


def test_nothing_is_unpickled() -> None:
    assert not _importing(EVERYTHING, "pickle", "cloudpickle", "dill", "joblib", "shelve")
    calls = [(path, node) for path in EVERYTHING for node in ast.walk(_tree(path)) if isinstance(node, ast.Call)]
    loads = [(path, node) for path, node in calls if ast.unparse(node.func) == "torch.load"]
    safe = ("weights_only", "True")
    assert not [
        _name(path) for path, node in loads if safe not in [(w.arg, ast.unparse(w.value)) for w in node.keywords]
    ]


def test_public_names_have_docstrings() -> None:
    trees = {_name(path): _tree(path) for path in CODE}
    silent = [name for name, tree in trees.items() if not ast.get_docstring(tree)]
    for name, tree in trees.items():
        silent += [f"{name}: {node.name}" for node in _public(tree.body) if not ast.get_docstring(node)]
    assert not silent


def test_every_folder_of_code_is_a_package() -> None:
    folders = {path.parent for path in CODE} - {PACKAGES["kvpolicy_lm_eval"] / "tasks"}  # lm-eval loads those files
    assert not [_name(folder) for folder in sorted(folders) if not (folder / "__init__.py").exists()]


def test_no_public_name_is_a_module() -> None:
    """Importing `kvpolicy.x` would otherwise put the module in the place of what `x` names."""
    tree = _tree(PACKAGES["kvpolicy"] / "__init__.py")
    public = {alias.asname for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
    modules = {path.stem for path in PACKAGES["kvpolicy"].iterdir() if path.suffix in (".py", "")}
    assert len(public) > 10
    assert not public & modules


@pytest.mark.parametrize("name", [*registry.ALLOCATORS, *registry.SELECTORS, *registry.CODECS])
def test_every_method_has_a_page(name: str) -> None:
    page = ROOT / "docs" / "methods" / f"{name}.md"
    assert page.exists(), f"write {_name(page)}: idea, formula, differences from the paper, cost, when it fails"
    assert f"methods/{name}.md" in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert f"({name}.md)" in (ROOT / "docs" / "methods" / "index.md").read_text(encoding="utf-8")


def test_the_engine_is_known_by_its_files() -> None:
    missing = [name for name in sorted(ENGINE) if not (PACKAGES["kvpolicy"] / f"{name}.py").exists()]
    assert not missing, "update ENGINE: strategies could import what replaced it unseen"
