"""Registration of kvpolicy's model and tasks with lm-eval 0.4.10 to 0.4.13, which have no plugin support.

`install` is called when Python starts: by `kvpolicy_lm_eval.pth`, if lm-eval is found; from Python 3.15 on, by
`kvpolicy_lm_eval.start`, which cannot contain a condition. If lm-eval is installed, `install` inserts a finder at the
front of `sys.meta_path`. The finder does nothing until `lm_eval.models` or `lm_eval.tasks` is
imported. It then adds the model to lm-eval's registry, and kvpolicy's task folder to the folders that lm-eval searches.
No file of lm-eval is changed. `KVPOLICY_NO_STARTUP=1` disables all of this. Later versions of lm-eval read the entry
point `lm_eval.models`, with which this does not interfere. Only the standard library is used, because this module is
imported at every start of Python.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # as in typing, which is not imported because this module must be fast
if TYPE_CHECKING:
    from collections.abc import Callable
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

MODEL = "kvpolicy"
TARGET = "kvpolicy_lm_eval.model:KVPolicyLM"
OFF = "KVPOLICY_NO_STARTUP"


def install() -> None:
    """Install the hooks where lm-eval is, unless an environment variable disables them. Never raises an exception."""
    if os.environ.get(OFF, "") not in ("", "0"):
        return
    try:
        if any(finder.find_spec("lm_eval", None) for finder in sys.meta_path):
            _hook()
    except Exception as error:  # an error here would break every start of Python
        _print_error(error)


def main() -> None:
    """Run `lm_eval` with kvpolicy registered, even if no start-up file was read."""
    _hook()
    try:
        from lm_eval.__main__ import cli_evaluate
    except ImportError as error:
        sys.exit(f"lm-eval cannot be imported ({error}): pip install 'kvpolicy[lm-eval]'.")
    sys.exit(cli_evaluate())


def tasks_path() -> str:
    """Return the folder of kvpolicy's task files, for `--include_path`."""
    return os.path.join(os.path.dirname(os.path.abspath(__file__)), "tasks")


def register_model(_module: ModuleType | None = None) -> None:
    """Add the model to lm-eval's registry, by its import path; lm-eval imports it when it is used."""
    from lm_eval.api.registry import model_registry

    if MODEL not in model_registry:
        model_registry.register(MODEL, target=TARGET)


def register_tasks(module: ModuleType) -> None:
    """Add kvpolicy's tasks to every `TaskManager` that includes lm-eval's own tasks."""
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
        # Built-in tasks come first, then kvpolicy's, then the user's: the last task of a name takes precedence.
        if include_defaults:
            include_path = [tasks_path(), *_paths(include_path)]
        original(self, verbosity, include_path, include_defaults, *args, **kwargs)

    manager.__init__ = __init__


_WRAPPED: list[type] = []

# The model is registered after `lm_eval.models` was imported, not before: lm-eval fills its registry only if it is
# empty, so that an earlier entry would hide all of its own models.
_HOOKS: dict[str, Callable[[ModuleType], None]] = {"lm_eval.models": register_model, "lm_eval.tasks": register_tasks}


class _Finder:
    """A finder that wraps the loaders of two modules, which other finders find."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Find a module for `sys.meta_path`."""
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
    """A loader that calls a hook after a module was loaded by its own loader."""

    def __init__(self, inner: Any, hook: Callable[[ModuleType], None]) -> None:
        self._inner = inner
        self._hook = hook

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Create the module with its own loader."""
        return self._inner.create_module(spec)

    def exec_module(self, module: Any) -> None:
        """Execute the module with its own loader, restore that loader, and call the hook."""
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
    except Exception as error:  # lm-eval must work even if it has changed so much that a hook fails
        _print_error(error)


def _print_error(error: Exception) -> None:
    # It is not a warning, because `python -W error` would raise it.
    print(f"kvpolicy could not hook into lm-eval ({error!r}); use kvpolicy-lm-eval instead.", file=sys.stderr)


def _paths(include_path: Any) -> list[Any]:
    if include_path is None:
        return []
    return list(include_path) if isinstance(include_path, (list, tuple)) else [include_path]
