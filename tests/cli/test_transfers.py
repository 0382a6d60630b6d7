"""`--link` and `--bandwidth` of `kvpolicy plan` and `kvpolicy explain`: times from bytes and rates."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kvpolicy
from kvpolicy import KVPolicyError
from kvpolicy.cli.layer_table import parse_rate, transfer_facts, transfer_text
from tests.cli.conftest import Facts, Run

POLICY = "full+quest:read=256:host=true"
SIZES: dict[str, Any] = {"prompt": 8192, "new": 64, "dtype": torch.bfloat16}
LINE = "llama-3.1-8b --prompt 8192 --new 64 --link 25GB/s"


def test_json_has_both_places_and_the_times(facts: Facts) -> None:
    found = facts(f"plan {LINE} --bandwidth 2TB/s".replace("8b", f"8b {POLICY}"))
    plan = kvpolicy.plan("llama-3.1-8b", POLICY, **SIZES, backend="deepspeed")
    assert plan.weights is not None and plan.loaded > plan.stored > 0
    assert found["places"] == {"device": plan.device_nbytes, "host": plan.host_nbytes}
    assert (found["moved"]["loaded"], found["moved"]["stored"]) == (plan.loaded, plan.stored)
    link = found["link"]
    assert link["seconds"] == pytest.approx((plan.loaded + plan.stored) / 25e9)
    assert link["read"] == plan.weights.nbytes + plan.moved
    assert link["read_seconds"] == pytest.approx(link["read"] / 2e12)


def test_text_of_both_commands(run: Run) -> None:
    plan = kvpolicy.plan("llama-3.1-8b", POLICY, **SIZES)
    took = f"take {1000 * (plan.loaded + plan.stored) / 25e9:.3g} ms."
    text = " ".join(run(f"plan {LINE} --bandwidth 2TB/s".replace("8b", f"8b {POLICY}")).split())
    assert took in text and "no longer than reading all weights and the cache" in text
    assert "cache on the device" in text and "copied per step, from host memory" in text
    text = " ".join(run(f"explain {POLICY} {LINE} --bandwidth 2TB/s").split())
    assert took in text and "Keys and values of layers 2-31 lie in host memory" in text
    assert "longer than reading the cache" in text
    text = run(f"plan llama-3.1-8b {POLICY} --prompt 8192")
    assert "copied per step, to host memory" in text and "They do not overlap" not in " ".join(text.split())


def test_slow_and_fast_links() -> None:
    plan = kvpolicy.plan("llama-3.1-8b", POLICY, **SIZES)
    for link, more in (("1MB/s", "That is longer than"), ("900TB/s", "That is no longer than")):
        facts = transfer_facts(plan, link, "1TB/s", weights=16 * 10**9)
        assert facts is not None
        assert more in transfer_text(facts)
        assert "That is no longer than" in transfer_text(facts | {"read_seconds": facts["seconds"]})
    assert transfer_facts(plan, None, None) is None
    alone = transfer_facts(plan, "25GB/s", None)
    assert alone is not None and alone["read_seconds"] is None and "That is" not in transfer_text(alone)


@pytest.mark.parametrize("text", ["25", "25GB", "GB/s", "0GB/s", "25GB/m", "fast/s", ""])
def test_rates_are_refused(text: str) -> None:
    with pytest.raises(KVPolicyError, match="--link must be bytes per second with a unit, got"):
        parse_rate("--link", text)


@pytest.mark.parametrize(
    ("policy", "link", "bandwidth", "message"),
    [
        ("full", "25GB/s", None, "--link must be given for a policy with keys and values in host memory, got full"),
        (POLICY, None, "1TB/s", "--bandwidth must be given together with --link, got '1TB/s' alone"),
        (POLICY, "25GB/s", "1TB", "--bandwidth must be bytes per second with a unit, got '1TB'"),
    ],
)
def test_what_says_nothing_is_refused(policy: str, link: str | None, bandwidth: str | None, message: str) -> None:
    with pytest.raises(KVPolicyError, match=message):
        transfer_facts(kvpolicy.plan("llama-3.1-8b", policy, **SIZES), link, bandwidth)
