"""The products that a reader asks for, and what they read."""

from __future__ import annotations

import pytest
import torch

from kvpolicy.engine.layer_slots import KeyProducts
from tests.readers.bench import DIM, HEADS, Layer, draw


@pytest.mark.parametrize("base", ["full", "tokenwise:block_size=3:residual_length=2"])
def test_products_in_some_channels_are_those_of_the_decoded_keys(base: str) -> None:
    layer = Layer(f"{base}+sparq:read=4", [20])
    layer.prompt(*draw(20, 1))
    past = layer.store.past()
    assert past is not None and layer.store.slots is not None
    products = KeyProducts(layer.store.contents, layer.store.slots.codes)
    start = layer.store.layout.exact if sum(layer.store.layout.coded) else 0
    keys = past.keys.masked_fill(~past.occupied[..., None], 0)[:, :, start:]
    queries = torch.randn(1, HEADS, 2, DIM, generator=torch.Generator().manual_seed(2))
    channels = torch.tensor([[[0, 5, 6], [1, 2, 7]]])
    for head in range(HEADS):
        taken = channels[0, head]
        wanted = queries[0, head][:, taken] @ keys[0, head][:, taken].mT
        held = past.occupied[0, head, start:]
        assert torch.allclose(products(queries, channels)[0, head][:, held], wanted[:, held], atol=1e-5)
        assert torch.allclose(products(queries)[0, head][:, held], (queries @ keys.mT)[0, head][:, held], atol=1e-5)


def test_only_the_channels_are_counted() -> None:
    layer = Layer("full+sparq:read=4", [20])
    layer.prompt(*draw(20, 1))
    contents = layer.store.contents
    assert layer.store.slots is not None
    products = KeyProducts(contents, layer.store.slots.codes)
    queries = torch.randn(1, HEADS, 2, DIM)
    contents.link.start()
    products(queries, torch.zeros(1, HEADS, 3, dtype=torch.int64))
    assert contents.link.moved == HEADS * layer.store.layout.slots * 3 * 4
    contents.link.start()
    products(queries)
    assert contents.link.moved == contents.tensors.keys.nbytes
    contents.link.stop()


def test_query_heads_are_averaged() -> None:
    layer = Layer("full+sparq:read=4", [20])
    layer.prompt(*draw(20, 1))
    assert layer.store.slots is not None
    products = KeyProducts(layer.store.contents, layer.store.slots.codes)
    assert products.group_mean(torch.tensor([[[[1.0], [4.0]]]])).tolist() == [[[2.5]]]
