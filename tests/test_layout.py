"""The rules of the source tree: sizes, directions of imports, pages, docstrings."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Collection, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from kvpolicy import registry

ROOT = Path(__file__).parent.parent
PACKAGES = {
    "kvpolicy": ROOT / "kvpolicy",
    "kvpolicy_lm_eval": ROOT / "integrations" / "kvpolicy_lm_eval",
    "kvpolicy_deepspeed": ROOT / "integrations" / "kvpolicy_deepspeed",
    "kvpolicy_vllm": ROOT / "integrations" / "kvpolicy_vllm",
    "kvpolicy_eval": ROOT / "eval" / "kvpolicy_eval",
}
STRATEGIES = tuple(f"{kind}s" for kind in registry.kinds())
FACADES = {"", "__main__", "adapters", "budget", "embedded", "plans", "plots", "report", "spans"}
"""The package itself and the flat modules that re-export documented names; the empty name is `kvpolicy`."""
LEVELS: list[set[str]] = [
    {"protocols", "statistics", "kernels", "text", "registry"},
    {*STRATEGIES, "policy", "helpers"},
    {"engine"},
    {"planning", "reporting", "parallel"},
    {"hf"},
    {"calibration", "distortion"},
    {"tuning"},
    {"cli", "serving", "testing"} | FACADES,
]
"""The rooms and flat modules of `kvpolicy`, from the lowest level; a module imports its own level and lower ones."""
LEVEL = {name: level for level, names in enumerate(LEVELS) for name in names}

if not PACKAGES["kvpolicy"].is_dir():
    pytest.skip("the tests stand alone, without the source tree", allow_module_level=True)


def _sources(*folders: Path) -> list[Path]:
    return sorted(path for folder in folders for path in folder.rglob("*.py"))


CODE = _sources(*PACKAGES.values())
EVERYTHING = [*CODE, *_sources(ROOT / "tests")]


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@functools.cache
def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@functools.cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(_text(path))


def _importing(paths: list[Path], *modules: str) -> list[str]:
    """Which files import one of the modules, or what is in it, by their lines: to parse all files takes seconds."""
    line = re.compile(rf"^\s*(?:import|from) (?:.*, )?(?:{'|'.join(modules)})\b.*", re.MULTILINE)
    return [f"{_name(path)}: {found[0].strip()}" for path in paths for found in line.finditer(_text(path))]


def _public(body: list[ast.stmt]) -> Iterator[ast.FunctionDef | ast.ClassDef]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            if any(isinstance(mark, ast.Name) and mark.id == "overload" for mark in node.decorator_list):
                continue  # the function that follows is documented
            yield node
            if isinstance(node, ast.ClassDef):
                yield from _public(node.body)


def _module(path: Path) -> str:
    """The name of a module of `kvpolicy`."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imported(tree: ast.Module, modules: Collection[str]) -> set[str]:
    """Which of the modules a file imports: lazy and type-only imports count."""
    targets: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            targets.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"line {node.lineno}: relative imports are not used"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            targets.update(name if name in modules else str(node.module) for name in names)
    return targets & {*modules}


@functools.cache
def _import_graph() -> dict[str, set[str]]:
    """What each module of `kvpolicy` imports from `kvpolicy`."""
    paths = {_module(path): path for path in _sources(PACKAGES["kvpolicy"])}
    return {module: _imported(_tree(path), paths) - {module} for module, path in paths.items()}


def _room(module: str) -> str:
    """The first name below `kvpolicy`: a room or a flat module."""
    return module.partition(".")[2].partition(".")[0]


def test_every_module_has_a_level() -> None:
    rooms = {_room(module) for module in _import_graph()}
    assert rooms == LEVEL.keys(), "update LEVELS, which says what may import what"


def test_no_room_imports_a_higher_one() -> None:
    upward = [
        f"{module} imports {target}"
        for module, targets in _import_graph().items()
        for target in sorted(targets)
        if LEVEL[_room(target)] > LEVEL[_room(module)]
    ]
    assert not upward, "\n".join(upward)


def test_interfaces_import_no_kernel() -> None:
    """The words in which parts and the engine speak do not depend on how numbers are computed."""
    graph = _import_graph()
    interfaces = [module for module in graph if _room(module) == "protocols"]
    assert interfaces and not [module for module in interfaces if "kernels" in map(_room, graph[module])]


