"""The extra `plots` is needed when a picture is drawn, not before."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import kvpolicy.plots
import kvpolicy.reporting.plots


def test_nothing_is_loaded_before_a_picture_is_drawn() -> None:
    code = (
        f"import sys; sys.path[:0] = {[path for path in sys.path if path]}; from kvpolicy import plots; dir(plots)\n"
        "assert 'matplotlib' not in sys.modules and 'torch' not in sys.modules\n"
        "assert plots.kept and 'matplotlib.pyplot' not in sys.modules\n"
        "print('bytes_by_kind' in dir(plots))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True"]


def test_without_matplotlib_one_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    importlib.import_module("kvpolicy.reporting.plots.bytes")
    for name in ("kvpolicy.reporting.plots._style", "kvpolicy.reporting.plots.bytes"):
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(vars(kvpolicy.reporting.plots), "bytes_by_kind", raising=False)
    with pytest.raises(ImportError, match=r"^Plots need matplotlib, .*; run pip install 'kvpolicy\[plots\]'\.$"):
        _ = kvpolicy.plots.bytes_by_kind


def test_a_bare_install_is_told_what_it_lacks() -> None:
    code = (
        f"import sys; sys.path[:0] = {[path for path in sys.path if path]}\n"
        "sys.modules |= dict.fromkeys(('matplotlib', 'numpy', 'transformers'))\n"
        "import kvpolicy, warnings; from kvpolicy import plots\n"
        "warnings.filterwarnings('ignore', 'Failed to initialize NumPy')\n"
        "for look in (lambda: kvpolicy.attach, lambda: kvpolicy.tiny(), lambda: plots.kept, lambda: plots.budgets):\n"
        "    try: look()\n"
        "    except ImportError as error: print(str(error).partition('pip install ')[2])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["'kvpolicy[hf]'."] * 2 + ["'kvpolicy[plots]'."] * 2, done.stderr


def test_an_unknown_picture_is_said() -> None:
    with pytest.raises(AttributeError, match=r"'kvpolicy\.plots' has no attribute 'cakes'"):
        kvpolicy.plots.cakes  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]


def test_every_name_is_there() -> None:
    names = {"accuracy_against_bytes", "budgets", "bytes_by_kind", "kept", "layer_similarity", "token_text"}
    assert names <= set(dir(kvpolicy.plots))
    assert all(getattr(kvpolicy.plots, name).__name__ == name for name in names)
