"""Let lm-eval 0.4.10 to 0.4.13, which knows no plugins, find kvpolicy's model and tasks.

`kvpolicy_lm_eval.pth` calls `install` when Python starts (`kvpolicy_lm_eval.start` does from Python 3.15 on). It puts
one finder in front of `sys.meta_path`, which does nothing until `lm_eval.models` or `lm_eval.tasks` is imported: then
the first gets the model's name, the second looks into our task folder too. lm-eval's files are not touched.
`KVPOLICY_NO_STARTUP=1` turns all of it off. Later versions of lm-eval read the entry point `lm_eval.models`, with
which this is harmless. Standard library only, for it runs whenever Python does.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # what typing defines, without importing it at every start of Python
if TYPE_CHECKING:
    from collections.abc import Callable
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

MODEL = "kvpolicy"
TARGET = "kvpolicy_lm_eval.model:KVPolicyLM"
OFF = "KVPOLICY_NO_STARTUP"


def install() -> None:
    """Hook into lm-eval when it is imported, unless the environment says no; never raise."""
    if os.environ.get(OFF, "") not in ("", "0"):
        return
    try:
        _hook()
    except Exception as error:  # no failure here may ever stop Python from starting
        _complain(error)


def main() -> None:
    """Run `lm_eval` with kvpolicy in it, even where no start-up file was read."""
    _hook()
    try:
        from lm_eval.__main__ import cli_evaluate
    except ImportError as error:
        sys.exit(f"lm-eval cannot be imported ({error}): pip install 'kvpolicy[lm-eval]'.")
    sys.exit(cli_evaluate())


def tasks_path() -> str:
    """Name the folder of kvpolicy's task files, for `--include_path`."""
    return os.path.join(os.path.dirname(os.path.abspath(__file__)), "tasks")


def register_model(_module: ModuleType | None = None) -> None:
    """Name the model in lm-eval's registry; it is imported when it is asked for."""
    from lm_eval.api.registry import model_registry

    if MODEL not in model_registry:
        model_registry.register(MODEL, target=TARGET)


def register_tasks(module: ModuleType) -> None:
    """Make every `TaskManager` that knows lm-eval's own tasks know kvpolicy's too."""
    import functools

    manager = module.TaskManager
    if manager in _WRAPPED:
        return
    _WRAPPED.append(manager)
    original = manager.__init__

    @functools.wraps(original)
    def __init__(
        self: Any,
        verbosity: Any = None,
        include_path: Any = None,
        include_defaults: bool = True,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        # built-in tasks, then ours, then the user's: of two tasks of one name the last counts
        if include_defaults:
            include_path = [tasks_path(), *_paths(include_path)]
        original(self, verbosity, include_path, include_defaults, *args, **kwargs)

    manager.__init__ = __init__


_WRAPPED: list[type] = []

# Not earlier than `lm_eval.models`: lm-eval fills its registry only while it is empty, so a name that came first
# would hide all of its own models.
_HOOKS: dict[str, Callable[[ModuleType], None]] = {"lm_eval.models": register_model, "lm_eval.tasks": register_tasks}


class _Finder:
    """Finds nothing itself: wraps the loader of the two modules that others find."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Answer `sys.meta_path`."""
        hook = _HOOKS.get(name)
        if hook is None:
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            spec = find(name, path, target) if find and finder is not _Finder else None
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader, hook)
                return spec
        return None


class _Loader:
    """Loads a module with its own loader, then calls a hook with it."""

    def __init__(self, inner: Any, hook: Callable[[ModuleType], None]) -> None:
        self._inner, self._hook = inner, hook

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Answer the import system."""
        return self._inner.create_module(spec)

    def exec_module(self, module: Any) -> None:
        """Answer the import system."""
        module.__spec__.loader = module.__loader__ = self._inner
        self._inner.exec_module(module)
        _call(self._hook, module)


def _hook() -> None:
    if _Finder not in sys.meta_path:
        sys.meta_path.insert(0, _Finder)
    for name, hook in _HOOKS.items():
        if name in sys.modules:
            _call(hook, sys.modules[name])


def _call(hook: Callable[[ModuleType], None], module: ModuleType) -> None:
    try:
        hook(module)
    except Exception as error:  # lm-eval without kvpolicy is better than no lm-eval
        _complain(error)


def _complain(error: Exception) -> None:
    # not a warning, which `python -W error` would raise
    print(f"kvpolicy could not hook into lm-eval ({error!r}); use kvpolicy-lm-eval instead.", file=sys.stderr)


def _paths(include_path: Any) -> list[Any]:
    if include_path is None:
        return []
    return list(include_path) if isinstance(include_path, (list, tuple)) else [include_path]
