"""Strategies and policies as plain data."""

from __future__ import annotations

import json

import pytest

from kvpolicy import KIVI, KVPolicyError, Policy
from kvpolicy.text.part_fields import part_from_dict, part_to_dict
from tests.conformance.policies import star_of_three, words

WRAPPED = "squeeze/adakv:safeguard=0.1+kvcrush:split=0.5/snapkv:window=6@512MiB"


def test_policies_pass_through_json() -> None:
    rows = [words(*row) for row in star_of_three()]
    for text in [*rows, WRAPPED, "full", "h2o+merge+quest:read=64@300"]:
        policy = Policy.parse(text)
        again = Policy.from_dict(json.loads(json.dumps(policy.to_dict())))
        assert again == policy and str(again) == str(policy)


def test_every_field_is_stated_and_a_missing_one_has_its_default() -> None:
    sides = {"key_bits": "auto", "value_bits": "auto"}
    assert part_to_dict(KIVI()) == {"kivi": {"bits": 2, **sides, "group_size": 32, "residual_length": "auto"}}
    assert part_from_dict("codec", {"kivi": {"bits": 4}}) == KIVI(bits=4)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"h2o": {}}, "A codec must be described"),
        ({"kivi": {}, "bfp": {}}, "one name with its fields"),
        ("kivi", "one name with its fields"),
        ({"kivi": {"bats": 4}}, "must be among bits, key_bits, value_bits, group_size, residual_length, got 'bats'"),
        ({"kivi": {"bits": 3}}, "KIVI.bits must be one of"),
        ({"kivi": 4}, "must be described"),
        ({"kivi": {"bits": [4]}}, r"'bits' of 'kivi' must be a number, a bool, a string or None, got \[4\]"),
        ({"csr": {"dictionary": 4}}, "'dictionary' of 'csr' must be a string, got 4"),
    ],
)
def test_what_describes_no_codec(content: object, message: str) -> None:
    with pytest.raises(KVPolicyError, match=message):
        part_from_dict("codec", content)


def test_unknown_parts_of_a_policy() -> None:
    with pytest.raises(KVPolicyError, match="by its parts and its budget, got 'chooser'"):
        Policy.from_dict({"chooser": {"h2o": {}}})
