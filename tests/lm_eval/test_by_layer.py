"""Policies by layer under lm-eval: a file is a policy like others, and another tuning is another one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lm_eval.utils import simple_parse_args_string

import kvpolicy
from kvpolicy.planning.curves import save_layers
from tests.lm_eval.helpers import instances

TEXT = "tiger=4821 wolf=1937 lion=1111 ?tiger="


def test_a_file_is_a_policy(make: Any, tmp_path: Path) -> None:
    save_layers(tmp_path / "plan.json", ["snapkv@0.5", "h2o+tokenwise@0.25"] * 4)
    arguments = simple_parse_args_string(f"policy=tuned:file={tmp_path}/plan.json@0.5,budget=0.9")
    lm = make(**arguments)
    policy = kvpolicy.Policy.by_layer(["snapkv@0.5", "h2o+tokenwise@0.25"] * 4, budget=0.9)
    other = make(policy)
    assert not lm.is_full and lm.policy.budget == 0.9
    for kind, given in [
        ("loglikelihood", (TEXT, "4821")),
        ("generate_until", (TEXT, {"until": ["\n"], "max_gen_toks": 4})),
        ("loglikelihood_rolling", (TEXT,)),
    ]:
        answer = getattr(lm, kind)(instances(kind, [given]))
        assert answer == getattr(other, kind)(instances(kind, [given]))


def test_another_tuning_in_the_same_file_has_other_answers(make: Any, tmp_path: Path) -> None:
    """A request cache of what the file held before is not used."""
    spec = f"tuned:file={tmp_path}/plan.json@0.9"
    save_layers(tmp_path / "plan.json", ["snapkv@0.5"] * 8)
    before = make(spec).fingerprint
    assert make(spec).fingerprint == before
    save_layers(tmp_path / "plan.json", ["snapkv@0.5"] * 7 + ["h2o@0.5"])
    assert make(spec).fingerprint != before
