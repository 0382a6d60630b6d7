"""One layer's slots: fixed buffers that a prefill fills and a decode step overwrites in place.

A layer's slots are an exact part in the model's dtype, where every new token lands, and a coded part that tokens
reach in blocks (see `protocols.Layout`). Order inside the buffers means nothing: keys carry their rotary position.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from kvpolicy.engine.attention import Past, ScoreTransform
from kvpolicy.engine.capacity import exact_count, extend, free_steps, held_by, is_short, lacking, later
from kvpolicy.engine.codec_view import Coded
from kvpolicy.engine.decode import decode_step
from kvpolicy.engine.demotion import flush, recode, settle_loose
from kvpolicy.engine.host import on_host
from kvpolicy.engine.prefill import Prompt, attend_prompt
from kvpolicy.engine.rotary import Rope
from kvpolicy.engine.row_limits import Rows, alloc_rows, pin, with_budget
from kvpolicy.engine.selection import choose
from kvpolicy.engine.slots import fix_addresses, lay_out, words_of
from kvpolicy.engine.state import map_state
from kvpolicy.hf.forward_checks import check_kept
from kvpolicy.hf.forward_guard import check_first, note_attended
from kvpolicy.planning.memory import bytes_by_kind
from kvpolicy.planning.planner import ROOM
from kvpolicy.policy import Policy
from kvpolicy.protocols import Calibration, Codes, Forward, Layout, State
from kvpolicy.protocols.ranks import SINGLE_RANK, Ranks
from kvpolicy.spec.errors import KVPolicyError


class PolicyLayer(CacheLayerMixin):
    """The slots of one layer.

    Attributes:
        positions: Original position of the token in each slot, [B, H, S] int32, -1 for an empty slot.
        budget: The most tokens that each row may hold, [B] int64.
        length: Tokens that each row has seen, [B] int64.
        keys: Keys of the exact slots, [B, H, E, D].
        values: Values of the exact slots, [B, H, E, D].
        layout: How many slots are exact and how many coded.
        codes: The codec's tensors of each stage.
        calibrations: The model's calibrated tensors of each stage.
        rows: What the codec's stages need to know of each row, None where nothing is coded.
        rope: The rotary embedding, where keys are coded without it.
        frozen: The first exact slots, which are the codec's atoms.
        ranks: Who holds the layer's other heads.
    """

    is_sliding = False
    is_compileable = False  # generate() would compile by itself, and nothing would call tick()
    is_croppable = False
    supports_early_init = False

    positions: Tensor
    budget: Tensor
    length: Tensor
    columns: Tensor
    codes: tuple[Codes, ...]
    calibrations: tuple[Calibration, ...]
    rows: Rows | None
    state: State
    ends: list[int]
    called: Forward | None
    __repr__ = words_of  # pyright: ignore[reportAssignmentType]

    def __init__(
        self,
        policy: Policy,
        layer_idx: int,
        on_prompt: Callable[[PolicyLayer], None],
        rope: Rope | None = None,
        meet: Callable[[int, Tensor, Tensor], Ranks] = lambda *_: SINGLE_RANK,
    ) -> None:
        """Make an empty layer; `on_prompt` is told of every prompt, `meet` finds its ranks by their heads."""
        super().__init__()
        self.policy, self.layer_idx, self._on_prompt, self.rope = policy, layer_idx, on_prompt, rope
        self._meet, self.ranks = meet, SINGLE_RANK
        self.frozen = 0
        self.massive: Tensor | None = None  # the waiting prompt's tokens that hold its largest hidden numbers, [B, P]
        self.prompt: Prompt | None = None
        self.waits: bool | None = None  # for attention, in the running forward; None where none runs
        self.listens, self.called = policy.selector.needs.forward, None
        self.layout, self.tokens = Layout(0), 0
        self._room: float = 0
        self.short = False  # some row may hold more than was expected

    # what transformers asks

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Make a layer of no slots, on the device of its first keys."""
        batch, heads, _, dim = key_states.shape
        device, empty = key_states.device, (batch, heads, 0, dim)
        self.keys, self.values = key_states.new_empty(empty), value_states.new_empty(empty)
        self.positions = torch.empty(batch, heads, 0, dtype=torch.int32, device=device)
        self.state = self.policy.selector.alloc(batch, heads, 0, device)
        codec = self.policy.codec
        self.codes, self.rows = (), alloc_rows(codec, batch, heads, dim, device)
        self.calibrations = tuple(
            stage.load_calibration(self.layer_idx, device, self.ranks.held) for stage in codec.stages
        )
        self.length = torch.zeros(batch, dtype=torch.int64, device=device)
        self.budget = torch.zeros(batch, dtype=torch.int64, device=device)
        self.columns = torch.zeros((), dtype=torch.int64, device=device)
        self.ends = [0] * batch  # tokens that each row will hold, as far as is known
        self.dtype, self.device = key_states.dtype, device
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Hand keys and values through: the attention function reads and writes the slots."""
        return key_states, value_states

    def get_seq_length(self) -> int:
        """Columns seen, padding included: what transformers counts positions from."""
        if not self.is_initialized:
            return 0
        if torch.compiler.is_compiling():
            return self.columns  # pyright: ignore[reportReturnType]  # a tensor, as in transformers' static layers
        return int(self.columns)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of a stock mask over everything seen."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """None: tokens beyond the budget are evicted."""
        return -1

    def reset(self) -> None:
        """Forget everything."""
        self.is_initialized, self.prompt, self.layout, self.tokens = False, None, Layout(0), 0
        self.frozen, self.massive = 0, None
        for name in (
            "keys",
            "values",
            "positions",
            "state",
            "codes",
            "calibrations",
            "rows",
            "length",
            "budget",
            "columns",
        ):
            vars(self).pop(name, None)
        self.keys = self.values = None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Take rows `beam_idx` [B']."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Take rows `indices` [B']."""
        self._map_rows(lambda t: t[indices.to(t.device)])

    def revive(self) -> None:
        """Own ordinary tensors, where inference mode made others that only it may change."""
        self._map_rows(torch.clone)
        self.columns = self.columns.clone()

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row."""
        self._map_rows(lambda t: t.repeat_interleave(repeats, 0))

    def crop(self, tokens_to_remove: int) -> None:
        """Refuse: what was evicted for the tokens to remove is gone."""
        if tokens_to_remove != 0:
            raise KVPolicyError(
                "A cache under a policy cannot be cropped, since evicted tokens are gone: start a new cache, "
                "or generate without an assistant model."
            )

    def _map_rows(self, fn: Callable[[Tensor], Tensor]) -> None:
        if not self.is_initialized:
            return
        assert self.keys is not None and self.values is not None
        self.keys, self.values, self.positions = fn(self.keys), fn(self.values), fn(self.positions)
        self.length, self.budget = fn(self.length), fn(self.budget)
        self.ends = fn(torch.tensor(self.ends)).tolist()
        self.state, self.codes = map_state(fn, self.state), map_state(fn, self.codes)
        if self.rows is not None:
            self.rows = Rows(*(fn(t) if t.shape[0] else t for t in self.rows))
        fix_addresses(self)

    # what the attention function asks

    def forward(self, q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None, transform: ScoreTransform) -> Tensor:
        """Attend from new tokens, [B, Hq, P, D], and take them in; see `attend_prompt` for the arguments."""
        check_first(self)
        if not self.is_initialized:
            self.ranks = self._meet(self.layer_idx, q, k)
        check_kept(self, k, v)
        own, reads = q.shape[1], self.layout.slots > 0
        if self.ranks.phantom:
            q, k, v = (t.new_zeros(t.shape[0], 1, *t.shape[2:]) for t in (q, k, v))
        take = decode_step if self.is_initialized and q.shape[2] == 1 else PolicyLayer._take_prompt
        out = take(self, q, k, v, valid, transform)
        return note_attended(self, out, reads)[:, :own]

    @on_host  # budgets are settled on the host
    def _take_prompt(self, q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None, transform: ScoreTransform) -> Tensor:
        if not self.is_initialized:
            self.lazy_initialization(k, v)
        out, self.prompt = attend_prompt(self, q, k, v, valid, transform)
        self.columns.add_(q.shape[2])
        self._on_prompt(self)
        return out

    def settle(self, keep: Tensor, room: Tensor, ends: Tensor) -> None:
        """Bring the waiting prompt under the budget and free it.

        Args:
            keep: The most tokens to keep of each row, [B] int64.
            room: Tokens that each row may add later without evicting, [B] int64.
            ends: The most that each row will hold, as far as is known, [B] int64: what is allocated.
        """
        assert self.prompt is not None
        prompt, self.prompt = self.prompt, None
        keep, room = keep.to(self.device), room.to(self.device)
        seen, self.length = self.length, prompt.lengths(self.length)
        loose = choose(self, prompt, keep, seen)
        self.ends = later(self.ends, ends, prompt.idle)
        self.tokens = max(*self.ends, self.tokens)
        lay_out(self, self.policy.codec.layout(self.tokens))
        self.set_budget(keep + room if prompt.idle is None else torch.where(prompt.idle, self.budget, keep + room))
        self.short = is_short(self)
        first = (seen == 0) & (self.length > 0)
        if self.rows is not None and bool(first.any()):
            pin(self.rows, self.policy.codec.traits, prompt.positions(seen), self.massive, first)
        self.keys, self.values = settle_loose(self, loose, prompt.idle, first)
        self.massive = None
        fix_addresses(self)
        self._code_full()

    def set_budget(self, budget: Tensor) -> None:
        """Let each row hold `budget` [B] tokens."""
        self.budget = budget
        if self.rows is not None:
            own = [min(pair) for pair in zip(budget.tolist(), self.ends, strict=True)]
            self.rows = with_budget(self.rows, self.policy.codec, own, self.frozen)

    def freeze(self, slots: int) -> None:
        """Never again use the first exact slots for other tokens."""
        self.frozen = slots
        self.set_budget(self.budget)

    # room for the steps to come

    def tick(self) -> None:
        """Count one decode step, and make room for the next where there is none."""
        self.count_step()
        self.make_room()

    def count_step(self) -> None:
        """Count one decode step, and code a block where one is full."""
        self._room -= 1
        if self._room < 1:
            self._code_full()

    def make_room(self) -> None:
        """Extend a cache that has no slot for another step: a growing one, or one told too few tokens to come."""
        if self._room < 1:
            extend(self, lacking(self, ROOM))
            self._code_full()

    def _code_full(self) -> None:
        """Code blocks of the oldest exact tokens until no head's exact part is full."""
        while self.rows is not None and bool((exact_count(self) >= self.rows.full).any()):
            (recode if self.policy.codec.traits.recode_all else flush)(self)
        self._room = free_steps(self)

    @property
    def grows(self) -> bool:
        """Whether generated tokens get room beside the budget."""
        return self.policy.decode == "grow"

    @property
    def can_run_out(self) -> bool:
        """Whether a step may find no free slot, since it waits for a block to be coded or for more slots."""
        return self.grows or self.short or sum(self.layout.coded) > 0

    def reserve(self, new: int) -> None:
        """Have room for `new` more tokens, in a growing cache."""
        more = [max(0, held + new - end) for held, end in zip(held_by(self), self.ends, strict=True)]
        if any(more):
            extend(self, more)

    # reading

    def coded(self) -> Coded | None:
        """The coded slots, as a decode step attends to them; None where there are none."""
        return Coded(self) if sum(self.layout.coded) else None

    def past(self) -> Past | None:
        """Every slot as attention takes it, None where there are none."""
        if not self.layout.slots:
            return None
        assert self.keys is not None and self.values is not None
        keys, values = zip((self.keys, self.values), *Coded(self).read(self.keys.dtype), strict=True)
        return Past(torch.cat(keys, 2), torch.cat(values, 2), self.positions >= 0)

    def held(self) -> dict[str, int]:
        """Bytes by kind: exact, codes, scales, positions, statistics, counters, and a prompt that waits."""
        if not self.is_initialized:
            return {}
        counters = (self.length, self.budget, self.columns, *(self.rows or ()))
        kinds = bytes_by_kind((self.keys, self.values), self.codes, self.positions, self.state, counters)
        return kinds if self.prompt is None else kinds | {"waiting prompt": self.prompt.nbytes}
