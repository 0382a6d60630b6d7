"""What is refused of caches whose slots are shared, of the rows that share them, and of their policies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import kvpolicy
from kvpolicy import KVPolicyError, PolicyCache
from kvpolicy.text.errors import KVPolicyStateError
from tests.conformance.models import build
from tests.conformance.play import forward
from tests.engine.test_shared_fork import TEXT, conversation, go_on, read_text


def test_the_text_must_not_change_while_it_is_shared() -> None:
    model = build("llama")
    ids, mask = conversation([6])
    with kvpolicy.attach(model, "window@0.5"):
        text = read_text(model, ids)
        text.fork(shared=True)
        calls = {
            "A forward": lambda: forward(model, ids, mask, TEXT, TEXT + 6, text),
            "tick": text.tick,
            "mark": text.mark,
            "crop": lambda: text.crop(-1),
            "shift": lambda: text.shift(30, 1),
            "expect": lambda: text.expect(None, 3),
            "hold_next": text.hold_next,
            "batch_select_indices": lambda: text.batch_select_indices(torch.tensor([0])),
            "batch_repeat_interleave": lambda: text.batch_repeat_interleave(2),
        }
        for name, call in calls.items():
            with pytest.raises(
                KVPolicyStateError, match=f"{name}.* must not change a cache whose slots other caches share"
            ):
                call()
        text.reset()
        forward(model, ids, mask, 0, TEXT, text)
        assert text.get_seq_length() == TEXT


def test_what_cannot_be_done_behind_a_shared_text(tmp_path: Path) -> None:
    model = build("llama")
    ids, mask = conversation([6])
    with kvpolicy.attach(model, "window@0.5"):
        shared = read_text(model, ids).fork(shared=True)
        go_on(model, shared, ids, mask)
        for call in (lambda: shared.save(tmp_path / "file"), lambda: shared.crop(-1), lambda: shared.shift(2, 1)):
            with pytest.raises(KVPolicyStateError, match="one with a shared prefix"):
                call()
        with pytest.raises(KVPolicyStateError, match="shares the same prefix"):
            shared.fork(shared=True)
        assert not [*tmp_path.iterdir()]
    model = build("gemma2")
    with kvpolicy.attach(model, "window@0.5"):
        shared = read_text(model, ids).fork(shared=True)
        with pytest.raises(KVPolicyStateError, match="sliding window"):
            shared.reset()


def test_detached_rows_are_refused_as_others() -> None:
    model = build("llama")
    ids, mask = conversation([6])
    with kvpolicy.attach(model, "window@0.5"):
        shared = read_text(model, ids).fork(shared=True)
    with kvpolicy.attach(model, "window@0.5"), pytest.raises(KVPolicyError, match="got a detached one"):
        forward(model, ids, mask, TEXT, TEXT + 6, shared)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("window+quest:page=4:read=8@0.5", r"Every slot must be read .* got Quest"),
        ("full+csr:read_top_k=4:prompt_atoms=0", r"Every slot must be read .* got CSR"),
    ],
)
def test_prefixes_that_cannot_be_shared(policy: str, message: str) -> None:
    model, _ = kvpolicy.tiny()
    ids, _ = conversation([6])
    with kvpolicy.attach(model, policy):
        text = read_text(model, ids)
        with pytest.raises(KVPolicyError, match=message):
            text.fork(shared=True)


@pytest.mark.parametrize(
    ("own", "part"),
    [
        ("h2o@8", "selector h2o"),
        ("snapkv:window=4@8", "selector snapkv"),
        ("keydiff@8", "selector keydiff"),
        ("squeeze+window@8", "allocator squeeze"),
        ("window+merge@8", "merger"),
        ("window+quest:page=4:read=8@16", "reader quest"),
        (kvpolicy.Policy.by_layer(["window@0.5"] * 3, budget=0.5), "a policy by layer"),
    ],
)
def test_own_policies_that_are_refused(own: Any, part: str) -> None:
    model = build("llama")
    ids, _ = conversation([6])
    with kvpolicy.attach(model, "window@0.5"):
        text = read_text(model, ids)
        with pytest.raises(KVPolicyError, match=f"own must be a policy that selects tokens .* got (the )?{part}"):
            text.fork(shared=True, own=own)
        assert not text.journal.is_shared


def test_wrong_calls() -> None:
    model = build("llama")
    ids, mask = conversation([6, 6])
    with kvpolicy.attach(model, "window@0.5"):
        with pytest.raises(KVPolicyStateError, match="must hold a whole prompt for its slots"):
            PolicyCache(model).fork(shared=True)
        two = PolicyCache(model)
        forward(model, ids, mask, 0, TEXT, two)
        with pytest.raises(KVPolicyError, match="must have one row for its slots to be shared, got 2"):
            two.fork(shared=True)
        text = read_text(model, ids)
        with pytest.raises(KVPolicyError, match="rows must be a list of numbers from 0 to 0"):
            text.fork([0, 1], shared=True)
        with pytest.raises(KVPolicyError, match="own must be None without shared=True, got 'full'"):
            text.fork(own="full")
        text.mark()
        with pytest.raises(KVPolicyStateError, match=r"fork\(shared=True\) must be called without a mark"):
            text.fork(shared=True)
        text.rollback(0)
        shared = text.fork([0, 0], shared=True)
        with pytest.raises(KVPolicyError, match=r"must have the 2 row\(s\) of its cache, got 1"):
            forward(model, ids[:1], mask[:1], TEXT, TEXT + 6, shared)
