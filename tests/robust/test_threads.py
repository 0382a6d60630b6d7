"""Threads that attach and detach one model."""

from __future__ import annotations

import threading
from typing import Any

import kvpolicy
from tests.conformance.models import build


def test_one_of_many_threads_attaches() -> None:
    """One thread wins, the others are refused, and the model is afterwards as it was."""
    model = build("llama")
    stock = model.config._attn_implementation
    start = threading.Barrier(8)
    handles: list[kvpolicy.Handle] = []
    errors: list[Exception] = []

    def attach() -> None:
        start.wait()
        try:
            handles.append(kvpolicy.attach(model, "window@0.5"))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=attach) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(handles) == 1 and len(errors) == 7
    assert all(isinstance(error, kvpolicy.KVPolicyError) and "already" in str(error) for error in errors)
    handles[0].detach()
    assert model.config._attn_implementation == stock
    config: Any = kvpolicy.attach(model, "window@0.5")
    config.detach()