def test_modules_import_each_other_in_no_circle() -> None:
    try:
        TopologicalSorter(_import_graph()).prepare()
    except CycleError as error:
        pytest.fail("a circle of imports: " + " <- ".join(error.args[1]))


def test_a_wrong_import_would_be_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph sees imports inside functions and under TYPE_CHECKING, and so does what reads lines."""
    source = "if TYPE_CHECKING:\n    from kvpolicy.hf import attach\ndef f():\n    import kvpolicy.cli.app, torch\n"
    modules = {"kvpolicy.hf", "kvpolicy.hf.attach", "kvpolicy.cli.app", "kvpolicy.text"}
    assert _imported(ast.parse(source), modules) == {"kvpolicy.hf.attach", "kvpolicy.cli.app"}
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    (tmp_path / "a.py").write_text(source)
    found = [_importing([tmp_path / "a.py"], name) for name in ("kvpolicy.hf", "torch", "kvpolicy.h", "attach")]
    assert found == [["a.py: from kvpolicy.hf import attach"], ["a.py: import kvpolicy.cli.app, torch"], [], []]


def test_few_modules_are_flat() -> None:
    assert len([path for path in PACKAGES["kvpolicy"].glob("*.py") if path.stem != "__init__"]) <= 12


def test_every_room_has_a_readme() -> None:
    rooms = [path.parent for path in PACKAGES["kvpolicy"].glob("*/__init__.py")]
    texts = {room.name: _text(room / "README.md") for room in rooms}
    assert len(texts) > 10
    short = [name for name, text in texts.items() if "import" not in text or not 5 <= text.count("\n") <= 20]
    assert not short, "a README says in about ten lines what is here, what it may import, and where to begin"


def test_a_readme_begins_with_a_verb_and_names_every_module() -> None:
    """But methods, which the registry names, and the commands of the command line, each in a file of its name."""
    methods = {path.rpartition(":")[0] for table in registry.BUILT_IN.values() for path in table.values()}
    for page in sorted(PACKAGES["kvpolicy"].glob("*/README.md")):
        first = _text(page).split("\n\n")[1].split()[0]
        verb = first.isalpha() and first[0].isupper() and first not in {"A", "An", "The", "How", "What", "Which"}
        assert verb, f"{_name(page)} begins with {first}"
        modules = [path for path in _sources(page.parent) if path.stem[:2] != "__" and path.parent.name != "commands"]
        named = set(re.findall(r"(\w+\.py)\b", _text(page)))
        unnamed = [_name(path) for path in modules if _module(path) not in methods and path.name not in named]
        assert not unnamed, f"name them in {_name(page)}"


def test_no_file_is_formatted_by_hand() -> None:
    mark = "fmt: " + "skip"
    assert not [_name(path) for path in _sources(PACKAGES["kvpolicy"]) if mark in _text(path)]


def test_no_second_copy_is_imported() -> None:
    assert not _importing(EVERYTHING, "integrations", "eval")


def test_the_core_imports_no_integration() -> None:
    assert not _importing(
        _sources(PACKAGES["kvpolicy"]),
        *("kvpolicy_lm_eval", "kvpolicy_deepspeed", "kvpolicy_vllm", "kvpolicy_eval", "lm_eval", "vllm"),
    )


def test_integrations_do_not_import_the_evaluation() -> None:
    """Nor do the files of tasks, which lm-eval loads."""
    integrations = [path for path in CODE if "integrations" in path.parts]
    assert PACKAGES["kvpolicy_lm_eval"] / "tasks" / "utils.py" in integrations
    assert not _importing(integrations, "kvpolicy_eval")


def test_strategies_and_the_engine_do_not_import_transformers() -> None:
    strategies = _sources(*(PACKAGES["kvpolicy"] / kind for kind in STRATEGIES))
    engine = _sources(PACKAGES["kvpolicy"] / "engine")
    assert engine and not _importing([*strategies, *engine], "transformers")


def test_nothing_is_unpickled() -> None:
    assert not _importing(EVERYTHING, "pickle", "cloudpickle", "dill", "joblib", "shelve")
    mentioning = [path for path in EVERYTHING if re.search(r"torch\s*\.\s*load\b", _text(path))]
    calls = [(path, node) for path in mentioning for node in ast.walk(_tree(path)) if isinstance(node, ast.Call)]
    loads = [(path, node) for path, node in calls if ast.unparse(node.func) == "torch.load"]
    safe = ("weights_only", "True")
    assert not [
        _name(path) for path, node in loads if safe not in [(w.arg, ast.unparse(w.value)) for w in node.keywords]
    ]


METHODS = _sources(*(PACKAGES["kvpolicy"] / kind for kind in STRATEGIES))
CALIBRATORS = PACKAGES["kvpolicy"] / "calibration" / "calibrators.py"
CALIBRATOR = CALIBRATORS.with_name("calibrator.py")
SLOT_ACCESS = PACKAGES["kvpolicy"] / "engine" / "layer_slots.py"


def _described(paths: list[Path]) -> set[str]:
    """The members that a protocol, or a class which others inherit from, says in words: an override need not."""
    trees = [_tree(path) for path in paths]
    classes = [node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)]
    bases = {base.id for node in classes for base in node.bases if isinstance(base, ast.Name)}
    protocols = {node.name for node in classes if "Protocol" in map(ast.unparse, node.bases)}
    members = [member for node in classes if node.name in bases | protocols for member in node.body]
    return {node.name for node in _public(members) if ast.get_docstring(node)}


def test_public_names_have_docstrings() -> None:
    trees = {path: _tree(path) for path in CODE}
    silent = [_name(path) for path, tree in trees.items() if not ast.get_docstring(tree)]
    of_methods = _described([*METHODS, *_sources(PACKAGES["kvpolicy"] / "protocols")])
    described = dict.fromkeys([*METHODS, SLOT_ACCESS], of_methods) | {CALIBRATORS: _described([CALIBRATOR])}
    for path, tree in trees.items():
        top = {id(node) for node in tree.body}
        for node in _public(tree.body):
            inherits = id(node) not in top and node.name in described.get(path, ())
            silent += [] if inherits or ast.get_docstring(node) else [f"{_name(path)}: {node.name}"]
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


def test_every_method_has_a_page() -> None:
    """Parts that change nothing share one page, with a section for each."""
    folder = ROOT / "docs" / "methods"
    defaults, index, site = (_text(path) for path in (folder / "defaults.md", folder / "index.md", ROOT / "mkdocs.yml"))
    for name in [name for table in registry.BUILT_IN.values() for name in table]:
        shared = f"\n## {name}\n" in defaults
        page = "defaults.md" if shared else f"{name}.md"
        assert (folder / page).exists(), f"write {page}: idea, formula, differences from the paper, cost and limits"
        command = f"run python -m kvpolicy_eval.catalog, which lists {page}"
        assert f"methods/{page}" in site, command
        assert (f"({page}#{name})" if shared else f"({page})") in index, command


CREATES = {
    "zeros",
    "ones",
    "empty",
    "full",
    "rand",
    "randn",
    "randint",
    "randperm",
    "arange",
    "linspace",
    "eye",
    "tensor",
}
FLOATS = {"zeros", "ones", "empty", "rand", "randn", "linspace", "eye"}
"""Functions of PyTorch that create tensors, and those whose tensors have the default dtype if none is given."""


def test_created_tensors_depend_on_no_default_of_pytorch() -> None:
    """A program may set the default dtype and the default device, as some model cards advise."""
    wrong: list[str] = []
    testing = PACKAGES["kvpolicy"] / "testing"  # for the tests of other packages
    for path in CODE:
        if path.is_relative_to(PACKAGES["kvpolicy_eval"]) or path.is_relative_to(testing):
            continue
        for call in ast.walk(_tree(path)):
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
                continue
            name = call.func.attr
            module = call.func.value
            if name not in CREATES or not isinstance(module, ast.Name) or module.id != "torch":
                continue
            needed = {"device", "dtype"} if name in FLOATS else {"device"}
            if lacking := needed - {keyword.arg for keyword in call.keywords}:
                wrong.append(f"{path.relative_to(ROOT)}:{call.lineno} torch.{name} must be given {sorted(lacking)}")
    assert not wrong
