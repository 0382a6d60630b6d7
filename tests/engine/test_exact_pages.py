"""Pages in full precision: what is read back, what a new token takes, and what is kept when pages are added."""

from __future__ import annotations

import torch

from kvpolicy import AdaKV
from kvpolicy.engine.exact_pages import ExactPageBody
from tests.engine.paged import HEADS, Run


def body() -> tuple[Run, ExactPageBody]:
    """A layer after a prompt."""
    run = Run("h2o", AdaKV(), [40], last=200)
    run.prompt([60])
    return run, ExactPageBody(run.store.contents)


def test_past_and_held_slots_have_the_same_tokens() -> None:
    _, pages = body()
    past = pages.past()
    positions, state = pages.held_slots()
    assert past is not None and torch.equal(past.occupied, positions >= 0)
    assert state.score.shape == positions.shape and past.keys.shape[:3] == positions.shape


def test_a_token_takes_an_empty_slot_of_its_head_before_any_other() -> None:
    run, pages = body()
    tensors = run.store.tensors
    page = int((pages.owner[0] == 1).nonzero()[-1])
    tensors.positions[0, page, 2] = -1
    run.store.contents.note_slots()
    slot, _ = pages.free_slot(run.store.contents.view(), None)
    assert int(slot[0, 1]) == page * tensors.positions.shape[-1] + 2
    taken = slot[0, :, 0] // tensors.positions.shape[-1]
    assert pages.owner[0, taken].tolist() == [*range(HEADS)]


def test_pages_that_are_added_are_empty_and_the_others_keep_their_tokens() -> None:
    run, pages = body()
    tensors = run.store.tensors
    before = tensors.keys.clone()
    pages.lengthen(torch.cat([pages.owner, torch.tensor([[2]])], 1))
    assert torch.equal(tensors.keys[:, :-1], before) and not tensors.keys[:, -1].any()
    assert bool((tensors.positions[:, -1] < 0).all()) and int(pages.owner[0, -1]) == 2
    assert pages.buffer_room() is None and pages.find_layout().slots * HEADS >= tensors.positions[0].numel()
