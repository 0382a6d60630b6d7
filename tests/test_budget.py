"""Budget words, bytes, and the division of a total among layers."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from kvpolicy import KVPolicyError, KVPolicyTypeError, Share
from kvpolicy.text.budget import bytes_of, check_budget, format_budget, json_budget, parse_budget, waterfill


def fill(target: list[float], total: int, floor: int = 1, ceiling: int = 10**6) -> list[int]:
    row = torch.tensor([target], dtype=torch.float64)
    return waterfill(row, torch.tensor([total]), floor, torch.tensor([ceiling]))[0].tolist()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0.2", 0.2),
        ("1.0", 1.0),
        ("1", 1),
        ("2048", 2048),
        (".5", 0.5),
        ("1e-3", 0.001),
        ("512MiB", "512MiB"),
        ("20%", 0.2),
        ("100%", 1.0),
        ("12.3%", 0.123),
        (".5 %", 0.005),
        (" 2048 ", 2048),
        ("1.5 GiB", "1.5GiB"),
        ("20%:least=64", Share(0.2, least=64)),
    ],
)
def test_how_a_budget_is_written_decides_its_type(text: str, value: Any) -> None:
    budget = parse_budget(text)
    assert budget == value
    assert type(budget) is type(value)
    assert parse_budget(format_budget(budget)) == budget


WRONG = [
    *("", "0", "0.0", "1.5", "-1", "12parrots", "MiB", "0MiB", "nan", "inf", "1_0", "\u0661", "1 0", "1 0MiB"),
    *("0%", "101%", "2 0%", "%", "1e1%", "-5%"),
]


@pytest.mark.parametrize("text", WRONG)
def test_bad_budget_is_told(text: str) -> None:
    with pytest.raises(ValueError, match=r"budget must be|unit of a budget"):
        parse_budget(text)


@pytest.mark.parametrize("text", ["2k", "2K", "1.5 M"])
def test_thousands_of_tokens_have_no_unit(text: str) -> None:
    with pytest.raises(ValueError, match=r"try 512MiB, or 2048 for tokens\.$"):
        parse_budget(text)


def test_bytes() -> None:
    assert bytes_of("100KiB") == 102400
    assert bytes_of("1.5GiB") == 3 * 2**29
    assert bytes_of("0.3B1".replace("B1", "KB")) == 300
    assert bytes_of("7B") == 7
    with pytest.raises(ValueError, match=r"must be B, KB, .*, got 'mib'"):
        bytes_of("512mib")


def test_check_budget_takes_numbers_of_numpy_and_refuses_others() -> None:
    given = {numpy.int64(30): 30, numpy.uint8(30): 30, numpy.float64(0.5): 0.5, numpy.float32(0.25): 0.25}
    for budget, plain in given.items():
        assert check_budget(budget) == plain and type(check_budget(budget)) is type(plain)
    assert check_budget("0.5") == 0.5
    for wrong in (True, [1], None, numpy.bool_(True), numpy.array([30]), numpy.complex64(1)):
        with pytest.raises(TypeError, match="budget must be"):
            check_budget(wrong)
    with pytest.raises(ValueError, match="got 0 tokens"):
        check_budget(numpy.int64(0))


@given(st.integers(1, 10**18 - 1) | st.floats(0, 1, exclude_min=True))
def test_numbers_round_trip(budget: float | int) -> None:
    again = parse_budget(format_budget(budget))
    assert again == budget and type(again) is type(budget)


def test_inside_the_bounds_it_only_rounds() -> None:
    assert fill([3.5, 3.5, 3.0], 10) == [4, 3, 3]  # ties go to the lower layer
    assert fill([2.2, 2.9, 4.9], 10) == [2, 3, 5]
    assert fill([3.9999999999, 3.0, 3.0], 10) == [4, 3, 3]


def test_what_a_layer_cannot_use_goes_to_the_others_in_proportion() -> None:
    assert fill([80, 10, 10], 100, ceiling=60) == [60, 20, 20]
    assert fill([80, 15, 5], 100, ceiling=60) == [60, 30, 10]
    assert fill([100, 0, 0], 100, ceiling=60) == [60, 20, 20]  # evenly where all are 0


def test_floors_are_taken_from_the_others() -> None:
    assert fill([60, 38, 2], 100, floor=10) == [55, 35, 10]


def test_a_full_layer_stays_full_where_floating_point_has_no_fractions() -> None:
    """The token that float64 cannot hold goes to the layer that can use it, and not to the first one."""
    ceiling = 2**59
    assert fill([8.0, 1.0], ceiling + 2**58 + 1, ceiling=ceiling) == [ceiling, 2**58 + 1]


def test_more_than_can_be_used_is_split_evenly_on_top() -> None:
    assert fill([20, 5, 1], 26, ceiling=8) == [9, 9, 8]
    assert fill([20, 4, 0], 24, floor=20, ceiling=8) == [8, 8, 8]


def test_floors_win_where_ceilings_were_set_too_early() -> None:
    assert fill([15, 0, 0], 15, floor=4, ceiling=10) == [7, 4, 4]
    assert fill([12, 9, 1], 22, floor=4, ceiling=10) == [10, 8, 4]


def test_too_little_is_told() -> None:
    with pytest.raises(ValueError, match="at least 12 tokens in all, 4 for each of 3 layers, got 11"):
        fill([4, 4, 3], 11, floor=4)


@st.composite
def rows(draw: st.DrawFn) -> tuple[list[float], int, int, int]:
    layers = draw(st.integers(1, 12))
    floor = draw(st.integers(1, 5))
    total = draw(st.integers(layers * floor, layers * 40))
    weight = draw(st.lists(st.floats(0, 100), min_size=layers, max_size=layers))
    mass = sum(weight)
    target = [total * w / mass for w in weight] if mass > 1e-6 else [total / layers] * layers
    return target, total, floor, draw(st.integers(floor, 60))


@given(rows())
def test_sums_and_bounds_hold(case: tuple[list[float], int, int, int]) -> None:
    target, total, floor, ceiling = case
    got = fill(target, total, floor, ceiling)
    assert sum(got) == total
    if total < len(target) * ceiling:
        assert all(floor <= tokens <= ceiling for tokens in got)
    else:
        assert max(got) - min(got) <= 1 and min(got) >= ceiling
    if all(floor <= tokens <= ceiling for tokens in target):
        assert all(abs(tokens - wanted) < 1 + 1e-6 for tokens, wanted in zip(got, target, strict=True))


@given(rows(), rows())
def test_a_batch_is_its_rows(one: tuple[list[float], int, int, int], two: tuple[list[float], int, int, int]) -> None:
    layers = min(len(one[0]), len(two[0]))
    targets = [case[0][:layers] for case in (one, two)]
    totals = [max(int(sum(target)), layers * 5) for target in targets]
    together = waterfill(
        torch.tensor(targets, dtype=torch.float64), torch.tensor(totals), 5, torch.tensor([one[3], two[3]])
    )
    assert together[0].tolist() == fill(targets[0], totals[0], 5, one[3])
    assert together[1].tolist() == fill(targets[1], totals[1], 5, two[3])
    assert together.dtype == torch.int64


@given(st.floats(0, 1, exclude_min=True), st.integers(1, 10**18 - 1), st.integers(0, 10**6))
@example(0.2, 10, 50)
def test_a_share_is_read_as_it_is_written(fraction: float, least: int, tokens: int) -> None:
    budget = Share(fraction, least=least)
    for text in (format_budget(budget), str(json_budget(budget)), f" {fraction!r} : least = {least} "):
        assert parse_budget(text) == budget == check_budget(text)
    assert check_budget(budget) is budget and hash(parse_budget(str(budget))) == hash(budget)
    assert budget.of_prompt(tokens) == (fraction if int(tokens * fraction + 1e-9) >= least else least)
    assert budget != fraction and budget != Share(fraction, least=least + (1 if least == 1 else -1))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("2048:least=64", r"number of tokens must follow a fraction of the prompt, got 2048; try 0\.2:least=1024"),
        ("512MiB:least=64", "must follow a fraction of the prompt, got 512MiB"),
        ("0.2:least=0", "The least number of tokens of a budget must be an integer from 1, got 0"),
        ("0.2:least=-5", "must be an integer from 1, got '-5'"),
        ("0.2:least=1.5", r"must be an integer from 1, got '1\.5'"),
        ("0.2:least=1,024", "must be an integer from 1, got '1,024'"),
        ("0.2:least=5:least=6", "must be an integer from 1, got '5:least=6'"),
        ("0.2:least=1" + "0" * 18, "must be an integer from 1, got 1000000000000000000"),
        ("0.2:most=64", "The option of a budget must be least=TOKENS, got 'most=64'"),
        ("0.2:least", "must be least=TOKENS, got 'least'"),
        ("0.2:", "must be least=TOKENS, got ''"),
        ("1.5:least=64", "The budget must be a fraction"),
        (":least=64", "The budget must be a fraction"),
    ],
)
def test_other_least_numbers_are_told(text: str, message: str) -> None:
    with pytest.raises(KVPolicyError, match=message):
        parse_budget(text)


@pytest.mark.parametrize(
    ("fraction", "least", "message"),
    [
        (0.2, True, "must be an integer from 1, got True of type bool"),
        (0.2, 64.0, r"must be an integer from 1, got 64\.0 of type float"),
        (0.2, "64", "must be an integer from 1, got '64' of type str"),
        (0.2, 0, "must be an integer from 1, got 0"),
        (1, 64, "must follow a fraction of the prompt, got 1;"),
        (True, 64, "must follow a fraction of the prompt, got True"),
        ("0.2", 64, "must follow a fraction of the prompt, got '0.2'"),
        (1.5, 64, r"got the fraction 1\.5"),
        (0.0, 64, r"got the fraction 0\.0"),
    ],
)
def test_other_shares_are_told(fraction: Any, least: Any, message: str) -> None:
    with pytest.raises((KVPolicyError, KVPolicyTypeError), match=message):
        Share(fraction, least=least)
