"""`kvpolicy cache`: files of saved caches, made, described and verified."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

import kvpolicy
from kvpolicy import PolicyCache
from kvpolicy.cli.app import main
from kvpolicy.hf import cache_header
from kvpolicy.hf.cache_file import read
from kvpolicy.hf.saved_cache import TOKENS
from tests.cli.conftest import Facts, Run

TEXT = "tiger=4821\nlion=1234\nwolf=9310\nsheep=7764\n" * 3


def test_a_file_is_made_described_and_verified(tmp_path: Path, run: Run, facts: Facts) -> None:
    out = tmp_path / "records.safetensors"
    policy = "uniform/adakv+h2o+tokenwise@0.5"
    made = facts(["cache", "make", TEXT, "--policy", policy, "--out", str(out), "--compress"])
    assert made["policy"] == policy and made["note"] == "" and made["has_tokens"] and made["compressed"]
    described = facts(["cache", "info", str(out)])
    assert {name: made[name] for name in described if name != "command"} == {
        name: value for name, value in described.items() if name != "command"
    }
    model, tokenizer = kvpolicy.tiny()
    ids = tokenizer(TEXT, return_tensors="pt").input_ids
    assert torch.equal(read(out).tensors[TOKENS], ids) and made["columns"] == ids.shape[1]
    with kvpolicy.attach(model, policy), torch.no_grad():
        cache = PolicyCache(model)
        model(ids, cache=cache)
        loaded = PolicyCache.load(model, out)
        assert cache.nbytes == loaded.nbytes == made["nbytes"]
        more = tokenizer("?wolf=", return_tensors="pt").input_ids
        one, other = (model(more, cache=each).logits for each in (cache, loaded))
    assert torch.allclose(one, other, atol=1e-4)
    assert "is as it was written" in run(["cache", "verify", str(out)])
    out.write_bytes(out.read_bytes()[:-1])
    assert "truncated or edited" in run(["cache", "verify", str(out)], 2)


def test_a_file_with_loss_is_made_and_described(tmp_path: Path, run: Run, facts: Facts) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT * 8)
    out = tmp_path / "records.safetensors"
    folder = tmp_path / "kvtc"
    options = ["--ratios", "8", "--tokens", "150", "--quiet"]
    said = run(["calibrate", "kvtc", "--model", "tiny", "--text", str(text), "--out", str(folder), *options])
    assert f"Use it with cache.save(path, compress='kvtc:calibration={folder}:ratio=8')" in " ".join(said.split())
    form = f"kvtc:calibration={folder}:ratio=8"
    make = ["cache", "make", "--file", str(text), "--policy", "full", "--out", str(out), "--force"]
    plain = facts(make)
    made = facts([*make, "--form", form])
    assert plain["form"] is None and made["form"] == form and made["file_nbytes"] < 0.8 * plain["file_nbytes"]
    assert "stored as" in (said := run(["cache", "info", str(out)])) and "with loss" in said and "format 2" in said
    run(["cache", "verify", str(out)])
    for wrong in ("gzip", "kvtc:ratio=x"):
        run([*make, "--form", wrong], 2)
    assert "--compress must not be given with --form" in run([*make, "--form", form, "--compress"], 2)
    over = [*make[:-2], str(folder / "tensors.safetensors"), "--force", "--form", form]
    assert "must not be an input of the command" in run(over, 2)


def test_what_cannot_be_written_is_refused_before_the_text_is_read(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*_: object, **__: object) -> None:
        raise AssertionError

    monkeypatch.setattr(LlamaForCausalLM, "forward", read)
    out = ["--out", str(tmp_path / "cache.safetensors")]
    nowhere = f"kvtc:calibration={tmp_path / 'nowhere'}:ratio=8"
    for wrong, said in (
        ([*out, "--form", nowhere], "nowhere"),
        (["--out", str(tmp_path / "no" / "cache.safetensors")], "folder of a cache file must exist"),
    ):
        assert said in run(["cache", "make", TEXT, *wrong], 2)


def test_a_text_is_read_in_chunks(tmp_path: Path, facts: Facts) -> None:
    out = tmp_path / "records.safetensors"
    policy = "h2o+tokenwise@0.5"
    made = facts(["cache", "make", TEXT, "--policy", policy, "--chunk", "16", "--out", str(out)])
    model, tokenizer = kvpolicy.tiny()
    ids = tokenizer(TEXT, return_tensors="pt").input_ids
    with kvpolicy.attach(model, policy), torch.no_grad():
        cache = PolicyCache(model, prompt=ids.shape[1])
        for part in ids.split(16, dim=1):
            model(part, cache=cache)
        whole = PolicyCache(model)
        model(ids, cache=whole)
        loaded = PolicyCache.load(model, out)
    assert made["columns"] == ids.shape[1] and made["nbytes"] == cache.nbytes
    kept, chunked, at_once = ([layer.positions for layer in each.policy_layers] for each in (loaded, cache, whole))
    assert all(map(torch.equal, kept, chunked)) and not all(map(torch.equal, kept, at_once))


def test_a_policy_that_looks_at_a_question_is_noted(tmp_path: Path, run: Run) -> None:
    out = str(tmp_path / "cache.safetensors")
    said = " ".join(run(["cache", "make", TEXT, "--policy", "snapkv@0.5", "--out", out]).split())
    assert "may not answer another one; try uniform/adakv+kvzip" in said
    assert "another one" not in run(["cache", "make", TEXT, "--policy", "streaming@0.5", "--out", out])


def test_a_file_of_one_rank_says_of_which(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    out = tmp_path / "cache.safetensors"
    assert "\n  rank" not in run(["cache", "make", TEXT, "--policy", "window@8", "--out", str(out)])
    header = cache_header.read_header(out)
    ranks = header["ranks"] | {"rank": 1, "size": 2}
    monkeypatch.setattr(cache_header, "read_header", lambda _: header | {"ranks": ranks})
    assert run(["cache", "info", str(out)]).splitlines()[-1].split() == ["rank", "2", "of", "2"]


def test_files_that_are_none(tmp_path: Path, run: Run) -> None:
    for command in ("info", "verify"):
        assert "try creating it with kvpolicy cache make" in run(["cache", command, str(tmp_path / "nothing")], 2)


@pytest.mark.skipif(sys.platform != "linux", reason="file names are Unicode")
def test_a_name_that_cannot_be_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One in another encoding than that of the terminal: the file is written, and described."""
    out = tmp_path / "text\udce9.safetensors"
    printed = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    monkeypatch.setattr(sys, "stdout", printed)
    for words in (["make", "tiger", "--policy", "full", "--out", str(out)], ["info", str(out)], ["verify", str(out)]):
        assert main(["cache", *words]) == 0
    printed.flush()
    assert printed.buffer.getvalue().count(b"text?.safetensors") == 3  # pyright: ignore[reportAttributeAccessIssue]


def test_the_newline_at_the_end_of_a_file_is_part_of_the_text(tmp_path: Path) -> None:
    """Without it, tokenizers that join a full stop and a newline give other tokens to a text and the same text with
    a question behind it.
    """
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    assert TEXT.endswith("\n")
    assert main(["cache", "make", "--file", str(text), "--out", str(tmp_path / "cache.safetensors")]) == 0
    ids = kvpolicy.tiny()[1](TEXT, return_tensors="pt").input_ids
    assert torch.equal(read(tmp_path / "cache.safetensors").tensors[TOKENS], ids)


def test_a_text_that_is_too_long(run: Run) -> None:
    assert run(["cache", "make", TEXT * 40], 2).endswith("; try a shorter prompt.\n")  # there is no --new
