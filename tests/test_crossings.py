"""A decode step and the keys of a prompt go through no more functions and files of the package than they did."""

from __future__ import annotations

from tests.crossings import measure

MOST = {"keys of a prompt": (28, 12), "decode step": (107, 39)}
"""Functions and files of `snapkv+kivi@0.2`, which `python tests/crossings.py` prints. Lower them where they fall. When
all rooms were counted first, they were 38 in 14 and 160 in 49; the goal is 23 in 9 and 96 in 32."""


def test_paths_grow_no_longer() -> None:
    for name, codes in measure().items():
        files = {code.co_filename for code in codes}
        functions, most = MOST[name]
        assert 0 < len(codes) <= functions and 0 < len(files) <= most, f"{name}: {len(codes)} in {len(files)}"
