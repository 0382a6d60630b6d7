"""The start-up hook is fast, can be disabled by an environment variable, and never raises an exception."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import pytest

import kvpolicy_lm_eval
from kvpolicy_lm_eval import startup

ROOT = Path(kvpolicy_lm_eval.__file__).parent
(PTH,) = [*ROOT.glob("kvpolicy_lm_eval.pth"), *ROOT.parent.glob("kvpolicy_lm_eval.pth")]  # source tree, or installed


def python(code: str, path: bool = True, **env: str) -> list[str]:
    """Run `code` in a new Python process after the start-up file; return the printed words."""
    paths = [str(ROOT.parent), *sys.path] if path else []
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", startup.OFF)} | env
    done = subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path[:0] = {paths}\n{PTH.read_text()}\n{code}"],
        capture_output=True,
        text=True,
        env=environment,
        check=True,
    )
    assert done.stderr == "" or path, done.stderr
    return done.stdout.split()


REGISTERED = (
    "import lm_eval.models, lm_eval.api.registry as r; print(*[n in r.model_registry for n in ('hf', 'kvpolicy')])"
)


def test_registers_the_model_beside_lm_evals_own_unless_the_environment_turns_it_off():
    assert python(REGISTERED) == ["True", "True"]
    assert python(REGISTERED, KVPOLICY_NO_STARTUP="1") == ["True", "False"]


def test_start_up_imports_almost_nothing():
    heavy = {"torch", "lm_eval", "transformers", "typing", "kvpolicy"}
    assert heavy.isdisjoint(python("print(*sys.modules)"))


def test_start_up_file_is_silent_where_the_package_is_gone():
    assert python("print('alive', 'kvpolicy_lm_eval' in sys.modules)", path=False) == ["alive", "False"]


def test_nothing_is_imported_where_lm_eval_is_not_installed(tmp_path: Path):
    """Python 3.15 reads the other file, which imports the module to call it: then nothing is done."""
    (tmp_path / ROOT.name).symlink_to(ROOT)  # an installed package stands beside lm-eval
    code = f"""
sys.path[:] = [path for path in sys.path if 'site-packages' not in path] + [{str(tmp_path)!r}]
before = set(sys.modules)
exec({PTH.read_text()!r})
print(*set(sys.modules) - before, 'end')
from kvpolicy_lm_eval import startup
startup.install()
print(startup._Finder in sys.meta_path)
"""
    assert python(code, path=False) == ["end", "False"]


def test_lm_eval_still_needs_the_start_up_file():
    """Fails with the first lm-eval that finds the model by the entry point alone."""
    code = """
import lm_eval.models
from lm_eval.api.registry import get_model
try:
    print(get_model('kvpolicy') is not None)
except Exception:
    print(False)
"""
    assert python(code, KVPOLICY_NO_STARTUP="1")[-1] == "False", (
        f"lm-eval {version('lm_eval')} reads entry points: remove kvpolicy_lm_eval.pth and .start from the package, "
        "raise the floor of lm_eval in pyproject.toml to this version, and say in docs/lm-eval.md and "
        "docs/guide/install.md that tasks need --include_path or a declaration that lm-eval reads"
    )


def test_start_file_names_the_same_function():
    module, name = (PTH.with_suffix(".start")).read_text().strip().split(":")
    assert getattr(sys.modules[module], name) is startup.install


def test_install_twice_adds_one_finder(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.delenv(startup.OFF, raising=False)
    startup.install()
    startup.install()
    assert sys.meta_path.count(startup._Finder) == 1


def test_install_never_raises(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.delenv(startup.OFF, raising=False)
    monkeypatch.setattr(startup, "_hook", lambda: 1 / 0)
    startup.install()
    assert "kvpolicy could not hook into lm-eval (ZeroDivisionError" in capsys.readouterr().err


class Manager:
    """A replacement for lm-eval's TaskManager."""

    def __init__(self, verbosity=None, include_path=None, include_defaults=True, metadata=None):
        self.seen = (include_path, include_defaults, metadata)


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> type[Manager]:
    monkeypatch.setattr(startup, "_WRAPPED", [])
    cls = type("TaskManager", (Manager,), {"__init__": Manager.__init__})
    module = ModuleType("tasks")
    module.__dict__["TaskManager"] = cls
    startup.register_tasks(module)
    startup.register_tasks(module)  # a second call must not wrap it twice
    return cls


def test_task_folder_comes_before_the_users(manager: type[Manager]):
    assert manager().seen == ([startup.tasks_path()], True, None)
    assert manager(include_path="mine").seen == ([startup.tasks_path(), "mine"], True, None)
    assert manager(None, ("a", "b"), metadata={"x": 1}).seen == ([startup.tasks_path(), "a", "b"], True, {"x": 1})


def test_no_defaults_means_none_of_ours(manager: type[Manager]):
    assert manager(include_path="mine", include_defaults=False).seen == ("mine", False, None)


def test_a_failing_hook_does_not_break_lm_eval(capsys: pytest.CaptureFixture[str]):
    startup._call(startup.register_tasks, ModuleType("no_task_manager"))
    assert "use kvpolicy-lm-eval instead" in capsys.readouterr().err


def test_wrapper_names_the_missing_package(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setitem(sys.modules, "lm_eval.__main__", None)
    with pytest.raises(SystemExit, match="pip install"):
        startup.main()


@pytest.mark.slow
def test_command_line(tmp_path: Path):
    """End to end: a new process, no --include_path, and the results file."""
    arguments = ["--model", "kvpolicy", "--model_args", "policy=h2o,budget=0.3", "--tasks", "kvpolicy_recall_512"]
    code = "from kvpolicy_lm_eval.startup import main; main()"
    subprocess.run(
        [sys.executable, "-c", code, *arguments, "--limit", "2", "--output_path", str(tmp_path)],
        check=True,
        capture_output=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    (results,) = tmp_path.rglob("results*.json")
    assert '"policy": "h2o@0.3"' in results.read_text()
