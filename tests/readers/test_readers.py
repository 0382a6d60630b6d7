"""Every reader chooses what its slow version chooses, and attends to that alone."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvpolicy import Policy
from kvpolicy.codecs._files import save
from kvpolicy.readers.rocket import RocketKV
from kvpolicy.registry import lookup, name_of, names
from kvpolicy.testing import check
from tests.conformance.calibration import FOLDER, write
from tests.conformance.policies import REBUILDING, spec_of
from tests.readers.bench import DIM, GROUP, HEADS, Layer, config_of, draw, slow_output
from tests.reference.readers import chosen
from tests.reference.versions import version
from tests.sampling import Allowed, Row, each_once, product

READERS = [name for name in names("reader") if name not in ("all", "reuse")]
"""`reuse` takes two layers: tests/readers/test_reuse.py."""
BASES = {
    "full": "full",
    "snapkv": "snapkv",
    "h2o": "h2o",
    "merge": "snapkv+merge",
    "regress": "snapkv+regress",
    "d2o": "h2o+d2o",
    "compensate": "h2o+compensate",
    "merged codes": "h2o+compensate+tokenwise:block_size=3:residual_length=2",
    "tokenwise": "tokenwise:block_size=3:residual_length=2",
    "kivi": "kivi:group_size=4:residual_length=3",
    "staircase": "staircase:tokens_8bit=4:tokens_4bit=4:group_size=4:residual_length=2",
}
EVICTING = ["snapkv", "h2o", "merge", "regress", "d2o", "compensate", "merged codes"]
STEPS = 14


def takes(row: Row) -> bool:
    """Whether a reader is combined with the codec of a base, which are the first two values."""
    reader, base, *_ = row
    return reader.partition(":")[0] not in REBUILDING or base not in ("merged codes", "tokenwise", "kivi", "staircase")


def is_compared(row: Row) -> bool:
    """Whether there are no near ties, which bf16 decides otherwise."""
    return takes(row) and not (BASES[row[1]].startswith("snapkv") and row[2] == "bfloat16")


def dealt(readers: Sequence[str], *axes: Sequence[Any], times: int, allowed: Allowed = takes) -> list[Row]:
    """Each reader some times, with the next values of each axis."""
    turns = [itertools.cycle(axis) for axis in axes]
    rows = [(reader, *map(next, turns)) for reader in readers for _ in range(times)]
    return [row for row in rows if allowed(row)]


DTYPES = ["float32", "bfloat16"]
CODED = ["tokenwise", "kivi", "staircase", "merged codes"]
EXACT_BASES = [base for base in BASES if base not in CODED]
IN_TURN = [dealt(READERS, bases, ["float32", *DTYPES], times=3, allowed=is_compared) for bases in (EXACT_BASES, CODED)]
"""Each reader with keys that are stored and with keys that are decoded."""


def spec(base: str, reader: str) -> str:
    budget = "@0.5" if base in EVICTING else ""
    # Pages of codes cannot be sorted again, so that readers of pages are refused where coded tokens are evicted.
    ordered = Policy.parse(spec_of(reader)).reader.traits.ordered
    grows = ":decode=grow" if base == "merged codes" and ordered else ""
    selector, _, others = BASES[base].partition("+")
    return "+".join([selector + grows, *filter(None, [others]), spec_of(reader)]) + budget


def slow_choice(layer: Layer, q: Tensor, prompt: tuple[Tensor, Tensor], lengths: list[int]) -> list[list[set[int]]]:
    """What the slow version reads, of every row and head."""
    policy = layer.policy
    name = name_of(type(policy.reader))
    config = config_of(policy)
    method = version("reader", name)
    found: list[list[set[int]]] = []
    for row in range(q.shape[0]):
        found.append([])
        for head in range(HEADS):
            mine = slice(head * GROUP, (head + 1) * GROUP)
            channels: list[int] = []
            if hasattr(method, "channels"):
                start = prompt[1].shape[2] - lengths[row]
                queries = prompt[0][row, mine, start:].double().tolist()
                channels = method.channels(config, queries, prompt[1][row, head, start:].double().tolist())
            held = layer.store.tensors.positions[row, head]
            found[-1].append(
                chosen(
                    name,
                    layer.config(row, head),
                    layer.parts(row, head),
                    q[row, mine, 0].double().tolist(),
                    length=int(layer.store.tensors.length[row]),
                    first=int(held[held >= 0].min()),
                    scale=layer.transform.scale,
                    group_size=policy.codec.traits.group_size,
                    channels=channels,
                )
            )
    return found


@product("reader,base,dtype", READERS, [*BASES], DTYPES, allowed=is_compared, sample=[*IN_TURN[0], *IN_TURN[1]])
def test_chooses_what_the_slow_version_chooses(reader: str, base: str, dtype: str) -> None:
    n = 26
    budget = n // 2 if base in EVICTING else n
    layer = Layer(spec(base, reader), [budget], new=STEPS)
    q, k, v = (t.to(getattr(torch, dtype)) for t in draw(n, 1))
    layer.prompt(q, k, v)
    apart = 0
    for step in range(STEPS):
        now = tuple(t.to(getattr(torch, dtype)) for t in draw(1, 100 + step))
        out = layer.step(*now)
        want = slow_choice(layer, now[0], (q, k), [n])
        got = [[layer.positions_read(0, head) for head in range(HEADS)]]
        if dtype == "float32":
            assert got == want
            assert torch.allclose(out.double(), slow_output(layer, now[0], want), atol=1e-5)
        apart += sum(len(a ^ b) for a, b in zip(got[0], want[0], strict=True))
        layer.between()
    assert apart <= STEPS  # in bf16, sums differ by more than some scores


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("equal", ["keys", "queries"])
def test_ties_go_to_the_earlier_position(reader: str, equal: str) -> None:
    """All keys are equal, or all queries zero, so that any choice would be as good."""
    layer = Layer(spec("full", reader), [20], new=2)
    for size in (20, 1):
        q, k, v = draw(size, size)
        now = (q, torch.ones_like(k), v) if equal == "keys" else (torch.zeros_like(q), k, v)
        (layer.prompt if size > 1 else layer.step)(*now)
    read = sorted(layer.positions_read(0, 0))
    assert read[-1] == 20
    assert read[:-1] == [*range(len(read) - 1)]


@pytest.mark.parametrize("reader", READERS)
def test_softcap_and_sinks_are_those_of_the_model(reader: str) -> None:
    layer = Layer(spec("full", reader), [20], new=2, softcap=2.0, sinks=torch.linspace(-1, 1, HEADS * GROUP))
    layer.prompt(*draw(20, 5))
    now = draw(1, 6)
    out = layer.step(*now)
    want = slow_output(layer, now[0], [[layer.positions_read(0, head) for head in range(HEADS)]])
    assert torch.allclose(out.double(), want, atol=1e-5)


ALL = ([name for name in READERS if name not in REBUILDING], ["full", "tokenwise", "snapkv", "merge"], ["99", "1.0"])


@product("reader,base,read", *ALL, sample=dealt(*ALL, times=1))
def test_reading_all_is_no_reader(reader: str, base: str, read: str) -> None:
    """Bit for bit: it is the same code."""
    budget = 13 if base in EVICTING else 26
    at = "@0.5" if base in EVICTING else ""
    dense = "" if reader == "exact" else ":dense=0"
    one = Layer(f"{BASES[base]}+{reader}:read={read}{dense}{at}", [budget], new=6)
    other = Layer(f"{BASES[base]}{at}", [budget], new=6)
    assert torch.equal(one.prompt(*draw(26, 7)), other.prompt(*draw(26, 7)))
    for step in range(6):
        assert torch.equal(one.step(*draw(1, 50 + step)), other.step(*draw(1, 50 + step)))
        one.between()
        other.between()
    assert one.store.contents.link.moved == other.store.contents.link.moved


EXACT = [
    "quest:page=1:dense=0",
    f"labels:channels={DIM}:dense=0",
    f"loki:channels={DIM}:calibration={FOLDER / 'lowrank'}",
    f"sparq:channels={DIM}:correct=false",
    f"shadowkv:page=1:rank={DIM}:sinks=0:recent=1:rebuild=4",
    "centroids:page=1:estimate=false",
    f"rocket:page=1:channels={DIM}",
    "retrieval:recent=1:cluster=1:estimate=false:sinks=0:rebuild=1",
]
PARTS = ["full", "snapkv", "tokenwise"]


@product("same,base", EXACT, PARTS, allowed=takes, sample=each_once(EXACT, PARTS))
def test_an_index_that_holds_all_reads_as_exact(same: str, base: str) -> None:
    """If clusters are found again after each step: a center is the key then."""
    write("lowrank")
    at = "@0.5" if base == "snapkv" else ""
    budget = [13] if at else [26]
    one, exact = (Layer(f"{BASES[base]}+{reader}:read=6{at}", budget, new=STEPS) for reader in (same, "exact"))
    for layer in (one, exact):
        layer.prompt(*draw(26, 8))
    for step in range(STEPS):
        q, k, v = draw(1, 60 + step)
        # Alike in a group: what the newest token weighs, which has no center yet, then changes no order.
        q = q[:, ::GROUP].repeat_interleave(GROUP, 1)
        outputs = [layer.step(q, k, v) for layer in (one, exact)]
        assert one.read is not None and exact.read is not None
        for head in range(HEADS):
            assert one.positions_read(0, head) == exact.positions_read(0, head)
        assert torch.allclose(outputs[0], outputs[1], atol=1e-6)
        for layer in (one, exact):
            layer.between()


PADDED = (READERS, ["full", "snapkv", "tokenwise", "kivi"], ["8", "0.3"])


@product("reader,base,read", *PADDED, allowed=takes, sample=dealt(*PADDED, times=3))
def test_a_padded_row_reads_what_it_reads_alone(reader: str, base: str, read: str) -> None:
    words = spec_of(reader).replace(":read=8", f":read={read}").replace(":read=6", f":read={read}")
    at = "@0.5" if base == "snapkv" else ""
    lengths = [30, 21]
    budgets = [length // 2 for length in lengths] if base == "snapkv" else lengths
    text = f"{BASES[base]}+{words}{at}"
    both = Layer(text, budgets, new=STEPS)
    q, k, v = draw(30, 9, batch=2)
    valid = torch.arange(30) >= 30 - torch.tensor(lengths)[:, None]
    k = k.masked_fill(~valid[:, None, :, None], torch.nan)
    both.prompt(q, k.nan_to_num(7.0), v, valid)
    alone = Layer(text, budgets[1:], new=STEPS)
    alone.prompt(*(t[1:, :, 9:] for t in (q, k, v)))
    for step in range(STEPS):
        now = draw(1, 70 + step, batch=2)
        outs = both.step(*now), alone.step(*(t[1:] for t in now))
        assert torch.allclose(outs[0][1], outs[1][0], atol=1e-5)
        for head in range(HEADS):
            assert both.positions_read(1, head) == alone.positions_read(0, head)
        both.between()
        alone.between()


@pytest.mark.parametrize("heads", [slice(0, 1), slice(1, 3), slice(None)])
def test_a_shard_has_the_salience_of_its_heads(heads: slice, tmp_path: Path) -> None:
    salience = torch.rand(3, DIM, generator=torch.Generator().manual_seed(0))
    save(tmp_path, "channels", {"model": None, "head_dim": DIM}, {"salience.0": salience})
    reader = lookup("labels")[1](calibration=str(tmp_path))
    assert torch.equal(reader.load_salience(0, heads), salience[heads])


@pytest.mark.parametrize("heads", [slice(0, 1), slice(1, 3), slice(None)])
def test_a_shard_has_the_basis_of_its_heads(heads: slice) -> None:
    reader = lookup("loki")[1](channels=5)
    basis = reader.load_basis(1, "cpu", heads)
    assert torch.equal(basis, reader.load_basis(1, "cpu")[heads])
    assert torch.allclose(basis.mT @ basis, torch.eye(5).expand(len(basis), -1, -1), atol=1e-5)


def test_coordinates_of_empty_slots_are_zero() -> None:
    reader = lookup("loki")[1](channels=2)
    index = reader.alloc(1, 1, 2, 4, torch.float32, "cpu")
    keys = torch.tensor([[[[[torch.nan, 1.0]], [[2.0, 3.0]]]]])
    reader.refresh(index, torch.arange(2)[None, None], keys, torch.tensor([[[[False], [True]]]]))
    assert index.coordinates.tolist() == [[[[0.0, 0.0], [2.0, 3.0]]]]


def test_a_quarter_of_the_coordinates_are_held() -> None:
    widths = [
        lookup("loki")[1]().alloc(1, 1, 3, dim, torch.float32, "meta").coordinates.shape[-1] for dim in (2, 8, 99)
    ]
    assert widths == [1, 2, 24]


@pytest.mark.parametrize(
    ("read", "slots", "page", "count"),
    [
        (0.07, 100, 1, 7),
        (0.05, 1000, 4, 52),
        (1, 100, 16, 16),
        (64, 1000, 16, 64),
        (65, 1000, 16, 80),
        (99, 100, 16, 100),
        (1.0, 30, 4, 30),
        (0.001, 10, 4, 4),
    ],
)
def test_whole_pages_are_read(read: float, slots: int, page: int, count: int) -> None:
    """Rounded up, but not by the rounding of a fraction, and at most to all slots."""
    assert lookup("quest")[1](read=read, page=page).count(slots) == count


def test_labels_of_empty_slots_are_zero() -> None:
    """Whatever stands there: a product with a number that is none would be none."""
    reader = lookup("labels")[1](channels=2)
    index = reader.alloc(1, 1, 3, 4, torch.float32, "cpu")
    occupied = torch.tensor([[[[True], [False], [True]]]])
    keys = torch.where(occupied[..., None], torch.ones(4), torch.full((4,), torch.nan))
    reader.refresh(index, torch.arange(3)[None, None], keys, occupied)
    assert index.labels.tolist() == [[[[1.0, 1.0], [0.0, 0.0], [1.0, 1.0]]]]


def test_pages_are_long_from_4096_slots_on() -> None:
    for name in ("quest", "centroids"):
        assert [lookup(name)[1]().page_size(slots) for slots in (4095, 4096)] == [4, 16]


@pytest.mark.parametrize(
    ("read", "slots", "page", "channels"),
    [(256, 512, 1, 8), (256, 1024, 2, 8), (256, 4096, 3, 3), (256, 2**17, 16, 1), (0.05, 1000, 4, 3), (0.6, 9, 1, 8)],
)
def test_rocket_divides_a_reduction_between_tokens_and_channels(
    read: float, slots: int, page: int, channels: int
) -> None:
    """Scores cost as much as the tokens that are read, as far as whole pages and channels allow it."""
    reader = RocketKV(read=read)
    assert reader.page_size(slots) == page
    assert reader.channels_read(-(-slots // page), DIM) == channels


@pytest.mark.parametrize("share", [1.0, 0.5, 0.05, 0.0025, 0.0001])
def test_rocket_splits_a_share_between_its_stages(share: float) -> None:
    """The numbers of the authors' code for a prompt of 2 ** 20 tokens, without new ones."""
    n = 2**20
    ratio = 1 / share
    capacity = n / ratio ** min(0.2 + math.log2(ratio) * 0.06, 0.8)
    budget, read = RocketKV.split(share)
    assert budget == pytest.approx(capacity / n)
    assert read * budget * n == pytest.approx(share * n / 2)


