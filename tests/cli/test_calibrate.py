"""`kvpolicy calibrate`: the folders that it writes, and its error messages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import kvpolicy
from kvpolicy import CSR, KVQuant, LowRank, Policy
from kvpolicy.allocators.head_files import HEAD_FILES
from kvpolicy.calibration import model_info, read_texts, token_windows
from kvpolicy.codecs._files import load
from kvpolicy.selectors.center_files import CENTER_FILES
from kvpolicy.selectors.filter_files import FILTER_FILES
from kvpolicy.selectors.gate_files import GATE_FILES
from tests.cli.conftest import Run
from tests.reference.readers.labels import salience


def words(tmp_path: Path, codec: str, *more: str) -> list[str]:
    text = tmp_path / "text.txt"
    text.write_text("tiger=4821\nlion=1234\n" * 400)
    out = str(tmp_path / "out")
    return ["calibrate", codec, "--model", "tiny", "--text", str(text), "--out", out, "--quiet", *more]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_csr(tmp_path: Path, run: Run) -> None:
    more = ["--atoms", "16", "--epochs", "1", "--key-groups", "all", "--value-groups", "0,1-7", "--value-chunks", "1,4"]
    out = run(words(tmp_path, "csr", *more, "--length", "128", "--windows", "2", "--tokens", "64"))
    assert out.startswith("This takes up to ") and "keys.pre of layers 0,1,2,3,4,5,6,7: error" in out
    found = load(str(tmp_path / "out"), "csr")
    assert found.meta["model"]["name"] == "tiny"
    assert sorted(found.tensors) == ["keys.pre.0", "values.sn1.0", "values.sn1.1", "values.sn4.0", "values.sn4.1"]


def test_kvquant(tmp_path: Path, run: Run) -> None:
    more = ["--bits", "2", "--no-fisher", "--length", "64", "--windows", "2"]
    run(words(tmp_path, "kvquant", *more))
    assert not load(str(tmp_path / "out"), "kvquant").meta["fisher"]


def test_lowrank(tmp_path: Path, run: Run) -> None:
    more = ["--fisher", "--head-groups", "2,4", "--key-spaces", "unrotated", "--length", "100", "--windows", "2"]
    assert f"lowrank:calibration={tmp_path / 'out'}" in run(words(tmp_path, "lowrank", *more))
    found = load(str(tmp_path / "out"), "lowrank")
    assert found.meta["fisher"] and found.meta["head_groups"] == [2, 4]
    for group in (2, 4):
        options: dict[str, Any] = {"key_space": "unrotated", "calibration": str(tmp_path / "out")}
        LowRank(ranks="fisher", head_group=group, **options).check(model_info(kvpolicy.tiny()[0]))
    assert "must be at least 2 and divide the 4 KV heads of the model, got 3; try 4." in run(
        words(tmp_path, "lowrank", "--head-groups", "3"), 2
    )


def test_channels(tmp_path: Path, run: Run) -> None:
    """The salience of one head is that of the slow version, and the reader takes it from the folder."""
    line = words(tmp_path, "channels", "--length", "100", "--windows", "2", "--dtype", "float32")
    out = tmp_path / "out"
    assert f"labels:calibration={out}" in run(line)
    found = load(str(out), "channels").tensors
    assert sorted(found) == [f"salience.{layer}" for layer in range(8)]
    model, tokenizer = kvpolicy.tiny()
    model = model.float()
    windows = token_windows(tokenizer, read_texts([tmp_path / "text.txt"]), 100, 2, 0)
    want = salience([vectors(model, ids, layer=0, head=1) for ids in windows])
    assert torch.allclose(found["salience.0"][1].double(), torch.tensor(want).double(), rtol=1e-4)
    policy = kvpolicy.Policy.parse(f"labels:channels=3:read=4:dense=0:calibration={out}")
    with torch.no_grad(), kvpolicy.attach(model, policy) as handle:
        model(windows[0][None, :50])
        assert handle.cache is not None
        reads: Any = handle.cache.policy_layers[0].store.tensors.reads
    best = sorted(range(len(want)), key=lambda channel: -want[channel])[:3]
    assert reads.index.channels[0, 1].tolist() == sorted(best)
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight.normal_()
    with pytest.raises(ValueError, match="made for another model"):
        kvpolicy.attach(model, policy)
    with pytest.raises(ValueError, match="must be a folder"):
        kvpolicy.plan(model.config, "labels:calibration=nowhere")


def vectors(model: Any, ids: Tensor, layer: int, head: int) -> tuple[list[list[list[float]]], list[list[float]]]:
    """Queries of the two query heads of a KV head, and its keys, of every token."""
    attention = model.model.layers[layer].self_attn
    seen: dict[str, Any] = {}
    hook = attention.register_forward_pre_hook(lambda _, args, given: seen.update(given), with_kwargs=True)
    with torch.no_grad():
        model(ids[None])
        hidden = seen["hidden_states"]
        shape = (1, len(ids), -1, 32)
        q, k = (project(hidden).view(shape).transpose(1, 2) for project in (attention.q_proj, attention.k_proj))
        q, k = apply_rotary_pos_emb(q, k, *seen["position_embeddings"])
    hook.remove()
    return q[0, 2 * head : 2 * head + 2].tolist(), k[0, head].tolist()


@pytest.mark.parametrize(
    ("method", "more", "message"),
    [
        ("csr", "--key-groups 0-3", "must contain each of the layers"),
        ("csr", "--atoms 99999 --windows 1 --length 64", "fewer atoms"),
        ("csr", "--dtype nonsense", "--dtype must be one of bfloat16"),
        ("csr", "--text no-such-file.txt", "The text no-such-file.txt must be a readable UTF-8 file"),
        ("csr", "--rate 0", "rate"),
        ("csr", "--key-spaces mid", "key_spaces must be 'unrotated', 'rotated' or both, got ('mid',)"),
        ("csr", "--sn x", "--value-chunks must be a list of integers, got 'x'; try 1,2,4."),
        ("kvquant", "--model /no/such/folder", "cannot be loaded"),
        ("gate", "--kind tree", "The kind of a gate must be linear or mlp, got 'tree'; try linear."),
        ("gate", "--ridge -1", "ridge must be a finite number of at least 0, got -1.0; try 0.001."),
        ("gate", "--units 0", "units must be at least 1, got 0; try 512."),
        ("gate", "--epochs 0", "epochs must be at least 1, got 0; try 15."),
        ("gate", "--units 4", "--units must not be given with --kind linear, which does not use it, got 4; remove it."),
        ("gate", "--kind mlp --ridge 1", "--ridge must not be given with --kind mlp, which does not use it, got"),
        ("gate", "--length 1", "The length of a window must be at least 2 tokens, BOS included, got 1; try 1024."),
        ("gate", "--length 2049", "must fit into 2,048 positions, got 2,049 and 0; try a smaller --length."),
    ],
)
def test_error_messages(method: str, more: str, message: str, tmp_path: Path, run: Run) -> None:
    assert message in run(words(tmp_path, method, *more.split()), 2)


FOLDERS = ("csr", "kvquant", "lowrank", "channels")
FILES = ("heads", "qfilters", "triattention", "gate")


@pytest.mark.parametrize("method", [*FOLDERS, *FILES])
def test_a_file_and_a_folder_in_the_place_of_each_other(method: str, tmp_path: Path, run: Run) -> None:
    line = words(tmp_path, method, "--force")
    wanted, other = ("folder", "file") if method in FOLDERS else ("file", "folder")
    if method in FOLDERS:
        (tmp_path / "out").write_text("a file")
    else:
        (tmp_path / "out").mkdir()
    assert f"The {wanted} to write must be a {wanted}, got the {other}" in run(line, 2)


def test_several_texts(tmp_path: Path, run: Run) -> None:
    """As in `--text a.txt b.txt`."""
    line = words(tmp_path, "kvquant", "--bits", "2", "--no-fisher", "--length", "64", "--windows", "2")
    (tmp_path / "other.txt").write_text("wolf=77\n" * 90)
    line.insert(line.index("--text") + 2, str(tmp_path / "other.txt"))
    run(line)
    line.insert(line.index("--text") + 2, str(tmp_path / "missing.txt"))
    run(line, 2)


def test_the_embedded_model_is_calibrated_for_both_codecs() -> None:
    info = model_info(kvpolicy.tiny()[0])
    for key_space in ("unrotated", "rotated"):
        for value_chunks in (1, 2, 4):
            CSR(key_space=key_space, value_chunks=value_chunks).check(info)
    for ranks in ("energy", "threshold", "fisher"):
        LowRank(ranks=ranks).check(info)
    KVQuant().check(info)
    for method in ("csr", "kvquant"):
        model = load("tiny", method).meta["model"]
        assert (model["name"], model["layers"], model["heads"], model["head_dim"]) == ("tiny", 8, 4, 32)


def test_heads(tmp_path: Path, run: Run) -> None:
    line = words(tmp_path, "heads", "--length", "64", "--windows", "2", "--sinks", "2", "--recent", "14")
    out = line[line.index("--out") + 1]
    printed = run([*line, "--positions", "100"]).splitlines()
    assert len(printed) == 9 and printed[0].startswith("layer 0: 0.")
    assert printed[-1] == f"Wrote {out}. Use it with uniform/duo:file={out}+streaming:sinks=2@0.5"
    found = HEAD_FILES.load(out)
    assert (found.sinks, found.recent, len(found.heads)) == (2, 14, 8)
    assert "must be absent, or a calibration of the same model" in run(line, 2)
    run([*line, "--force"])
    run(["plan", "tiny", f"uniform/duo:file={out}+streaming:sinks=2@0.5"])


def test_heads_by_the_razor_probe(tmp_path: Path, run: Run) -> None:
    out = str(tmp_path / "out")
    line = ["calibrate", "heads", "--model", "tiny", "--probe", "razor", "--out", out, "--quiet", "--random", "99"]
    with pytest.warns(kvpolicy.KVPolicyWarning, match="No head finds the copies of 99 random tokens"):
        printed = run([*line, "--sinks", "4", "--recent", "28", "--induction", "0.24"]).splitlines()
    assert printed[-1] == f"Wrote {out}. Use it with uniform/duo:file={out}:sparsity=0.75+streaming:sinks=4@0.5"
    found = HEAD_FILES.load(out)
    assert found.made is not None and (found.made["probe"], found.made["random"]) == ("razor", 99)
    assert (found.sinks, found.recent, len(found.heads)) == (4, 28, 8)
    assert "--probe razor must have no text, got " in run([*line, "--text", out], 2)
    error = "--probe reach must have a text, got none; try --text FILE, or --probe razor."
    assert error in run(["calibrate", "heads", "--model", "tiny", "--out", out], 2)
    assert "--probe must be reach or razor, got 'echo'; try reach." in run([*line, "--probe", "echo"], 2)
    for option in ("--positions", "--length"):
        assert f"{option} must not be given with --probe razor" in run([*line, option, "9"], 2)
    assert "--repeats must not be given with --probe reach" in run(words(tmp_path, "heads", "--repeats", "3"), 2)


TOKENS = ["--tokens", "150"]
MLP = ["--kind", "mlp", "--units", "4", "--epochs", "1"]


@pytest.mark.parametrize(
    ("kind", "method", "read", "more"),
    [
        ("qfilters", "qfilters", FILTER_FILES.load, TOKENS),
        ("triattention", "triattention", CENTER_FILES.load, []),
        ("gate", "kvzap", GATE_FILES.load, TOKENS),
        ("gate", "kvzap", GATE_FILES.load, TOKENS + MLP),
    ],
    ids=["qfilters", "triattention", "gate", "gate mlp"],
)
def test_files_of_selectors(kind: str, method: str, read: Any, more: list[str], tmp_path: Path, run: Run) -> None:
    line = words(tmp_path, kind, "--length", "100", "--windows", "2", *more)
    out = line[line.index("--out") + 1]
    *layers, last = run(line).splitlines()
    assert last == f"Wrote {out}. Use it with {method}:file={out}@0.2"
    found = read(out)
    assert found.model is not None and found.model["name"] == "tiny"
    assert found.made is not None and (found.made["windows"], found.made["tokens"]) == (2, 150 if more else 200)
    if kind == "gate":
        assert found.gates[0].weight.shape == ((4, 4) if "mlp" in more else (4, 128))
        assert (
            len(layers) == 8 and layers[0].startswith("layer 0: ") and layers[0].endswith(" of the variance explained")
        )
    run(line)  # the same again
    assert "must be absent, or a calibration of the same model" in run([*line, "--seed", "1"], 2)
    run([*line, "--seed", "1", "--force"])
    run(["plan", "tiny", f"{method}:file={out}@0.2"])
    other = "made for another model (llama 'tiny', with 8 layers instead of 32)"
    assert other in run(["plan", "llama-3.1-8b", f"{method}:file={out}@0.2"], 2)


@pytest.mark.parametrize("method", ["channels", "triattention"])
def test_a_path_is_expanded_and_its_spec_can_be_pasted(
    method: str, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    line = words(tmp_path, method, "--length", "64", "--windows", "2")
    said = [run([*line, "--out", "~/a b+c@d"]) for _ in range(2)][-1]  # the same one is replaced
    assert (tmp_path / "a b+c@d").exists() and not (tmp_path / "~").exists()
    spec = said.splitlines()[-1].split("Use it with ")[1]
    assert str(tmp_path / "a b+c@d") in str(Policy.parse(spec if "@" in spec else f"{spec}@1.0").to_dict())
    assert "got" in run([*line[:-4], "--length", "65", "--out", "~/a b+c@d"], 2)
