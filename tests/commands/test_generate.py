"""The command `kvpolicy generate`: its text, its comparison, where prompts come from, and what it refuses."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from transformers import T5Config

import kvpolicy
from kvpolicy.cli import writing
from kvpolicy.cli.app import main
from kvpolicy.cli.beside import parts_at
from kvpolicy.cli.prompts import read_prompt, remarks, sample
from kvpolicy.cli.writing import Written

Run = Callable[..., str]
Facts = Callable[..., dict[str, Any]]

PROMPT = "tiger=4821\nlion=1234\nwolf=9310\nsheep=7764\n?tiger=4821\n?wolf="
POLICY = "streaming:sinks=1@0.3"


@pytest.fixture(scope="module")
def tiny() -> tuple[Any, Any]:
    return kvpolicy.tiny()


@pytest.fixture
def piped(monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], None]:
    def call(text: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text), encoding="utf-8"))

    return call


def said(words: list[str], capsys: pytest.CaptureFixture[str], code: int = 0) -> tuple[str, str]:
    assert main(["generate", *words]) == code
    return capsys.readouterr()


def wanted(tiny: tuple[Any, Any], prompt: str, policy: str, new: int) -> tuple[str, list[int], Any]:
    """Text, tokens and cache of the model's own greedy generation."""
    model, tokenizer = tiny
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    with torch.no_grad(), kvpolicy.attach(model, policy) as handle:
        made = model.generate(ids, max_new_tokens=new, do_sample=False)[0, ids.shape[1] :]
    return tokenizer.decode(made, skip_special_tokens=True), made.tolist(), handle.cache


