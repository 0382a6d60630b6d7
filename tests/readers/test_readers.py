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
from kvpolicy.protocols import ModelInfo
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
def test_ties_go_to_the_earlier_position(reader: str) -> None:
    """All keys are equal, so that any choice would be as good."""
    layer = Layer(spec("full", reader), [20], new=2)
    q, k, v = draw(20, 3)
    layer.prompt(q, torch.ones_like(k), v)
    now = draw(1, 4)
    layer.step(now[0], torch.ones_like(now[1]), now[2])
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
]
PARTS = ["full", "snapkv", "tokenwise"]


@product("same,base", EXACT, PARTS, allowed=takes, sample=each_once(EXACT, PARTS))
def test_an_index_that_holds_all_reads_as_exact(same: str, base: str) -> None:
    write("lowrank")
    at = "@0.5" if base == "snapkv" else ""
    budget = [13] if at else [26]
    one, exact = (Layer(f"{BASES[base]}+{reader}:read=6{at}", budget, new=STEPS) for reader in (same, "exact"))
    for layer in (one, exact):
        layer.prompt(*draw(26, 8))
    for step in range(STEPS):
        now = draw(1, 60 + step)
        outputs = [layer.step(*now) for layer in (one, exact)]
        assert one.read is not None and exact.read is not None
        for head in range(HEADS):
            assert one.positions_read(0, head) == exact.positions_read(0, head)
        assert torch.allclose(outputs[0], outputs[1], atol=1e-6)
        for layer in (one, exact):
            layer.between()


@pytest.mark.parametrize("seed", range(2))
def test_a_score_of_quest_bounds_every_product(seed: int) -> None:
    reader = lookup("quest")[1](page=4)
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(2, 3, 7, 4, DIM, generator=generator)
    occupied = torch.rand(2, 3, 7, 4, generator=generator) < 0.6
    index = reader.alloc(2, 3, 7, DIM, torch.float32, "cpu")
    keys = torch.where(occupied[..., None], keys, torch.full_like(keys, torch.nan))
    reader.refresh(index, torch.arange(7).expand(2, 3, -1), keys, occupied)
    queries = torch.randn(2, 3, 2, DIM, generator=generator)
    score = reader.score(index, queries, lambda q: q)
    products = torch.einsum("bhgd,bhxpd->bhgxp", queries, keys).masked_fill(~occupied[:, :, None], -torch.inf)
    assert bool((score + 1e-5 >= products.amax(-1)).all())
    assert bool(score.isfinite().all())


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


@pytest.mark.parametrize("policy", ["tova+labels:read=4@0.5", "kvcrush/tova+quest@0.5", "tova+exact@0.5"])
def test_a_ranking_by_the_newest_row_is_refused(policy: str) -> None:
    with pytest.raises(ValueError, match="must see the newest token's attention to every kept token"):
        Policy.parse(policy)


