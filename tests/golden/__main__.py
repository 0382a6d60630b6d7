"""The command; `tests/golden/__init__.py` describes it."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import kvpolicy
from tests.golden import record
from tests.golden.cases import all_cases, prepare, run_cases
from tests.golden.digests import FAILED, REFUSED
from tests.golden.expected import EXPECTED

HERE = Path(__file__).resolve().parent


def main(words: list[str] | None = None) -> int:
    """Run the command; the exit status."""
    given = _parser().parse_args(words)
    if given.action == "against":
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "record.json"
            _record_revision(given.revision, file, given.quick, given.only)
            return _compare(file, given.quick, given.only, given.allow, given.strict)
    if given.action == "compare":
        return _compare(given.file, given.quick, given.only, given.allow, given.strict)
    return _record(given.file, given.quick, given.only)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.golden", description="Compare trees bit for bit.")
    actions = parser.add_subparsers(dest="action", required=True)
    to_record = actions.add_parser("record", help="write what this tree computes")
    compare = actions.add_parser("compare", help="compare this tree with a record")
    against = actions.add_parser("against", help="compare this tree with a git revision")
    for action in (to_record, compare):
        action.add_argument("file", type=Path)
    against.add_argument("revision")
    for action in (to_record, compare, against):
        action.add_argument("--quick", action="store_true", help="one family, under a minute")
        action.add_argument("--only", action="append", default=[], help="only cases whose name contains this")
    for action in (compare, against):
        action.add_argument("--strict", action="store_true", help="nothing is expected to differ")
        action.add_argument("--allow", action="append", default=[], help='a pattern of "CASE FIELD" that may differ')
    return parser


def _record(file: Path, quick: bool, only: list[str]) -> int:
    found = _run(quick, only)
    record.write(file, found)
    refused = sum(any(name.endswith(REFUSED) for name in fields) for fields in found.values())
    print(f"{len(found)} cases recorded, of which {refused} refused")
    return 1 if _print_failed(found) else 0


def _compare(file: Path, quick: bool, only: list[str], allow: list[str], strict: bool = False) -> int:
    meta, recorded = record.read(file)
    for name, value in record.machine().items():
        if meta.get(name) != value:
            print(f"warning: recorded with {name} {meta.get(name)}, compared with {value}", file=sys.stderr)
    found = _run(quick, only)
    wrong = record.differences(recorded, found)
    for expected in () if strict else EXPECTED:
        agreed, wrong = _partition(wrong, expected.patterns)
        cases = len({one.case for one in agreed})
        print(
            f"expected: {len(agreed)} differences of {cases} cases in {', '.join(expected.patterns)}: {expected.reason}"
        )
    allowed, others = _partition(wrong, allow)
    for title, some in (("allowed", allowed), ("differs", others)):
        for line in record.describe(some):
            print(f"{title}: {line}")
    new = [name for name in found if name not in recorded]
    gone = [name for name in recorded if name not in found] if not quick and not only else []
    for title, names in (("not in the record", new), ("in the record, and no longer run", gone)):
        for name in names:
            print(f"{title}: {name}")
    if others:
        print(f"cases in which each quantity differs: {record.summarize(others)}")
    print(
        f"{len(found) - len(new)} cases compared: {len(others)} fields of {len({one.case for one in others})} cases "
        f"differ, {len(allowed)} differences allowed"
    )
    nothing = len(found) == len(new)
    return 1 if _print_failed(found) or others or gone or nothing else 0


def _partition(
    differences: list[record.Difference], patterns: Sequence[str]
) -> tuple[list[record.Difference], list[record.Difference]]:
    """The differences that the patterns allow, and the others."""
    found: dict[bool, list[record.Difference]] = {True: [], False: []}
    for one in differences:
        found[record.is_allowed(one, patterns)].append(one)
    return found[True], found[False]


def _print_failed(found: dict[str, dict[str, object]]) -> int:
    """Print the cases that ended with an error which is no refusal, and say how many there are."""
    failed = [name for name, fields in found.items() if FAILED in fields]
    for name in failed:
        print(f"failed: {name}")
    return len(failed)


def _run(quick: bool, only: list[str]) -> dict[str, dict[str, object]]:
    cases = [case for name, case in all_cases(quick).items() if not only or any(text in name for text in only)]
    print(f"{len(cases)} cases with {kvpolicy.__file__}", file=sys.stderr)
    start = time.perf_counter()
    found = run_cases(cases)
    print(f"{time.perf_counter() - start:.0f} s in all", file=sys.stderr)
    return found


def _record_revision(revision: str, file: Path, quick: bool, only: list[str]) -> None:
    """Record what another revision of the repository does, with this script."""
    root = HERE.parent.parent
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        script = Path(folder) / "script"
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", str(tree), revision], cwd=root, check=True)
        try:
            # Copies, alone on the path: beside them lies the package that must not be imported.
            for name in ("golden", "reference"):
                shutil.copytree(HERE.parent / name, script / "tests" / name)
            path = [script, tree, tree / "integrations", tree / "eval"]
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path)), "PYTHONSAFEPATH": "1"}
            options = [*(["--quick"] if quick else []), *(f"--only={text}" for text in only)]
            command = [sys.executable, "-m", "tests.golden", "record", str(file), *options]
            subprocess.run(command, cwd=folder, env=environment, check=False)
            if not file.exists():
                raise SystemExit(f"{revision} could not be recorded")
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(tree)], cwd=root, check=True)


if __name__ == "__main__":
    prepare()  # not in main(): the log level is that of the process, and tests call main()
    sys.exit(main())
