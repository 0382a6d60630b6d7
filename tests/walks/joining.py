"""Rows that come and go beside the caches that they were filled with."""

from __future__ import annotations

from typing import Any

import torch

from kvpolicy import KVPolicyError, PolicyCache
from tests.conformance.access import kept_positions
from tests.walks.acting import Acting
from tests.walks.life import Life, changes, check_cache, check_sentence, state_of

ROWS = 3


class Joined:
    """A cache whose rows are filled, stepped and dropped in random order."""

    def __init__(self, acting: Acting, model: Any, rows: PolicyCache, longest: int, *, compares: bool) -> None:
        """Fill `rows` with texts of up to `longest` tokens; `compares` if a row is exactly as alone."""
        self._acting = acting
        self._dice = acting.dice
        self._model = model
        self._rows = Life("R", rows)
        self._longest = longest
        self._compares = compares
        self._single: dict[int, PolicyCache] = {}

    def walk(self, sources: list[Life]) -> None:
        """Take rows from the caches of `sources`."""
        rows = self._rows
        for _ in range(self._dice.randint(5, 14)):
            roll = self._dice.random()
            row = self._dice.randrange(ROWS)
            if roll < 0.35:
                self._put(row, self._dice.choice(sources))
            elif roll < 0.45:
                if self._acting.attempt(rows, f"drop {row}", lambda cache, row=row: cache.drop(row))[0]:
                    del self._single[row]
            elif self._single:
                if max(int(cache.policy_layers[0].length) for cache in self._single.values()) >= self._longest:
                    break
                self._step()
            if rows.cache.is_initialized:
                check_cache(rows)
                assert sorted(set(range(ROWS)) - set(self._single)) == rows.cache.free_rows()
        if self._acting.attempt(rows, "reset", lambda cache: cache.reset())[0]:
            assert rows.cache.free_rows() == [*range(ROWS)]

    def _put(self, row: int, source: Life) -> None:
        cache = source.cache
        if cache.batch_size > 1 and self._dice.random() < 0.8 and not source.marked:
            try:
                cache = cache.fork([self._dice.randrange(cache.batch_size)])
            except KVPolicyError as error:
                check_sentence(error)
                return
        before = state_of(cache)
        words = f"put {source.name} into {row}"
        if self._acting.attempt(self._rows, words, lambda joined: joined.put(row, cache))[0]:
            with torch.no_grad():
                self._single[row] = cache.fork()
            self._rows.has_gap |= source.has_gap
        assert changes(before, state_of(cache)) == []

    def _step(self) -> None:
        ids = self._acting.tokens(ROWS, 1)
        step = f"step of rows {sorted(self._single)}"
        done, logits = self._acting.attempt(self._rows, step, lambda cache: self._model(ids, cache=cache).logits)
        if not done:
            return
        self._rows.has_gap = False
        for row, cache in self._single.items():
            with torch.no_grad():
                place = cache.policy_layers[0].length[:, None].clone()
                own = self._model(ids[row : row + 1], position_ids=place, cache=cache).logits
            if self._compares:
                for mine, ours in zip(cache.policy_layers, self._rows.cache.policy_layers, strict=True):
                    assert kept_positions(mine)[0] == kept_positions(ours)[row], step
                torch.testing.assert_close(own[0], logits[row], atol=1e-3, rtol=0)
