"""The mark of constant results is that of PyTorch, whose function for it imports the compiler."""

from __future__ import annotations

import torch

from kvpolicy.codecs.rotation import constant_result


def test_the_mark_is_that_of_pytorch() -> None:
    def ours() -> int:
        return 1

    def theirs() -> int:
        return 1

    assert constant_result(ours) is ours
    assert vars(ours) == vars(torch.compiler.assume_constant_result(theirs)) != {}
