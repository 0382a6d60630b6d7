"""A walk: a policy, a cache under it, and operations on that cache and its copies in random order."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

from kvpolicy import KVPolicyError, PolicyCache
from tests.conformance.access import kept_positions
from tests.walks import drawing
from tests.walks.acting import Acting
from tests.walks.calls import Calls, impossible, interrupted
from tests.walks.joining import ROWS, Joined
from tests.walks.life import Life, Operation, Row, again, changes, check_again, check_cache, check_sentence, state_of

LONGEST = 120
"""Tokens behind which nothing more is done to a cache."""
OWN = [
    *[None] * 3,
    "window@6",
    "streaming:sinks=2@8",
    "snapkv:window=2@0.5",
    "h2o+merge@6",
    "uniform/adakv+tova@9",
    "full+kivi:group_size=4:residual_length=4",
    "tova+tokenwise:residual_length=2:block_size=2@0.6",
]
"""Policies of rows that share the tokens of another cache."""


class Walk:
    """Does operations to caches; after each, everything is checked that must hold whatever was done.

    - An operation changes one cache, and a refused one none: not the cache, and not those that it was copied from.
    - The stores keep their invariants, and `nbytes` and the report are what is stored.
    - The same operations on a new cache make the same cache, whatever was refused, taken back, copied or saved between.
    - Each row is as in a cache of its own.

    Attributes:
        notes: What was done, a line each.
    """

    def __init__(self, seed: int, folder: Path, dtypes: Sequence[torch.dtype] = drawing.DTYPES) -> None:
        self.notes: list[str] = []
        self._dice = Random(seed)
        self._acting = Acting(self._dice, self.notes)
        self._folder = folder
        self._model = drawing.draw_model(self._dice, dtypes)
        self._handle = drawing.attach(self._dice, self._model)
        self._lives: list[Life] = []
        self._made = 0
        policy = self._handle.policy
        attachment = PolicyCache(self._model).attachment
        self._holds = attachment.chunks == "hold"
        self._has_windows = bool(attachment.model_shape.unmanaged)
        self._has_states = bool(attachment.model_shape.states)
        self._grows = policy.decode == "grow"
        self._counts_columns = self._has_windows or self._grows
        self._has_positions = "position_ids" in inspect.signature(self._model.forward).parameters
        # Codes of a batch round otherwise than those of one row, and a budget in bytes is that of all rows.
        exact = self._model.dtype == torch.float32 and not any(own.codec.stages for own in policy.distinct)
        self._joins_exactly = exact
        self._rows_are_alone = exact and not isinstance(policy.budget, str) and self._model_type != "mimo_v2_flash"
        self._acting.note(f"{self._model_type}, {self._model.dtype}, {policy}")

    @property
    def _model_type(self) -> str:
        return self._model.config.model_type

    def run(self) -> None:
        """Walk, and check all caches at the end."""
        with self._handle:
            self._walk()

    def _walk(self) -> None:
        dice = self._dice
        first = Life("A", PolicyCache(self._model))
        if dice.random() < 0.5:
            self._announce(first, dice.choice([None, dice.randint(10, 50)]), dice.choice([None, dice.randint(0, 20)]))
        self._lives.append(first)
        often: dict[Callable[[Life], None], float] = {
            self._feed: 10,
            self._generate: 2,
            self._search: 0.6,
            self._mark: 2,
            self._save: 2,
            self._copy: 2,
            self._choose_rows: 2,
            self._hold: 1.2,
            self._crop: 1.2,
            self._expect: 1,
            self._shift: 1,
            self._refuse: 0.7,
            self._join: 0.5,
            self._reset: 0.3,
        }
        self._feed(first)
        for _ in range(dice.randint(10, 20)):
            for life in self._lives:
                if life.broken:
                    self._mend(life)
            going = [life for life in self._lives if not life.ended]
            if not going:
                break
            life = going[-1] if dice.random() < 0.6 else dice.choice(going)
            others = [(other, state_of(other.cache)) for other in self._lives if other is not life]
            dice.choices([*often], [*often.values()])[0](life)
            for other, before in others:
                assert changes(before, state_of(other.cache)) == [], f"changed {other.name}"
            if not life.broken:
                check_cache(life)
            life.ended |= life.ids.shape[1] > LONGEST
            if dice.random() < 0.12 and not life.ended and not life.broken:
                self._check(life)
        for life in self._lives:
            if not life.ended and not life.broken:
                self._check(life)

    # What all operations need

    def _new(self) -> PolicyCache:
        return PolicyCache(self._model)

    def _do(self, life: Life, words: str, operation: Operation) -> bool:
        """Attempt an operation, and note it in the history."""
        done, out = self._acting.attempt(life, words, operation)
        if done:
            life.history.append(operation)
            life.logits = out if isinstance(out, Tensor) else None
        return done

    def _born(self, life: Life, words: str, operation: Callable[[PolicyCache], PolicyCache]) -> Life | None:
        """Another cache that an operation makes of this one; None if it is refused."""
        done, cache = self._acting.attempt(life, words, operation)
        if not done:
            return None
        self._made += 1
        child = life.child(f"{life.name[:1]}{self._made}", cache)
        self._lives.append(child)
        return child

    def _check_again(self, life: Life) -> None:
        """The same operations on a new cache make the same cache."""
        check_again(life, self._new)

    def _check(self, life: Life) -> None:
        if life.marked:
            return
        self._check_again(life)
        if self._rows_are_alone and life.cache.rows is None and life.cache.is_initialized:
            self._check_row(life, self._dice.randrange(len(life.rows)))

    def _check_row(self, life: Life, number: int) -> None:
        """A row is as in a cache of its own."""
        row = life.rows[number]
        if not row.comparable or not row.begun:
            return
        try:
            alone, _ = again(self._new(), row.history)
        except KVPolicyError as error:  # a chunk of the batch that is a step of the row
            check_sentence(error)
            return
        for mine, ours in zip(alone.policy_layers, life.cache.policy_layers, strict=True):
            if mine.pending is None and ours.pending is None:
                assert kept_positions(mine)[0] == kept_positions(ours)[number], f"row {number} of {life.name}"
                own, given = int(mine.budget), int(ours.budget[number])
                # Once a row needs more slots, all rows get some.
                assert own == given or (self._grows and own < given), f"row {number} of {life.name}"

    def _rows_of(self, life: Life) -> int:
        """The number of rows of the next forward, for which a new cache is prepared."""
        rows = life.cache.batch_size if life.cache.is_initialized else life.ids.shape[0]
        rows = rows or self._dice.choice([1, 1, 2, 3])
        if life.ids.shape[0] != rows:
            life.ids = torch.zeros(rows, 0, dtype=torch.int64)
            life.mask = life.ids
        if not life.rows:
            # What was announced before there were rows is the longest one's, so that a single row is told the same.
            told = list(life.history)
            life.rows = [Row(list(told), comparable=rows == 1 or not told) for _ in range(rows)]
        return rows

    # Tokens

    def _run(self, ids: Tensor, mask: Tensor, start: int, model: Any = None) -> Operation:
        """Columns `start` to the end through the model, or a compiled one."""
        model = self._model if model is None else model
        places = (mask.cumsum(-1) - 1).clamp_min(0)[:, start:]
        given: dict[str, Any] = {"position_ids": places} if self._has_positions else {}
        if not bool(mask.all()):
            given["attention_mask"] = mask
        return lambda cache: model(ids[:, start:], cache=cache, use_cache=True, **given).logits

    def _feed(self, life: Life, size: int | None = None) -> None:
        """A prompt, a chunk or a step, with padding in front of some rows."""
        dice = self._dice
        rows = self._rows_of(life)
        start = life.ids.shape[1]
        if size is None:
            first = dice.randint(2, 9) if life.shares else dice.randint(8, 30)
            size = dice.choice([1, 1, 1, 1, dice.randint(2, 9)]) if start else first
        ids = self._acting.tokens(rows, size)
        mask = torch.ones_like(ids)
        if rows > 1 and size > 1 and (not start or dice.random() < 0.3):
            for row in range(rows):
                most = size if start and dice.random() < 0.2 else size - 1
                mask[row, : dice.choice([0, dice.randint(0, most)])] = 0
            mask[0] |= not bool(mask.any())
        elif rows > 1 and start and dice.random() < 0.1:
            mask[dice.randrange(rows)] = 0
        if life.cache.holds_next and not bool(mask.all()):
            life.not_comparable()
        all_ids = torch.cat([life.ids, ids], 1)
        all_mask = torch.cat([life.mask, mask], 1)
        words = f"feed {size} to {rows} rows" + ("" if bool(mask.all()) else f", mask {mask.tolist()}")
        if not self._do(life, words, self._run(all_ids, all_mask, start)):
            return
        life.ids = all_ids
        life.mask = all_mask
        life.has_gap &= not bool(mask.all())
        assert life.logits is not None
        assert not bool(mask.all()) or bool(life.logits.isfinite().all())
        for number, row in enumerate(life.rows):
            self._note_tokens(row, ids[number][mask[number].bool()], size, is_first=not start)

    def _note_tokens(self, row: Row, own: Tensor, size: int, *, is_first: bool) -> None:
        """Note the tokens of a row among the `size` columns of a forward, and whether it is the same one alone."""
        count = len(own)
        if not count:
            row.comparable &= not (self._counts_columns and row.begun)  # windows move on, and slots are added
            return
        is_step_alone = count == 1 and size > 1 and row.begun
        begins_in_a_step = not row.begun and size == 1 and not is_first
        moves_windows = self._has_windows and row.begun and count != size
        row.comparable &= not (is_step_alone or begins_in_a_step or moves_windows)
        row.begun = True
        row.history.append(lambda cache: self._model(own[None], cache=cache, use_cache=True).logits)

    def _answer(self, ids: Tensor, mask: Tensor, count: int, **more: Any) -> Operation:
        return lambda cache: self._model.generate(
            ids,
            attention_mask=mask,
            cache=cache,
            do_sample=False,
            max_new_tokens=count,
            min_new_tokens=count,
            pad_token_id=0,
            **more,
        )

    def _generate(self, life: Life) -> None:
        """A turn of `generate`, the first or a later one, which may read its prompt in chunks."""
        dice = self._dice
        is_first = not life.cache.is_initialized
        rows = self._rows_of(life)
        count = dice.randint(1, 5)
        more = dice.randint(8, 26) if is_first else dice.choice([0, 1, dice.randint(2, 6)])
        mask = torch.ones(rows, more, dtype=torch.int64)
        if is_first and rows > 1:
            for row in range(rows):
                mask[row, : dice.randint(0, more - 1)] = 0
        ids = torch.cat([life.ids, self._acting.tokens(rows, more)], 1)
        lengths = mask.sum(-1)
        mask = torch.cat([life.mask, mask], 1)
        chunked = {"prefill_chunk_size": dice.randint(2, 9)} if is_first and dice.random() < 0.15 else {}
        if not self._do(life, f"generate {count} behind {more} {chunked}", self._answer(ids, mask, count, **chunked)):
            return
        out = life.logits
        assert out is not None and life.cache.get_seq_length() == out.shape[1] - 1
        if chunked or (more > 1 and bool((lengths == 1).any())):
            life.not_comparable()
        for number, row in enumerate(life.rows):
            own = ids[number][mask[number].bool()][None]
            row.begun = True
            row.history.append(self._answer(own, torch.ones_like(own), count))
        life.ids = out[:, :-1]
        life.mask = torch.cat([mask, torch.ones(rows, out.shape[1] - ids.shape[1], dtype=torch.int64)], 1)[:, :-1]

    def _search(self, life: Life) -> None:
        """Beams of a copy, in which each row finds what it finds alone."""
        dice = self._dice
        rows = self._rows_of(life)
        more = dice.randint(1, 6) if life.cache.is_initialized else dice.randint(8, 26)
        ids = torch.cat([life.ids, self._acting.tokens(rows, more)], 1)
        mask = torch.cat([life.mask, torch.ones(rows, more, dtype=torch.int64)], 1)
        beams, count = dice.randint(2, 3), dice.randint(1, 5)

        def search(cache: PolicyCache, ids: Tensor, mask: Tensor) -> Tensor:
            cache = cache.fork()
            if cache.is_initialized:
                cache.batch_repeat_interleave(beams)
            return self._answer(ids, mask, count, num_beams=beams)(cache)  # pyright: ignore[reportReturnType]

        words = f"{beams} beams of {count} behind {more}"
        done, found = self._acting.attempt(life, words, lambda cache: search(cache, ids, mask))
        if not done or not self._rows_are_alone:
            return
        number = dice.randrange(rows)
        row = life.rows[number]
        if row.comparable and (row.begun or not life.cache.is_initialized) and more > 1:
            alone, _ = again(self._new(), row.history)
            own = ids[number][mask[number].bool()][None]
            out = search(alone, own, torch.ones_like(own))
            assert torch.equal(out[0, -count:], found[number, -count:]), f"beams of row {number} of {life.name}"

    # What is said of tokens before they come

    def _announce(self, life: Life, prompt: int | None, new: int | None) -> None:
        """A new cache that is told how long its prompt and its answer are."""
        made = PolicyCache(self._model, prompt=prompt, new=new)
        self._acting.note(f"{life.name}: prompt={prompt}, new={new}")
        life.cache = made
        life.history.append(lambda _: PolicyCache(self._model, prompt=prompt, new=new))

    def _expect(self, life: Life) -> None:
        dice = self._dice
        prompt: Any = dice.choice([None, life.cache.get_seq_length() + dice.randint(0, 12)])
        new = dice.randint(0, 12)
        if prompt is not None and life.rows and dice.random() < 0.4:
            prompt = [max(1, prompt - dice.randint(0, 5)) for _ in life.rows]
        if not self._do(life, f"expect {prompt}, {new}", lambda cache: cache.expect(prompt, new)):
            return
        if isinstance(prompt, int) and len(life.rows) > 1:
            life.not_comparable()  # it is the longest row's
        for number, row in enumerate(life.rows):
            own = prompt[number] if isinstance(prompt, list) else prompt
            row.history.append(lambda cache, own=own: cache.expect(own, new))

    def _hold(self, life: Life) -> None:
        """The next chunk is kept whole, such as a question."""
        if not self._do(life, "hold_next", lambda cache: cache.hold_next()):
            return
        life.tell_rows(lambda cache: cache.hold_next())
        if self._dice.random() < 0.7:
            self._feed(life, self._dice.choice([1, self._dice.randint(2, 6)]))

    # What is taken back and moved

    def _mark(self, life: Life) -> None:
        """Steps of a draft, of which some are taken back."""
        dice = self._dice
        most = dice.randint(1, 6)
        if not self._acting.attempt(life, f"mark {most}", lambda cache: cache.mark(most))[0]:
            return
        life.marked = True
        kept = [life.child("", life.cache)]
        for _ in range(dice.randint(0, most)):
            before = len(life.history)
            self._feed(life, 1)
            check_cache(life)
            if len(life.history) > before:
                kept.append(life.child("", life.cache))
            if dice.random() < 0.15:
                self._refuse(life)
        if dice.random() < 0.15:  # of a copy, which has the mark, too
            twin = copy.deepcopy(life.cache)
            with torch.no_grad():
                twin.rollback(0)
        count = dice.randint(0, len(kept) - 1)
        done, _ = self._acting.attempt(
            life, f"rollback {count} of {len(kept) - 1}", lambda cache: cache.rollback(count)
        )
        assert done
        life.marked = False
        past = kept[count]
        life.ids = past.ids
        life.mask = past.mask
        life.rows = past.rows
        life.history = past.history
        life.logits = past.logits
        if self._holds and len(kept) > 1 and life.cache.announced.prompt is not None:
            life.begin_anew()  # a held prompt takes single tokens in as chunks, and under a mark as steps
        self._check_again(life)

    def _crop(self, life: Life) -> None:
        dice = self._dice
        seen = life.ids.shape[1]
        count = dice.choice([0, 1, 1, 2, 3, dice.randint(1, max(seen, 1)), max(seen, 1)])
        if not self._do(life, f"crop {-count}", lambda cache: cache.crop(-count)) or not count:
            return
        life.ids = life.ids[:, : seen - count]
        life.mask = life.mask[:, : seen - count]
        life.not_comparable()  # it takes columns
        if not life.ids.shape[1]:
            life.rows = []

    def _shift(self, life: Life) -> None:
        dice = self._dice
        if not life.cache.is_initialized or not bool(life.mask.all()):
            return
        at = dice.randint(0, life.ids.shape[1])
        by = dice.choice([-1, -2, -3, 2, 3, -at])
        operation: Operation = lambda cache: cache.shift(at, by)  # noqa: E731
        if not self._do(life, f"shift {at}, {by}", operation) or not by:
            return
        life.tell_rows(operation)
        life.has_gap |= at == life.ids.shape[1]
        between = torch.full((len(life.ids), max(by, 0)), 5)
        life.ids = torch.cat([life.ids[:, : min(at, at + by)], between, life.ids[:, at:]], 1)
        life.mask = torch.ones_like(life.ids)

    def _reset(self, life: Life) -> None:
        if not self._acting.attempt(life, "reset", lambda cache: cache.reset())[0]:
            return
        life.broken = False
        life.marked = False
        life.has_gap = False
        if life.shares:
            life.ended = True
            return
        life.history = []
        life.start = None
        life.logits = None
        life.ids = torch.zeros(0, 0, dtype=torch.int64)
        life.mask = life.ids
        life.rows = []
        assert _but_stock(changes(state_of(self._new()), state_of(life.cache))) == []

    # Copies, files and rows

    def _copy(self, life: Life) -> None:
        dice = self._dice
        rows = max(life.cache.batch_size, 1)
        kind = dice.choice(["deepcopy", "fork", "rows", "shared", "shared"])
        if kind == "deepcopy":
            self._born(life, "deepcopy", copy.deepcopy)
        elif kind == "fork":
            self._born(life, "fork", lambda cache: cache.fork())
        elif kind == "rows":
            take = [dice.randrange(rows) for _ in range(dice.randint(1, 3))]
            child = self._born(life, f"fork rows {take}", lambda cache: cache.fork(take))
            if child is not None:
                child.take(take)
                child.history.append(lambda cache: cache.batch_select_indices(take))
        else:
            self._share(life)

    def _share(self, life: Life) -> None:
        """Rows that have their tokens so far in common, once in memory."""
        own = self._dice.choice(OWN)
        count = self._dice.randint(1, 3)
        source = self._born(life, "fork", lambda cache: cache.fork())
        if source is None:
            return
        source.ended = True  # it must stay as it is
        operation: Operation = lambda cache: cache.fork([0] * count, shared=True, own=own)  # noqa: E731
        child = self._born(source, f"share by {count} rows, own={own}", operation)  # pyright: ignore[reportArgumentType]
        if child is None:
            return
        child.shares = True
        child.history.append(operation)
        if child.rows:
            child.take([0] * count)
            for row in child.rows:
                row.history.append(lambda cache: cache.fork([0], shared=True, own=own))

    def _save(self, life: Life) -> None:
        dice = self._dice
        path = self._folder / f"{self._made}.safetensors"
        tokens = life.ids if dice.random() < 0.5 and not life.shares else None
        form = dice.choice([None, None, "zlib"])
        if not self._acting.attempt(life, f"save {form}", lambda cache: cache.save(path, tokens=tokens, compress=form))[
            0
        ]:
            return
        new = dice.choice([None, None, None, 4])
        child = self._born(life, f"load, new={new}", lambda _: PolicyCache.load(self._model, path, new))
        assert child is not None
        path.unlink()
        if new is not None:
            operation: Operation = lambda cache: cache.expect(None, new)  # noqa: E731
            child.history.append(operation)
            child.tell_rows(operation)
        check_cache(child)
        self._check_again(child)
        if len(self._lives) > 4:
            self._lives.pop(0)

    def _choose_rows(self, life: Life) -> None:
        dice = self._dice
        rows = life.cache.batch_size
        if rows < 1:
            return
        if dice.random() < 0.3 and rows <= 2:
            if self._do(life, "repeat each row", lambda cache: cache.batch_repeat_interleave(2)):
                life.take([row for row in range(rows) for _ in range(2)])
            return
        take = [dice.randrange(rows) for _ in range(dice.choice([rows, rows, 1, 2, 3]))]
        beams = dice.random() < 0.3

        def choose(cache: PolicyCache) -> None:
            (cache.reorder_cache if beams else cache.batch_select_indices)(torch.tensor(take))

        if self._do(life, f"choose rows {take}", choose):
            life.take(take)

    def _join(self, life: Life) -> None:
        """Rows that come and go are as the caches that they were filled with."""
        new = self._dice.choice([None, None, 30])
        try:
            rows = self._handle.rows(ROWS, LONGEST, new)
        except KVPolicyError as error:
            check_sentence(error)
            return
        sources = [one for one in self._lives if not one.broken]
        Joined(self._acting, self._model, rows, LONGEST, compares=self._joins_exactly).walk(sources)

    # What is refused

    def _refuse(self, life: Life) -> None:
        rows = max(life.cache.batch_size, 1)
        calls = impossible(self._model, rows, self._acting.tokens, self._folder)
        if not life.cache.is_initialized:
            del calls["feed another number of rows"]
        if life.marked:
            calls["feed several tokens"] = lambda cache: self._model(self._acting.tokens(rows, 3), cache=cache)
        self._try(life, calls)

    def _mend(self, life: Life) -> None:
        """After a forward that was refused in the middle, only `reset` is left."""
        self._try(life, interrupted(self._model, max(life.cache.batch_size, 1), self._acting.tokens, self._folder))
        self._reset(life)

    def _try(self, life: Life, calls: Calls) -> None:
        for name in self._dice.sample(sorted(calls), 3):
            done, _ = self._acting.attempt(life, name, calls[name])
            assert not done, f"{name} was not refused"


def _but_stock(found: list[str]) -> list[str]:
    """Changes, but for what transformers keeps behind a reset, and the size of tiles."""
    kept = ("is_shared", ".device:", ".tile_size:")
    return [change for change in found if not any(name in change for name in kept)]
