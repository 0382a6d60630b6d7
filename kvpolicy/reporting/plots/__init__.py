"""Plots of what a policy does; they require matplotlib, from the extra `plots`.

Each function takes the handle of an attached policy, a cache, a plan or a table of results, and returns a
`matplotlib.figure.Figure`, which notebooks display. None changes the state of pyplot, and none shows or saves a figure.
Each draws into `axes` if these are given.

    >>> from kvpolicy import plan, plots
    >>> from kvpolicy.embedded import config_of
    >>> figure = plots.bytes_by_kind(plan(config_of("llama-3-70b"), "snapkv+kivi:bits=4@0.2", prompt=4096, new=512))
    >>> figure.axes[0].get_xlabel()
    'bytes, GiB'
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvpolicy.reporting.plots.accuracy import accuracy_against_bytes as accuracy_against_bytes
    from kvpolicy.reporting.plots.bytes import bytes_by_kind as bytes_by_kind
    from kvpolicy.reporting.plots.layers import budgets as budgets
    from kvpolicy.reporting.plots.layers import kept as kept
    from kvpolicy.reporting.plots.layers import layer_similarity as layer_similarity
    from kvpolicy.reporting.plots.text import token_text as token_text

_LAZY = {
    "accuracy_against_bytes": "kvpolicy.reporting.plots.accuracy",
    "bytes_by_kind": "kvpolicy.reporting.plots.bytes",
    "budgets": "kvpolicy.reporting.plots.layers",
    "layer_similarity": "kvpolicy.reporting.plots.layers",
    "token_text": "kvpolicy.reporting.plots.text",
    "kept": "kvpolicy.reporting.plots.layers",
}
"""The module of each name, which is imported on first use, so that matplotlib is not loaded before."""


if not TYPE_CHECKING:  # a type checker would accept every misspelled name

    def __getattr__(name: str) -> Any:
        import importlib

        if name not in _LAZY:
            raise AttributeError(f"module 'kvpolicy.reporting.plots' has no attribute {name!r}")
        importlib.import_module("kvpolicy.reporting.plots._style")  # raises the error for a missing matplotlib
        value = getattr(importlib.import_module(_LAZY[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY])
