"""Every command with a policy by layer, from a file of layers and from one of curves."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

import kvpolicy
from kvpolicy import Policy
from kvpolicy.hf.identity import identity
from kvpolicy.planning.curves import save_curves, save_layers
from tests.cli.conftest import Facts, Run
from tests.planning.test_tuned import draw_curves

TEXT = "tiger=4821 wolf=1937 ?tiger="


@pytest.fixture(scope="module", params=["layers", "curves"])
def spec(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("tuned") / "plan.json"
    if request.param == "layers":
        save_layers(file, ["snapkv@0.5", "h2o+tokenwise@0.25"] * 4)
    else:
        save_curves(file, draw_curves(1, layers=8, model=identity(kvpolicy.tiny()[0])))
    return f"tuned:file={file}@0.9"


@pytest.fixture
def call(run: Run, facts: Facts) -> Facts:
    """The facts of a command with `--json`, after it ran without."""
    return lambda *words: facts([*words]) if run([*words]) else pytest.fail("nothing is printed")


def test_plan_and_explain(spec: str, call: Facts, run: Run) -> None:
    planned = call("plan", "tiny", spec, "--prompt", "300", "--new", "9")
    explained = call("explain", spec, "--prompt", "300", "--new", "9")
    assert planned["policy"] == explained["policy"] == spec and explained["cache"]["total"] < explained["full_cache"]
    assert len(explained["layers"]) == 8
    words = ["explain", spec, "--prompt", "3000", "--new", "9"]
    text = run(words)
    head, *rows = next(block for block in text.split("\n\n") if block.startswith("layer")).splitlines()
    measured = ["distortion", "at half", "at twice"] if explained["tuned"] else []
    assert re.split("  +", head) == ["layer", "policy", "tokens", "bytes", *measured]
    explained = call(*words)
    assert [row.split()[1] for row in rows] == [layer["policy"] for layer in explained["layers"]]
    share = explained["cache"]["total"] / explained["full_cache"]
    assert re.search(rf"^Total: [^,]*, {share:.3f} of the full cache \(11.8 MiB\)\.$", text, re.MULTILINE)
    note = explained["note"]
    assert "up to 3,009, exceed the 2,048 positions" in note
    assert f"{note[0].upper()}{note[1:]}." in " ".join(text.split())


def test_generate_and_inspect(spec: str, call: Facts, tmp_path: Path) -> None:
    assert call("generate", TEXT, "--policy", spec, "--least", "0", "--new", "3")["runs"][0]["policy"] == spec
    found = call("inspect", TEXT, "--policy", spec, "--html", str(tmp_path / "page.html"))
    assert found["policy"] == spec and len(found["layers"]) == 8
    assert spec in (tmp_path / "page.html").read_text()


def test_bench(spec: str, call: Facts) -> None:
    found = call("bench", spec, "--length", "64", "--steps", "1", "--rounds", "1")
    assert spec in json.dumps(found)


def test_caches(spec: str, call: Facts, tmp_path: Path) -> None:
    out = str(tmp_path / "cache.safetensors")
    made = call("cache", "make", TEXT, "--policy", spec, "--out", out)
    assert made["policy"] == spec == call("cache", "info", out)["policy"]
    assert bool(made["note"]) == any("snapkv" in str(one) for one in attached(spec).distinct)
    assert call("cache", "verify", out)["verified"]


def attached(spec: str) -> Policy:
    """The policy that an attached spec stands for."""
    with kvpolicy.attach(kvpolicy.tiny()[0], spec) as handle:
        return handle.policy


def test_a_server_starts_from_a_cache_of_the_same_layers(spec: str, tmp_path: Path) -> None:
    """The layers are known only when the model is; then they must be those of the file."""
    from kvpolicy.serving.prefix import PrefixFile

    model, tokenizer = kvpolicy.tiny()
    ids = tokenizer(TEXT, return_tensors="pt").input_ids
    path = tmp_path / "cache.safetensors"
    with torch.no_grad(), kvpolicy.attach(model, spec):
        cache = kvpolicy.PolicyCache(model)
        model(ids, cache=cache)
        cache.save(path, tokens=ids)
        assert PrefixFile(path, Policy.parse(spec)).load(model).cache.policy == cache.policy
    other = spec.replace("@0.9", "@0.8")
    with kvpolicy.attach(model, other), pytest.raises(kvpolicy.KVPolicyError, match="must have the policy"):
        PrefixFile(path, Policy.parse(other)).load(model)
    with pytest.raises(kvpolicy.KVPolicyError, match=r"must have the policy h2o@0.2, got tuned:file="):
        PrefixFile(path, Policy.parse("h2o@0.2"))


def test_list_describes_it(run: Run, call: Facts) -> None:
    text = " ".join(run("list tuned").split())
    assert "A policy for each layer" in text and "file= The path" in text and "length=auto" in text
    assert call("list", "tuned")["strategies"][0]["kind"] == "policy"
    assert "Names of whole policies: tuned." in " ".join(run("list").split())
    assert "did you mean 'tuned'?" in run("list tune", 2)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ("tunedd:file=a.json", "did you mean 'tuned'?"),
        ("tuned:file=~/a.json", "got '~/a.json'; try %7E/a.json."),
    ],
)
def test_refused(wanted: str, message: str, run: Run) -> None:
    assert message in run(f"explain {wanted}", 2)
