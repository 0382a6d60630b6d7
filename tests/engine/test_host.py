"""What runs on the host is left out of a compiled graph, and is otherwise the same function."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import Unsupported

from kvpolicy.engine.host import on_host


@on_host
def double_if_positive(x: Tensor, *, times: int = 2) -> Tensor:
    return x * times if bool((x > 0).all()) else x


def test_it_is_the_same_function() -> None:
    assert double_if_positive(torch.ones(2)).tolist() == [2, 2]
    assert double_if_positive(-torch.ones(2), times=3).tolist() == [-1, -1]
    assert double_if_positive(torch.ones(2), times=3).tolist() == [3, 3]


def test_a_graph_breaks_there() -> None:
    graphs: list[Any] = []

    def count(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def walk(x: Tensor) -> Tensor:
        return double_if_positive(x + 1) - 1

    torch._dynamo.reset()
    assert torch.compile(walk, backend=count)(torch.ones(3)).tolist() == [3, 3, 3]
    assert len(graphs) == 2, "what comes before the call, and what comes after it"
    torch._dynamo.reset()
    with pytest.raises(Unsupported):
        torch.compile(walk, backend=count, fullgraph=True)(torch.ones(3))
    torch._dynamo.reset()
