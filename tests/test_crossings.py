"""A decode step and the keys of a prompt go through no more functions and files of the engine than they did."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from tests.crossings import measure

MOST = {"keys of a prompt": (33, 12), "decode step": (86, 28)}
"""Functions and files of `snapkv+kivi@0.2`, which `python tests/crossings.py` prints. Lower them where they fall; two
functions of a step count its columns on the host, so that it does not read them from the device, and it has two halves,
between which layers without keys of their own read."""


def test_paths_grow_no_longer() -> None:
    for name, codes in measure().items():
        files = {code.co_filename for code in codes}
        functions, most = MOST[name]
        assert 0 < len(codes) <= functions and 0 < len(files) <= most, f"{name}: {len(codes)} in {len(files)}"
