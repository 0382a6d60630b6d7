"""Pages are counted, written and evicted from by head."""

from __future__ import annotations

import pytest
import torch

import kvpolicy
from kvpolicy import AdaKV
from kvpolicy.engine.decode import NO_PAGE
from kvpolicy.engine.page_slots import flat_pages, require_pages, tokens_by_head, victims, write_flat
from kvpolicy.engine.pages import Owners
from kvpolicy.protocols import ALONE
from kvpolicy_eval.bench.models import llama, tokens
from tests.engine.paged import HEADS, Run


def test_slots_of_all_pages_are_counted_in_one_row() -> None:
    target = torch.zeros(1, 3, 4, 2)
    slots = torch.tensor([[[1], [6], [11]]])
    data = torch.tensor([1.0, 2.0, 3.0]).view(1, 3, 1, 1).expand(-1, -1, -1, 2)
    write_flat("keys", target, slots, data, torch.tensor([[[True], [False], [True]]]), None)
    assert flat_pages(target)[0, 0, :, 0].nonzero().flatten().tolist() == [1, 11]
    assert flat_pages(target).shape == (1, 1, 12, 2)


def test_a_head_with_a_token_must_have_a_page() -> None:
    layer = Run("window", AdaKV(), [24]).store.contents
    assert not layer.has_pages
    require_pages(layer, Owners.of(torch.tensor([[0, 0, 1]]), 2, ALONE.once), None)
    lacking = Owners.of(torch.tensor([[0, 0, 2]]), 3, ALONE.once)
    require_pages(layer, lacking, torch.tensor([[False]]))
    for valid in (None, torch.tensor([[True]])):
        with pytest.raises(RuntimeError, match=NO_PAGE):
            require_pages(layer, lacking, valid)


@pytest.mark.parametrize("codec", ["", "+tokenwise:bits=4"])
def test_the_host_knows_whether_every_head_has_pages(codec: str) -> None:
    model = llama(1, 64, heads=4)
    with kvpolicy.attach(model, f"uniform/adakv+snapkv{codec}@0.5"), torch.no_grad():
        cache = kvpolicy.PolicyCache(model, new=4)
        model(tokens(64), cache=cache)
        layer = cache.policy_layers[0].store.contents
        assert layer.has_pages
        owner = layer.tensors.paged().owner
        pages = owner.shape[1] - (layer.shape.heads if codec else 0)  # the buffer of each head is a page
        owner[0, :pages][owner[0, :pages] == 2] = 1
        layer.note_slots()
        assert not layer.has_pages


def test_of_ties_the_latest_token_of_each_head_is_evicted() -> None:
    run = Run("window", AdaKV(), [24])
    run.prompt([60])
    layer = run.store.contents
    held = run.store.geometry.head_positions()
    assert tokens_by_head(layer).tolist() == [[int((head >= 0).sum()) for head in held[0]]]
    owner = layer.tensors.paged().owner
    view = run.store.contents.view()
    found = victims(layer, view, ~view.valid, Owners.of(owner, HEADS, ALONE.once))
    for head in range(HEADS):
        mine = found[0][owner[0] == head]
        oldest = min(p for p in held[0, head].tolist() if p >= 0)
        assert mine[mine >= 0].tolist() == [oldest], "a window evicts its oldest token"