@pytest.mark.parametrize(
    ("policy", "why"),
    [
        ("snapkv+tokenwise+quest@0.5", "must not evict while decoding"),
        ("snapkv+tokenwise+centroids@0.5", "must not evict while decoding"),
        ("h2o+mikv+quest", "in the order of their positions"),
        ("h2o:decode=grow+zipcache+quest@0.5", "in the order of their positions"),
    ],
)
def test_pages_out_of_order_are_refused(policy: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Policy.parse(policy)
    for name in ("quest", "centroids"):
        if name in policy:
            Policy.parse(policy.replace(name, "labels"))
            Policy.parse(policy.replace(name, f"{name}:page=1"))


def test_a_codec_that_searches_is_refused() -> None:
    with pytest.raises(ValueError, match="must not choose the slots"):
        Policy.parse("csr:key_space=unrotated:read_top_k=4+labels")


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


def test_channels_are_chosen_in_the_rows_that_begin() -> None:
    reader = lookup("labels")[1](channels=2)
    index = reader.alloc(2, 1, 3, 4, torch.float32, "cpu")
    first = torch.tensor([[[0.0, 1.0, 1.0, 3.0]]])
    later = torch.tensor([[[5.0, 4.0, 0.0, 0.0]]])
    reader.fit(index, torch.cat([first, first]), torch.tensor([True, False]))
    assert index.channels.tolist() == [[[1, 3]], [[0, 1]]]
    reader.fit(index, torch.cat([later, first]), torch.tensor([False, True]))
    assert index.channels.tolist() == [[[1, 3]], [[1, 3]]]


@pytest.mark.parametrize("value", ["0", "1.5", "0.0"])
def test_numbers_out_of_range_are_refused(value: str) -> None:
    with pytest.raises(ValueError, match=r"read must be at least 1 token or a fraction"):
        Policy.parse(f"quest:read={value}")


def test_more_channels_than_a_key_has_are_refused() -> None:
    with pytest.raises(ValueError, match="at most the head dimension of 8, got 9; try 8"):
        lookup("labels")[1](channels=9).check(ModelInfo(1, 1, DIM))


def test_sparq_reads_the_channels_in_which_the_group_is_largest() -> None:
    """Added up over the query heads, and with the share of each query head by itself."""
    reader = lookup("sparq")[1](channels=2)
    queries = torch.tensor([[[[4.0, 0.0, 1.0, 3.0], [0.0, 0.0, -3.0, 0.5]]]])

    class Noted:
        def __init__(self) -> None:
            self.channels = torch.empty(0)

        def __call__(self, queries: Tensor, channels: Tensor | None = None, /) -> Tensor:
            assert channels is not None
            self.channels = channels
            return torch.ones(1, 1, 2, 3)

        def group_mean(self, of_heads: Tensor, /) -> Tensor:
            return of_heads.mean(2)

    noted = Noted()
    score = reader.score((), queries, noted)
    assert noted.channels.tolist() == [[[0, 2]]]
    assert torch.allclose(score[0, 0, :, 0], torch.tensor([5 / 8, 3 / 3.5]) ** -0.5)
    assert reader.score((), torch.zeros(1, 1, 2, 4), noted).isfinite().all()
    with pytest.raises(ValueError, match=r"SparQ.channels must be at most the head dimension of 8, got 9; try 2"):
        lookup("sparq")[1](channels=9).check(ModelInfo(1, 1, DIM))


@pytest.mark.parametrize("seed", range(2))
def test_rocket_reads_one_bound_of_the_channels_in_which_the_group_is_largest(seed: int) -> None:
    """The largest number of a page where the summed queries are positive, else the smallest."""
    reader = RocketKV(page=4, channels=2)
    index = reader.alloc(1, 1, 3, 4, torch.float32, "cpu")
    keys = torch.randn(1, 1, 3, 4, 4, generator=torch.Generator().manual_seed(seed))
    reader.refresh(index, torch.arange(3).expand(1, 1, -1), keys, torch.ones(1, 1, 3, 4, dtype=torch.bool))
    queries = torch.tensor([[[[4.0, 0.0, 1.0, 3.0], [0.0, 0.0, -3.0, 0.5]]]])
    score = reader.score(index, queries, MeanOfHeads())
    first = keys[0, 0, :, :, 0].amax(-1)
    third = keys[0, 0, :, :, 2].amin(-1)
    want = torch.stack([(4 * first + third) * (5 / 8) ** -0.5, -3 * third * (3 / 3.5) ** -0.5])
    assert torch.allclose(score[0, 0], want, atol=1e-5)
    assert reader.score(index, torch.zeros(1, 1, 2, 4), MeanOfHeads()).isfinite().all()


class MeanOfHeads:
    """Means over the query heads of one rank, without products."""

    def __call__(self, queries: Tensor, channels: Tensor | None = None, /) -> Tensor:
        raise AssertionError("the index alone is read")

    def group_mean(self, of_heads: Tensor, /) -> Tensor:
        return of_heads.mean(2)


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


@pytest.mark.parametrize("share", [0, 1.5, -1])
def test_rocket_refuses_a_share_out_of_range(share: float) -> None:
    with pytest.raises(ValueError, match="share must be above 0 and up to 1"):
        RocketKV.split(share)


def test_rocket_refuses_more_channels_than_a_key_has() -> None:
    with pytest.raises(ValueError, match="at most the head dimension of 8, got 9; try 2"):
        RocketKV(channels=9).check(ModelInfo(1, 1, DIM))


def test_what_is_not_read_has_its_share_of_the_weight() -> None:
    """As the estimated scores divide it, whatever the exact scores are; nothing if all is read."""
    reader = lookup("sparq")[1]()
    index = reader.alloc(1, 1, 3, 2, torch.float32, "cpu")
    reader.summarize(
        index,
        torch.zeros(1, 1, 1, dtype=torch.int64),
        torch.tensor([[[[[1.0, 2.0], [3.0, 4.0], [torch.nan, 5.0]]]]]),
        torch.tensor([[[[True, True, False]]]]),
    )
    scores = torch.tensor([0.75, 0.25, 0.0]).log().expand(1, 1, 2, -1)
    normalizer = torch.tensor([[[0.0, 5.0]]])
    found = reader.estimate_rest(index, scores, torch.tensor([[[True, False, False]]]), normalizer)
    assert found.values.tolist() == [[[[2.0, 3.0]]]]
    assert torch.allclose(torch.sigmoid(found.scores[..., 0] - normalizer), torch.tensor(0.25))
    every = reader.estimate_rest(index, scores, torch.tensor([[[True, True, False]]]), normalizer)
    assert bool((every.scores == -torch.inf).all())


@pytest.mark.parametrize("base", ["full", "h2o", "h2o+compensate", "tokenwise:block_size=3:residual_length=2"])
def test_centroids_of_single_tokens_leave_nothing_out(base: str) -> None:
    """What stands for a page of one slot is this slot, so that the output is that of attention to all."""
    at, budget = ("@0.5", 13) if base.startswith("h2o") else ("", 26)
    one, every = (Layer(f"{base}{reader}{at}", [budget], new=6) for reader in ("+centroids:read=4:page=1", ""))
    for layer in (one, every):
        layer.prompt(*draw(26, 7))
    for step in range(1 if at else 6):  # what is not read has no weight for h2o, which then keeps other tokens
        outputs = [layer.step(*draw(1, 50 + step)) for layer in (one, every)]
        assert one.read is not None
        assert torch.allclose(outputs[0], outputs[1], atol=1e-5)
        for layer in (one, every):
            layer.between()


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


def test_a_page_weighs_as_much_as_its_tokens_with_their_mean_key() -> None:
    reader = lookup("centroids")[1](page=2)
    index = reader.alloc(1, 1, 2, 2, torch.float32, "cpu")
    every = torch.arange(2)[None, None]
    keys = torch.tensor([[[[[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0], [torch.nan, 0.0]]]]])
    occupied = torch.tensor([[[[True, True], [True, False]]]])
    reader.refresh(index, every, keys, occupied)
    reader.summarize(index, every, -keys, occupied)
    assert index.keys.tolist() == [[[[2.0, 3.0], [5.0, 6.0]]]]
    assert index.values.tolist() == [[[[-2.0, -3.0], [-5.0, -6.0]]]]
    found = reader.estimate_rest(
        index, torch.tensor([[[[0.5, 0.7]]]]), torch.tensor([[[False, True]]]), torch.zeros(1, 1, 1)
    )
    assert found.scores.tolist() == [[[[0.5, -torch.inf]]]]


@pytest.mark.parametrize(
    "text",
    [
        "loki:read=8:calibration=",
        "sparq:read=8",
        "centroids:read=8",
        "retrieval:recent=1:read=8:cluster=2",
        "reuse/retrieval:recent=1:estimate=false",
        "shadowkv:read=8:rank=3:page=3:joint=true",
    ],
)
def test_readers_of_a_basis_or_of_estimates_conform(text: str, tmp_path: Path) -> None:
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


def test_a_basis_of_another_model_is_refused() -> None:
    loki = lookup("loki")[1]
    with pytest.raises(ValueError, match="at most the head dimension of 8, got 9; try 2"):
        loki(channels=9).check(ModelInfo(1, 1, DIM))
    with pytest.raises(ValueError, match="The calibration 'tiny' must be"):
        loki().check(ModelInfo(1, 1, DIM))
    other = loki(calibration=str(write("lowrank")))
    other.check(ModelInfo(1, 1, DIM))
    with pytest.raises(ValueError, match="must be for a head dimension of 9, got 8"):
        other.check(ModelInfo(1, 1, 9))
    with pytest.raises(ValueError, match=r"Loki.calibration must be a folder or 'tiny', got an empty string"):
        loki(calibration="")


@pytest.mark.parametrize(
    "spec", ["quest:read=64:dense=0", "labels:read=64:dense=0", "exact:read=64", "tokenwise+quest:read=64"]
)
def test_specs_are_written_as_they_are_read(spec: str) -> None:
    assert str(Policy.parse(spec)) == spec
    assert Policy.parse(f"full+{spec}") == Policy.parse(spec)