@pytest.mark.parametrize("policy", ["full", POLICY, "squeeze+kvcrush@0.4"])
def test_the_text_is_what_generate_gives(
    policy: str, tiny: tuple[Any, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    out, err = said([PROMPT, "--policy", policy, "--new", "14"], capsys)
    text, tokens, cache = wanted(tiny, PROMPT, policy, 14)
    assert out == f"{text}\n"
    assert f"{len(tokens)} token(s)" in err and str(cache.policy) in err
    found = json.loads(said([PROMPT, "--policy", policy, "--new", "14", "--json"], capsys)[0])
    (run,) = found["runs"]
    assert (run["text"], run["tokens"]) == (text, tokens)
    assert (run["nbytes"], run["full_nbytes"]) == (cache.nbytes, cache.full_nbytes)
    held = [int((layer.positions >= 0).sum()) / layer.positions.shape[1] for layer in cache.policy_layers]
    assert run["kept"] == pytest.approx(sum(held) / len(held))
    assert run["seen"] == found["prompt_tokens"] + len(tokens) - 1
    assert run["prefill_tokens_per_second"] > 0 and run["decode_tokens_per_second"] > 0
    assert found["compared_with_the_first"] == []


def test_compare_says_where_texts_part(tiny: tuple[Any, Any], capsys: pytest.CaptureFixture[str]) -> None:
    others = ["full", POLICY, "window@8"]
    words = [PROMPT, "--policy", POLICY, "--new", "14", *(word for name in others for word in ("--compare", name))]
    found = json.loads(said([*words, "--json"], capsys)[0])
    _, first, _ = wanted(tiny, PROMPT, POLICY, 14)
    at: list[int | None] = []
    for policy in others:
        _, tokens, _ = wanted(tiny, PROMPT, policy, 14)
        at.append(next((i for i in range(14) if tokens[i : i + 1] != first[i : i + 1]), None))
    assert [one["parts_after_tokens"] for one in found["compared_with_the_first"]] == at
    assert at[0] is not None and at[1] is None  # else nothing was shown
    out, err = said(words, capsys)
    assert f"parts from the first after {at[0]} of 14 tokens" in " ".join(out.split())
    assert "the same as the first" in out and not err
    for run in found["runs"]:
        assert run["policy"] in out and all(line in out for line in run["text"].splitlines())


def test_one_beside_the_other_where_there_is_room(run: Run) -> None:
    line = f"generate tiger=4821 --new 3 --policy {POLICY} --compare full"
    narrow, wide = (run(line, columns=columns).splitlines() for columns in (60, 120))
    assert max(map(len, narrow)) <= 60 < max(map(len, wide)) <= 120
    assert wide[0].split() == [POLICY, "full"]
    assert [line for line in narrow if line in (POLICY, "full")] == [POLICY, "full"]


@pytest.mark.parametrize(
    ("first", "other", "at"), [([1, 2], [1, 2], None), ([1, 2], [1], 1), ([1], [1, 2], 1), ([1, 2, 3], [1, 4, 3], 1)]
)
def test_where_tokens_part(first: list[int], other: list[int], at: int | None) -> None:
    runs = [
        Written(
            policy="", text="", tokens=tuple(tokens), prompt=1, kept=0, seen=0, nbytes=0, full_nbytes=0, prefill=None,
            decode=None,
        )
        for tokens in (first, other)
    ]  # fmt: skip
    assert parts_at(*runs) == at


def test_where_a_prompt_comes_from(tmp_path: Path, piped: Callable[[bytes], None]) -> None:
    path = tmp_path / "prompt.txt"
    path.write_bytes("é=1\r\n\n".encode())
    assert read_prompt("é=1", None, "tiny") == ("é=1", False)
    assert read_prompt(None, str(path), "tiny") == ("é=1\n", False)
    for words in ((None, None), ("-", None), (None, "-")):
        piped("é=1\n\n".encode())
        assert read_prompt(*words, "other") == ("é=1\n", False)


def test_standard_input(
    piped: Callable[[bytes], None], tiny: tuple[Any, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    piped(f"{PROMPT}\n".encode())
    assert said(["--policy", "full", "--new", "4"], capsys)[0] == wanted(tiny, PROMPT, "full", 4)[0] + "\n"


def test_the_sample_is_answered(piped: Callable[[bytes], None], capsys: pytest.CaptureFixture[str]) -> None:
    piped(b"")
    out, err = said([], capsys)
    assert f"\n{sample().rpartition('?')[2]}{out.strip()}\n" in sample()
    assert "built-in sample" in err


def test_what_is_told_of_a_prompt() -> None:
    assert not remarks("tiny", 1024, False) and not remarks("other", 2000, False)
    assert "at most 1,024 tokens" in remarks("tiny", 1025, False)[0]


def test_a_seed_repeats_a_draw(facts: Facts) -> None:
    line = "generate tiger= --new 12 --policy full --temperature 2"
    draws = [facts(f"{line} --seed {seed}")["runs"][0]["tokens"] for seed in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]


def test_a_folder_and_its_chat_template(
    tmp_path: Path, tiny: tuple[Any, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    model, tokenizer = tiny
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config["chat_template"] = "{{ bos_token }}{% for m in messages %}[{{ m.content }}]{% endfor %}tiger=4821\n?tiger="
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    words = ["hello", "--model", str(tmp_path), "--policy", "full", "--new", "4", "--chat", "--dtype", "float32"]
    text, _, _ = wanted(tiny, "[hello]tiger=4821\n?tiger=", "full", 4)
    capsys.readouterr()  # saving may have printed
    assert said(words, capsys)[0] == f"{text}\n"


def test_interrupted(
    tiny: tuple[Any, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    put = writing.Clock.put

    def stop(self: writing.Clock, value: Any) -> None:
        put(self, value)
        if len(self.tokens) == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(writing.Clock, "put", stop)
    out, err = said([PROMPT, "--policy", POLICY], capsys, 130)
    assert out == wanted(tiny, PROMPT, POLICY, 4)[0] + "\n"
    assert "by Ctrl-C after 4 token(s)" in err
    out, _ = said([PROMPT, "--policy", POLICY, "--compare", "full", "--json"], capsys, 130)
    (run,) = json.loads(out)["runs"]
    assert run["interrupted"] and len(run["tokens"]) == 4
    assert not kvpolicy.attach(tiny[0], "full").detach()


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("a --policy nonsense", "no strategy called 'nonsense'"),
        ("a --compare nonsense", "no strategy called 'nonsense'"),
        ("a --model FOLDER", "cannot be loaded"),
        ("a --model llama-3-70b", "only its config ships"),
        ("a --model FOLDER/t5", "it is no decoder-only causal language model."),
        ("a --model FOLDER/mute", "The tokenizer of the model"),
        (f"a --seed {2**64}", "--seed"),
        ("a --file FOLDER/text", "twice"),
        ("--file FOLDER/text", "text cannot be read (no such file or directory)"),
        ("--file FOLDER", "cannot be read"),
        ("--file FOLDER/latin", "latin is not UTF-8 (byte 3)"),
        ("--file FOLDER/empty", "empty"),
        ("-", "empty"),
        ("--model other", "no prompt"),
        ("a --new 2047", "2,048 positions"),
        ("a --chat", "no chat template"),
        ("a --dtype nonsense", "dtype 'nonsense'"),
        ("a --dtype float8_e4m3fn", "dtype 'float8_e4m3fn' is not known"),
        ("\udcff\udcfea", "text of the argument is not UTF-8 (character 0)"),
        ("a --temperature -1", "temperature"),
        ("a --new 0", "--new"),
    ],
)
def test_what_the_user_can_put_right(
    line: str, told: str, tmp_path: Path, run: Run, piped: Callable[[bytes], None], tiny: tuple[Any, Any]
) -> None:
    piped(b"")
    (tmp_path / "latin").write_bytes("année".encode("latin-1"))
    (tmp_path / "empty").write_bytes(b"\n")
    if line.endswith("t5"):
        T5Config(d_model=8, num_layers=1).save_pretrained(tmp_path / "t5")
        tiny[1].save_pretrained(tmp_path / "t5")
    if line.endswith("mute"):
        tiny[0].config.save_pretrained(tmp_path / "mute")
    assert told in run(f"generate {line.replace('FOLDER', str(tmp_path))}", 2)


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "marked").write_bytes(b"\xef\xbb\xbfa=1\r\nb=2\n")
    assert read_prompt(None, str(tmp_path / "marked"), "tiny") == ("a=1\nb=2", False)
