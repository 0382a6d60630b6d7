"""`kvpolicy plan`: its numbers are those of `kvpolicy.plan`; its text and tables, transfers, and error messages."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DeepseekV3Config

import kvpolicy
from kvpolicy import KVPolicyError, Policy
from kvpolicy.cli.layer_table import layer_facts, layer_table, parse_rate, transfer_facts, transfer_text
from kvpolicy.hf.embedded import config_of
from kvpolicy.text.tables import MAX_LINES, text_layer_table
from tests.cli.conftest import Facts, Run

POLICY = "squeeze+kvcrush/h2o+kivi:bits=4@0.2"

NONE = "No row fits in {} GiB with a headroom of 1 GiB"


@pytest.mark.parametrize(("name", "tp"), [("llama-2-70b", 4), ("mixtral-8x7b", 2), ("tiny", 4), ("gpt-oss-20b", 1)])
def test_json_is_the_plan(name: str, tp: int, facts: Facts) -> None:
    line = f"plan {name} {POLICY} --batch 2 --prompt 2k --new 64 --chunk 512 --tp {tp} --backend hf --memory 40GiB"
    found = facts(line)
    sizes: dict[str, Any] = {"batch": 2, "prompt": 2048, "new": 64, "tp": tp, "chunk": 512}
    plan = kvpolicy.plan(config_of(name), POLICY, **sizes, dtype=torch.bfloat16, backend="hf")
    assert plan.weights is not None
    assert found["cache"] == plan.by_kind() | {"total": plan.nbytes}
    assert found["full_cache"] == plan.full_nbytes
    assert found["weights"]["replicated"] + found["weights"]["sharded"] == found["weights"]["total"]
    assert found["weights"]["total"] == plan.weights.nbytes
    most = {"policy": plan.largest_batch(39 * 2**30), "full": plan.full_largest_batch(39 * 2**30)}
    assert found["largest_batch"] == most
    assert found["peak"]["prefill"] == {"policy": plan.prefill_nbytes, "full": plan.full_prefill_nbytes}
    assert found["activations"] == plan.activation_nbytes
    assert found | sizes == found
    assert (found["memory"], found["policy"]) == (40 * 2**30, POLICY)


def test_the_text(run: Run) -> None:
    lines = run("plan llama-3-70b snapkv@0.2 --tp 8").splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0] == "model   llama-3-70b in bfloat16, on each of 8 ranks (deepspeed)"
    assert lines[5].split() == ["0-79", "819", "819", "0", "416", "KiB", "0.162"]
    cells = {line[:25].strip(): line[25:].split() for line in lines[7:-3]}
    assert cells["weights, replicated"] == ["1.96", "GiB"]
    assert cells["weights"] == ["18.1", "GiB"] * 2
    assert lines[7].split() == ["policy", "full", "cache"] and cells["cache, fraction of full"] == ["0.162", "1.000"]
    assert cells["cache"] == ["32.5", "MiB", "200", "MiB"]
    plan = kvpolicy.plan("llama-3-70b", "snapkv@0.2", prompt=4096, new=1024, tp=8, backend="deepspeed")
    peaks = (plan.prefill_nbytes, plan.full_prefill_nbytes)
    assert cells["peak while prefilling"] == [word for peak in peaks for word in (f"{peak / 2**30:.1f}", "GiB")]
    rows = (plan.largest_batch(79 * 2**30), plan.full_largest_batch(79 * 2**30))
    assert cells["largest batch in 80 GiB"] == [word for row in rows for word in (f"{row:,}", "rows")]


@pytest.mark.parametrize(
    "line",
    [
        "--dtype bf16 --memory 80",
        "--dtype torch.bfloat16 --memory 80gib",
        "--dtype BFloat16 --memory 80gib --prompt 4k --new 1k",
        "--memory 81920MiB --prompt 4,096 --new 1_024",
    ],
)
def test_other_ways_to_write_the_same(line: str, run: Run) -> None:
    assert run(f"plan llama-3-70b snapkv@20% {line}") == run("plan llama-3-70b snapkv@0.2 --prompt 4096")


def test_weights_that_do_not_fit(run: Run) -> None:
    text = " ".join(run("plan llama-3-70b").split())
    assert f"{NONE.format(80)}: the weights alone take 131 GiB; use more ranks (--tp) or more memory." in text


def test_a_prompt_that_does_not_fit_while_it_is_prefilled(run: Run, facts: Facts) -> None:
    """A long prompt on a card of 24 GiB, whose compressed cache would fit."""
    line = "plan llama-3.1-8b snapkv@20% --prompt 128k --new 0 --memory 24 --dtype bf16"
    found = facts(line)
    assert found["weights"]["total"] + found["cache"]["total"] < 24 * 2**30 < found["peak"]["prefill"]["policy"]
    assert found["largest_batch"]["policy"] == 0
    text = " ".join(run(line).split())
    # A tile of 16,384 has a peak of 23.7 GiB, of which the context of the device leaves too little.
    assert f"{NONE.format(24)} while its prompt is prefilled; with --tile 1024," in text
    tiled = facts(f"{line} --tile 1024")
    assert tiled["largest_batch"]["policy"] == 1 and tiled["peak"]["prefill"]["policy"] <= 23 * 2**30
    text = " ".join(run(f"{line} --headroom 0").split())
    assert "No row fits in 24 GiB while its prompt is prefilled; with --tile 16384, the peak is 23.7 GiB." in text
    text = " ".join(run(f"{line} --memory 22".replace("--memory 24", "")).split())
    assert "with --chunk 16384, the peak is 20.1 GiB. Chunks may keep other tokens." in text
    chunked = facts(f"{line} --chunk 16k")
    assert chunked["largest_batch"]["policy"] == 1 and chunked["peak"]["prefill"]["policy"] < 24 * 2**30


def test_headroom_is_part_of_the_sum(run: Run, facts: Facts) -> None:
    line = "plan llama-3.1-8b snapkv@0.2 --prompt 4096 --memory 40"
    found = facts(line)
    assert found["headroom"] == 2**30 and found["memory"] == 40 * 2**30
    less = facts("plan llama-3.1-8b snapkv@0.2 --prompt 4096 --memory 39 --headroom 0GiB")
    assert less["headroom"] == 0 and found["largest_batch"] == less["largest_batch"] and found["tune"] == less["tune"]
    assert re.search(r"^headroom +2 GiB +2 GiB$", run(f"{line} --headroom 2GiB"), re.MULTILINE)


def test_a_cache_that_does_not_fit(run: Run) -> None:
    text = " ".join(run("plan llama-3.1-8b full --prompt 128k --memory 24").split())
    assert f"{NONE.format(24)}: the weights take 15 GiB, and the cache of a row 16.3 GiB;" in text
    text = " ".join(run("plan llama-3.1-8b kvzip --prompt 64k --memory 24").split())
    assert f"{NONE.format(24)} while its prompt is prefilled, in any tiles or chunks; use a shorter prompt" in text


def test_defaults(run: Run) -> None:
    lines = run("plan").splitlines()
    assert lines[:2] == ["model   tiny in bfloat16, on one rank", "policy  squeeze+kvcrush@0.2"]
    assert any(line.startswith("Layers are shown with equal budgets") for line in lines)


def test_the_middle_of_a_long_table_is_left_out(run: Run, facts: Facts) -> None:
    lines = run("plan llama-2-70b pyramid+window@0.2").splitlines()
    assert [line.split()[0] for line in lines[5:22]] == [*map(str, range(8)), "64", *map(str, range(72, 80))]
    assert "64 more" in lines
    whole = facts("plan llama-2-70b pyramid+window@0.2")
    assert len(whole["layers"]) == 80
    assert sum(layer["bytes"]["total"] for layer in whole["layers"]) == whole["cache"]["total"]


def test_unmanaged_layers_are_in_the_table(tmp_path: Path, run: Run) -> None:
    from transformers import Gemma2Config

    Gemma2Config(num_hidden_layers=4, sliding_window=64).save_pretrained(tmp_path)
    text = run(f"plan {tmp_path} snapkv@0.2")
    lines = [line.split() for line in text.splitlines() if line.startswith(("0, 2", "1, 3"))]
    assert [line[2] for line in lines] == ["unmanaged", "819"]
    assert lines[0][-1] == "KiB" and lines[1][-1] == "0.161"  # an unmanaged layer has no ratio


def test_calibrated_tensors_are_counted(run: Run) -> None:
    assert "calibrated tensors" in run("plan tiny csr")


def test_a_folder_and_a_file(tmp_path: Path, run: Run) -> None:
    config_of("mixtral-8x7b").save_pretrained(tmp_path)
    shipped, *stored = (
        run(f"plan {model} full --tp 2").partition("\npolicy ")[2]  # without the model, which may be wrapped
        for model in ("mixtral-8x7b", tmp_path, tmp_path / "config.json")
    )
    assert shipped and stored == [shipped, shipped]


CONFIGS = {
    "gpt2": '{"model_type": "gpt2"}',
    "vit": '{"model_type": "vit"}',
    "odd": '{"model_type": "llama", "hidden_size": 64, "num_attention_heads": 6}',
    "bad": "{",
    "heads": '{"model_type": "llama", "num_attention_heads": 0}',
    "groups": '{"model_type": "llama", "num_key_value_heads": 0}',
    "act": '{"model_type": "llama", "hidden_act": "nope"}',
}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("llama-3-70b nonsense", "got 'nonsense'"),
        *(
            (
                f"llama-3-70b full --memory {text}",
                f"--memory must be a number of bytes with a unit, got '{text}'; try 80GiB or 80GB.",
            )
            for text in ("80000000000", "much", "80XB", "-1", "0", "0GB")
        ),
        ("llama-3-70b full --headroom much", "--headroom must be a number of bytes with a unit, got 'much'; try 1GiB."),
        ("llama-3-70b full --memory 1 --headroom 1", "--headroom must be less than --memory, got 1 of 1; try 1GiB."),
        ("llama-3-70b full --dtype nonsense", "of bfloat16, float16, float32, float64, got 'nonsense'; try bfloat16."),
        ("llama-3.1-8", "did you mean 'llama-3.1-8b'?"),
        ("snapkv@0.2", "MODEL must be a model, got the policy 'snapkv@0.2'; try kvpolicy plan MODEL snapkv@0.2."),
        ("llama-3-70b full --backend nccl", "deepspeed or hf, got 'nccl'"),
        ("llama-3-70b full --backend=", "deepspeed or hf, got ''"),
        ("llama-3-70b full --backend hf --tp 16", "the 8 KV heads with backend='hf', got 16; try backend='deepspeed'"),
        ("llama-3-70b csr", "made for another model"),
        ("FOLDER full", "a config.json or a name on the Hub, got"),
        ("FOLDER/gpt2.json full --tp 2", "got gpt2; no other backend"),
        ("FOLDER/gpt2.json full --tp 2 --backend hf", "got none for gpt2; deepspeed cannot shard it either"),
        ("FOLDER/vit.json full", "for its weights to be counted, got vit"),
        ("FOLDER/odd.json full", "not a multiple"),
        ("FOLDER/bad.json full", "not a valid JSON"),
        ("FOLDER/heads.json full", "a config.json or a name on the Hub, got"),
        ("FOLDER/groups.json full", "which transformers makes a model, got one of llama with an error (ZeroDivision"),
        ("FOLDER/act.json full", "one of llama with an error (KeyError: 'nope'); try the config.json of the model."),
    ],
)
def test_error_messages(line: str, message: str, tmp_path: Path, run: Run) -> None:
    for name, config in CONFIGS.items():
        (tmp_path / f"{name}.json").write_text(config)
    assert message in run(f"plan {line.replace('FOLDER', str(tmp_path))}", 2)


@pytest.mark.parametrize(("backend", "name"), [("deepspeed", "llama-2-70b"), ("hf", "llama-2-70b"), ("hf", "phi-4")])
def test_a_full_cache_on_several_ranks_is_the_whole_of_itself(backend: str, name: str, run: Run) -> None:
    """Also where the plan of transformers divides no heads, as that of phi-4."""
    lines = run(f"plan {name} full --tp 2 --backend {backend}").splitlines()
    row, total = (line.split() for line in lines if line.startswith(("0-", "cache, fraction of full")))
    assert row[-1] == total[-2] and 1 < float(row[-1]) < 1.02  # with its positions


@pytest.mark.parametrize(
    ("line", "command"),
    [
        ("--prompt 4096 --memory 49", "kvpolicy tune"),
        ("--prompt 127000 --memory 49", "kvpolicy tune --tile 16384"),
        ("--prompt 127000 --tile 4096 --memory 24", ""),
        ("--prompt 4096 --memory 48 --tp 2", ""),
    ],
)
def test_tune_is_recommended_where_it_fits(line: str, command: str, run: Run, facts: Facts) -> None:
    text = " ".join(run(f"plan llama-3.1-8b snapkv@0.2 {line}").split())
    assert f"{command} finds a policy for each layer" in text or not command
    assert ("kvpolicy tune" in text) == bool(command)
    assert facts(f"plan llama-3.1-8b snapkv@0.2 {line}")["tune"] == command


def test_prompts_that_wait_in_codes(run: Run, facts: Facts) -> None:
    line = "plan llama-3.1-8b kvzip+tokenwise:bits=4@0.2 --prompt 64k --tile 4096"
    plain, coded = (facts(line + more) for more in ("", " --hold-codes"))
    assert coded["hold_codes"] and not plain["hold_codes"]
    assert coded["peak"]["prefill"]["policy"] < plain["peak"]["prefill"]["policy"] - 4 * 2**30
    assert "waiting in codes" in run(f"{line} --hold-codes")
    assert "for hold='codes', got" in run("plan tiny kvzip@0.2 --hold-codes", 2)


def test_tune_is_not_recommended_for_latent_attention(tmp_path: Path, facts: Facts) -> None:
    config = DeepseekV3Config(num_hidden_layers=2, hidden_size=64, num_attention_heads=4, num_key_value_heads=4)
    config.save_pretrained(tmp_path)
    assert facts(f"plan {tmp_path} window@0.2 --prompt 256 --memory 900")["tune"] == ""


HOSTED = "full+quest:read=256:host=true"
SIZES: dict[str, Any] = {"prompt": 8192, "new": 64, "dtype": torch.bfloat16}
LINE = "llama-3.1-8b --prompt 8192 --new 64 --link 25GB/s"


def test_json_has_both_places_and_the_times(facts: Facts) -> None:
    found = facts(f"plan {LINE} --bandwidth 2TB/s".replace("8b", f"8b {HOSTED}"))
    plan = kvpolicy.plan("llama-3.1-8b", HOSTED, **SIZES, backend="deepspeed")
    assert plan.weights is not None and plan.loaded > plan.stored > 0
    assert found["places"] == {"device": plan.device_nbytes, "host": plan.host_nbytes}
    assert (found["moved"]["loaded"], found["moved"]["stored"]) == (plan.loaded, plan.stored)
    link = found["link"]
    assert link["seconds"] == pytest.approx((plan.loaded + plan.stored) / 25e9)
    assert link["read"] == plan.weights.nbytes + plan.moved
    assert link["read_seconds"] == pytest.approx(link["read"] / 2e12)


def test_text_of_both_commands(run: Run) -> None:
    plan = kvpolicy.plan("llama-3.1-8b", HOSTED, **SIZES)
    took = f"take {1000 * (plan.loaded + plan.stored) / 25e9:.3g} ms."
    text = " ".join(run(f"plan {LINE} --bandwidth 2TB/s".replace("8b", f"8b {HOSTED}")).split())
    assert took in text and "no longer than reading all weights and the cache" in text
    assert "cache on the device" in text and "copied per step, from host memory" in text
    text = " ".join(run(f"explain {HOSTED} {LINE} --bandwidth 2TB/s").split())
    assert took in text and "Keys and values of layers 2-31 lie in host memory" in text
    assert "longer than reading the cache" in text
    text = run(f"plan llama-3.1-8b {HOSTED} --prompt 8192")
    assert "copied per step, to host memory" in text and "They do not overlap" not in " ".join(text.split())


def test_slow_and_fast_links() -> None:
    plan = kvpolicy.plan("llama-3.1-8b", HOSTED, **SIZES)
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
        (HOSTED, None, "1TB/s", "--bandwidth must be given together with --link, got '1TB/s' alone"),
        (HOSTED, "25GB/s", "1TB", "--bandwidth must be bytes per second with a unit, got '1TB'"),
    ],
)
def test_what_says_nothing_is_refused(policy: str, link: str | None, bandwidth: str | None, message: str) -> None:
    with pytest.raises(KVPolicyError, match=message):
        transfer_facts(kvpolicy.plan("llama-3.1-8b", policy, **SIZES), link, bandwidth)


def firsts(text: str) -> list[str]:
    """The first cell of each line of a table."""
    return [line.split("  ")[0] for line in text.splitlines()]


def test_layers_of_other_bytes_have_lines_of_their_own() -> None:
    """With equal tokens and slots: only the codes are of other sizes."""
    specs = ["snapkv+kivi:bits=2@0.5"] * 3 + ["snapkv+kivi:bits=8@0.5"] * 5
    plan = kvpolicy.plan("tiny", Policy.by_layer(specs, budget=1.0), prompt=900)
    assert len({layer.layout for layer in plan.layers}) == 1
    assert firsts(str(plan))[2:5] == ["0-2", "3-7", "all"]
    assert firsts(layer_table(layer_facts(plan), 0))[1:] == ["0-2", "3-7"]


def test_plans_and_the_command_group_alike() -> None:
    plan = kvpolicy.plan("tiny", "snapkv@0.2", batch=8, prompt=900)
    assert len({sum(layer.nbytes.values()) for layer in plan.layers}) == 2  # the first one counts the tokens of all
    assert firsts(str(plan))[2:] == ["0-7", "all"] and firsts(layer_table(layer_facts(plan), 0))[1:] == ["0-7"]


def test_a_long_table_is_folded() -> None:
    rows = [(index, (str(index),)) for index in range(MAX_LINES + 4)]
    shown = firsts(text_layer_table(("layers", "tokens"), rows, ("all", "190")))
    assert len(shown) == 1 + MAX_LINES + 1 + 1 and shown[9] == "4 more" and shown[-1] == "all"
    assert "more" not in text_layer_table(("layers", "tokens"), rows[:MAX_LINES])