@pytest.mark.parametrize(
    ("reader", "without"), [("sparq", "correct"), ("centroids", "estimate"), ("retrieval:recent=1", "estimate")]
)
def test_estimates_bring_the_output_closer_to_attention_to_all(reader: str, without: str) -> None:
    """Where attention is spread over many tokens: to less than half of the error."""
    errors: list[float] = []
    for text in (f"full+{reader}:read=8", f"full+{reader}:read=8:{without}=false"):
        layer = Layer(text, [60], new=20)
        every = Layer("full", [60], new=20)
        error = 0.0
        for each in (layer, every):
            each.prompt(*draw(60, 40, sharp=0.5))
        for step in range(20):
            outs = [each.step(*draw(1, 300 + step, sharp=0.5)) for each in (layer, every)]
            error += float((outs[0] - outs[1]).square().sum())
        errors.append(error)
    assert errors[0] < errors[1] / 2


@pytest.mark.parametrize(
    "text",
    [
        "loki:read=8:calibration=",
        "reuse/retrieval:recent=1:estimate=false",
        "shadowkv:read=8:rank=3:page=3:joint=true",
    ],
)
def test_readers_of_a_basis_or_of_others_conform(text: str, tmp_path: Path) -> None:
    """The others do in tests/test_testing.py."""
    if text.endswith("calibration="):
        tensors: dict[str, Tensor] = {}
        for layer in range(3):
            for part in ("keys.post", "values"):
                tensors[f"{part}.mean.{layer}"] = torch.zeros(1, 16)
                basis = torch.randn(1, 16, 16, generator=torch.Generator().manual_seed(layer))
                tensors[f"{part}.basis.{layer}"] = torch.linalg.qr(basis).Q.half()
        save(tmp_path, "lowrank", {"model": None, "head_dim": 16}, tensors)
        text += str(tmp_path)
    check(Policy.parse(text).reader)
