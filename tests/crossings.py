"""Count the functions and files of the package that a prompt's keys, and a decode step, go through.

`python tests/crossings.py [POLICY]` prints both counts for the embedded model, and the functions by file.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor

import kvpolicy

PACKAGE = Path(kvpolicy.__file__).parent
POLICY = "snapkv+kivi@0.2"
COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>", "<module>")
"""Code that is read with the function that it stands in."""


def crossed(run: Callable[[], object], counts: Callable[[FrameType], bool]) -> set[CodeType]:
    """The functions of the package, lambdas too, that are called while `counts` is true of their frame."""
    found: set[CodeType] = set()
    package = f"{PACKAGE}/"

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        named = code.co_name not in COMPREHENSIONS
        if event == "call" and named and code.co_filename.startswith(package) and counts(frame):
            found.add(code)

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found


def _tensors(values: Iterable[object]) -> Iterable[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple):
            yield from _tensors(value)


def measure(policy: str = POLICY) -> dict[str, set[CodeType]]:
    """The functions that are given the keys of a prompt of 400 tokens, and those that a decode step behind it calls."""
    model, _ = kvpolicy.tiny()
    ids = torch.randint(3, 700, (1, 402), generator=torch.Generator().manual_seed(0))
    keys: dict[int, Tensor] = {}  # held, so that no other tensor gets their memory

    def has_keys(frame: FrameType) -> bool:
        given = frame.f_locals
        if frame.f_code.co_name == "attend_new":
            keys[given["k"].untyped_storage().data_ptr()] = given["k"]
        return any(tensor.untyped_storage().data_ptr() in keys for tensor in _tensors(given.values()))

    with torch.no_grad(), kvpolicy.attach(model, policy):
        cache = kvpolicy.PolicyCache(model, new=8)
        prompt = crossed(lambda: model(ids[:, :400], cache=cache), has_keys)
        model(ids[:, 400:401], cache=cache)
        step = crossed(lambda: model(ids[:, 401:402], cache=cache), lambda frame: True)
    return {"keys of a prompt": prompt, "decode step": step}


def main(words: list[str] | None = None) -> int:
    """Print the counts."""
    (policy,) = (words if words is not None else sys.argv[1:]) or [POLICY]
    for name, codes in measure(policy).items():
        files: dict[str, list[str]] = {}
        for code in codes:
            files.setdefault(str(Path(code.co_filename).relative_to(PACKAGE)), []).append(code.co_name)
        print(f"{name} of {policy}: {len(codes)} functions in {len(files)} files")
        for file, names in sorted(files.items()):
            print(f"  {file}: {', '.join(sorted(names))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
