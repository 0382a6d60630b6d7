"""A user's program has no unknown types, and a user's mistakes are found before anything runs.

A project of its own in an empty folder, read by pyright in strict mode: what it knows of kvpolicy comes from the
package's `py.typed` and annotations alone.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
HERE = Path(__file__).parent
PACKAGES = ("kvpolicy", "kvpolicy_lm_eval", "kvpolicy_deepspeed", "kvpolicy_eval")
LIMIT = 300
WRONG = """
import kvpolicy
from kvpolicy import KIVI, Policy, SnapKV, SqueezeAttention

Policy(selector=SqueezeAttention())  # reportArgumentType
Policy(codec=SnapKV())  # reportArgumentType
Policy(KIVI())  # reportCallIssue
KIVI(bit=4)  # reportCallIssue
SnapKV(pool="mean")  # reportArgumentType
print(Policy.parse("snapkv").budgt)  # reportAttributeAccessIssue
kvpolicy.SnapVK()  # reportAttributeAccessIssue
Policy().budget = 0.5  # reportAttributeAccessIssue
"""
"""Mistakes; each line that holds one says which rule finds it."""


def where(package: str) -> Path:
    spec = find_spec(package)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What pyright has to say of the project."""
    folder = tmp_path_factory.mktemp("project")
    shutil.copy(HERE / "program.py", folder)
    (folder / "wrong.py").write_text(WRONG, encoding="utf-8")
    paths = sorted({str(where(package).parent) for package in PACKAGES})
    settings = {"typeCheckingMode": "strict", "pythonVersion": "3.11", "extraPaths": paths}
    (folder / "pyrightconfig.json").write_text(json.dumps(settings), encoding="utf-8")
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, "-p", str(folder)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=LIMIT)
    assert done.stdout.startswith("{"), f"pyright does not run here: {done.stderr.strip()[-200:]}"
    content = json.loads(done.stdout)
    assert content["summary"]["filesAnalyzed"] == 2, content
    return content["generalDiagnostics"]


def of(found: list[dict[str, Any]], name: str) -> list[tuple[int, str, str]]:
    """Line, rule and words of what was found in a file."""
    mine = [item for item in found if Path(item["file"]).name == name]
    return [(item["range"]["start"]["line"], item.get("rule", ""), item["message"]) for item in mine]


@pytest.mark.needs("pyright")  # the command `pyright` checks program.py too, as part of the repository
def test_a_program_has_no_unknown_types(found: list[dict[str, Any]]) -> None:
    assert of(found, "program.py") == []


@pytest.mark.needs("pyright")
def test_mistakes_are_found(found: list[dict[str, Any]]) -> None:
    lines = WRONG.splitlines()
    wanted = {(at, match[1]) for at, line in enumerate(lines) if (match := re.search(r"# (report\w+)$", line))}
    assert len(wanted) > 5
    assert not wanted - {(line, rule) for line, rule, _ in of(found, "wrong.py")}


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_say_that_they_are_typed(package: str) -> None:
    assert (where(package) / "py.typed").exists()


def test_the_program_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """Its types say what is true."""
    import kvpolicy
    from tests.client import program

    assert len(program.policies()) == 16
    model, tokenizer = kvpolicy.tiny()
    ids = tokenizer("tiger=4821\n" * 12, return_tensors="pt").input_ids
    assert len(program.by_hand(model, ids)) in (1, 8)
    assert program.before(model.config) > 0
    assert "PolicyLayer" not in capsys.readouterr().out
    assert issubclass(program.warned(), UserWarning)
