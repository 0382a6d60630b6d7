"""`kvpolicy generate`: its text, its comparison, the sources of prompts, and its error messages."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import T5Config

import kvpolicy
from kvpolicy.cli.app import main
from kvpolicy.cli.generation import TextPrinter, TimedStreamer, first_difference
from kvpolicy.cli.model_loading import prompt_notes, read_prompt, sample
from kvpolicy.hf import compiled_generation
from tests.cli.conftest import Facts, Run, Tiny
from tests.counting_model import ANSWER, WORDS, counting_model
from tests.counting_model import PROMPT as QUESTION

Generate = Callable[..., tuple[str, str]]
PROMPT = "tiger=4821\nlion=1234\nwolf=9310\nsheep=7764\n?tiger=4821\n?wolf="
POLICY = "streaming:sinks=1@0.3"


@pytest.fixture
def piped(monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], None]:
    def call(text: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text), encoding="utf-8"))

    return call


@pytest.fixture
def generate(capsys: pytest.CaptureFixture[str]) -> Generate:
    """Run the command, by default without a least number of tokens; returns what it writes to both streams."""

    def call(words: list[str], code: int = 0) -> tuple[str, str]:
        capsys.readouterr()  # saving a model may have printed
        exact = [] if {"--least", "--speculate"} & {*words} else ["--least", "0"]
        assert main(["generate", *words, *exact]) == code
        return capsys.readouterr()

    return call


def wanted(tiny: Tiny, prompt: str, policy: str, new: int) -> tuple[str, list[int], Any]:
    """Text, tokens and cache of greedy generation with `model.generate`."""
    model, tokenizer = tiny
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    with torch.no_grad(), kvpolicy.attach(model, policy) as handle:
        made = model.generate(ids, max_new_tokens=new, do_sample=False)[0, ids.shape[1] :]
    return tokenizer.decode(made, skip_special_tokens=True), made.tolist(), handle.cache


@pytest.mark.parametrize("policy", ["full", POLICY, "squeeze+kvcrush@0.4"])
def test_the_text_is_that_of_model_generate(policy: str, tiny: Tiny, generate: Generate) -> None:
    out, err = generate([PROMPT, "--policy", policy, "--new", "14"])
    text, tokens, cache = wanted(tiny, PROMPT, policy, 14)
    assert out == f"{text}\n"
    for name, count in (("prefill", len(tiny[1](PROMPT).input_ids)), ("decode", len(tokens))):
        assert re.search(rf"^ +{name} +{count} tokens, [\d,]+ tokens/s$", err, re.MULTILINE)
    assert str(cache.policy) in err
    found = json.loads(generate([PROMPT, "--policy", policy, "--new", "14", "--json"])[0])
    (run,) = found["runs"]
    assert (run["text"], run["tokens"]) == (text, tokens)
    assert (run["nbytes"], run["full_nbytes"]) == (cache.nbytes, cache.full_nbytes)
    held = [int((layer.positions >= 0).sum()) / layer.positions.shape[1] for layer in cache.policy_layers]
    assert run["kept"] == pytest.approx(sum(held) / len(held))
    assert run["seen"] == found["prompt_tokens"] + len(tokens) - 1
    assert run["prefill_tokens_per_second"] > 0 and run["decode_tokens_per_second"] > 0
    assert found["compared_with_the_first"] == []


def test_a_short_prompt_keeps_at_least_1024_tokens(tiny: Tiny, capsys: pytest.CaptureFixture[str]) -> None:
    def runs(*words: str) -> list[dict[str, Any]]:
        assert main(["generate", PROMPT, "--new", "3", "--json", *words]) == 0
        return json.loads(capsys.readouterr().out)["runs"]

    first, other = runs("--policy", "h2o@0.3", "--compare", "window@40")
    assert (first["policy"], other["policy"]) == ("h2o@0.3:least=1024", "window@40")
    assert first["kept"] == first["seen"] and other["kept"] == 40
    (own,) = runs("--policy", "h2o@0.3:least=41")
    assert (own["policy"], own["kept"]) == ("h2o@0.3:least=41", 41)
    (set_by_option,) = runs("--policy", "h2o@0.3", "--least", "42")
    assert (set_by_option["policy"], set_by_option["kept"]) == ("h2o@0.3:least=42", 42)
    (exact,) = runs("--policy", "h2o@0.3", "--least", "0")
    assert exact["policy"] == "h2o@0.3" and exact["kept"] == int(0.3 * len(tiny[1](PROMPT).input_ids))


def test_compare_shows_where_texts_differ(tiny: Tiny, generate: Generate) -> None:
    others = ["full", POLICY, "window@8"]
    words = [PROMPT, "--policy", POLICY, "--new", "14", *(word for name in others for word in ("--compare", name))]
    found = json.loads(generate([*words, "--json"])[0])
    _, first, _ = wanted(tiny, PROMPT, POLICY, 14)
    at: list[int | None] = []
    for policy in others:
        _, tokens, _ = wanted(tiny, PROMPT, policy, 14)
        at.append(next((i for i in range(14) if tokens[i : i + 1] != first[i : i + 1]), None))
    assert [one["parts_after_tokens"] for one in found["compared_with_the_first"]] == at
    assert at[0] is not None and at[1] is None  # else nothing was shown
    out, err = generate(words)
    assert f"differs from the first after {at[0]} of 14 tokens" in " ".join(out.split())
    assert "identical to the first" in out and not err
    for run in found["runs"]:
        assert run["policy"] in out and all(line in out for line in run["text"].splitlines())


def test_texts_are_side_by_side_in_a_wide_terminal(run: Run) -> None:
    line = f"generate tiger=4821 --new 3 --policy {POLICY} --least 0 --compare full"
    narrow, wide = (run(line, columns=columns).splitlines() for columns in (60, 120))
    assert max(map(len, narrow)) <= 60 < max(map(len, wide)) <= 120
    assert wide[0].split() == [POLICY, "full"]
    assert [line for line in narrow if line in (POLICY, "full")] == [POLICY, "full"]


@pytest.mark.parametrize(
    ("first", "other", "at"), [([1, 2], [1, 2], None), ([1, 2], [1], 1), ([1], [1, 2], 1), ([1, 2, 3], [1, 4, 3], 1)]
)
def test_first_difference(first: list[int], other: list[int], at: int | None) -> None:
    runs: list[Any] = [SimpleNamespace(tokens=tuple(tokens)) for tokens in (first, other)]
    assert first_difference(*runs) == at


def test_sources_of_the_prompt(tmp_path: Path, piped: Callable[[bytes], None]) -> None:
    path = tmp_path / "prompt.txt"
    path.write_bytes("é=1\r\n\n".encode())
    assert read_prompt("é=1", None, "tiny") == ("é=1", False)
    assert read_prompt(None, str(path), "tiny") == ("é=1\n", False)
    path.write_bytes(b"\xef\xbb\xbfa=1\r\nb=2\n")  # with a byte order mark
    assert read_prompt(None, str(path), "tiny") == ("a=1\nb=2", False)
    for words in ((None, None), ("-", None), (None, "-")):
        piped("é=1\n\n".encode())
        assert read_prompt(*words, "other") == ("é=1\n", False)


def test_the_built_in_sample(piped: Callable[[bytes], None], generate: Generate) -> None:
    piped(b"")
    out, err = generate([])
    assert f"\n{sample().rpartition('?')[2]}{out.strip()}\n" in sample()
    assert "built-in sample" in err


def test_the_sample_keeps_its_fraction(piped: Callable[[bytes], None], capsys: pytest.CaptureFixture[str]) -> None:
    for words, policy in (([], "squeeze+kvcrush@0.2"), (["--least", "99"], "squeeze+kvcrush@0.2:least=99")):
        piped(b"")
        assert main(["generate", "--new", "1", "--json", *words]) == 0
        assert json.loads(capsys.readouterr().out)["runs"][0]["policy"] == policy


def test_prompt_notes() -> None:
    assert not prompt_notes("tiny", 1024, False) and not prompt_notes("other", 2000, False)
    assert "at most 1,024 tokens" in prompt_notes("tiny", 1025, False)[0]


def test_a_seed_makes_sampling_repeatable(facts: Facts) -> None:
    line = "generate tiger= --new 12 --policy full --temperature 2"
    draws = [facts(f"{line} --seed {seed}")["runs"][0]["tokens"] for seed in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]


@pytest.mark.parametrize("more", [[], ["--speculate", POLICY]])
def test_a_tiny_temperature_is_greedy(more: list[str], tiny: Tiny, generate: Generate) -> None:
    """Logits that are divided by it would be infinite."""
    words = [PROMPT, *(more or ["--policy", "full"]), "--new", "6", "--temperature", "1e-320"]
    assert generate(words)[0] == wanted(tiny, PROMPT, "full", 6)[0] + "\n"


def saved(tiny: Tiny, folder: Path, *names: str, **fields: Any) -> str:
    """A folder with the model, and other fields in some of its files."""
    for part in tiny:
        part.save_pretrained(folder)
    for path in [folder / name for name in names]:
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return str(folder)


def test_a_folder_and_its_chat_template(tmp_path: Path, tiny: Tiny, generate: Generate) -> None:
    template = "{{ bos_token }}{% for m in messages %}[{{ m.content }}]{% endfor %}tiger=4821\n?tiger="
    model = saved(tiny, tmp_path, "tokenizer_config.json", chat_template=template)
    words = ["hello", "--model", model, "--policy", "full", "--new", "4", "--chat", "--dtype", "float32"]
    text, _, _ = wanted(tiny, "[hello]tiger=4821\n?tiger=", "full", 4)
    assert generate(words)[0] == f"{text}\n"


def test_a_checkpoint_that_was_saved_without_a_cache_has_one(tmp_path: Path, tiny: Tiny, generate: Generate) -> None:
    """Training with checkpoints of activations leaves `use_cache: false` behind."""
    model = saved(tiny, tmp_path, "config.json", "generation_config.json", use_cache=False)
    text, _, cache = wanted(tiny, PROMPT, POLICY, 4)
    out, err = generate([PROMPT, "--model", model, "--policy", POLICY, "--new", "4", "--json"])
    (run,) = json.loads(out)["runs"]
    assert (run["text"], run["nbytes"], err) == (text, cache.nbytes, "")


def test_a_generation_config_may_have_other_defaults(tmp_path: Path, tiny: Tiny, generate: Generate) -> None:
    """Strings that end a text are read, and its cache and its number of texts are those of the command."""
    other = {"cache_implementation": "static", "num_return_sequences": 3, "do_sample": True, "stop_strings": ["3"]}
    saved(tiny, tmp_path, "generation_config.json", **other)
    text, _, _ = wanted(tiny, PROMPT, "full", 6)
    assert "3" in text[:-1]
    words = [PROMPT, "--model", str(tmp_path), "--new", "6"]
    assert generate([*words, "--policy", "full"])[0] == text[: text.index("3") + 1] + "\n"
    with pytest.warns(kvpolicy.KVPolicyWarning, match="without stop_strings=.* of the generation config"):
        assert generate([*words, "--speculate", "full"])[0] == text + "\n"


def test_interrupted(tiny: Tiny, generate: Generate, monkeypatch: pytest.MonkeyPatch) -> None:
    put = TimedStreamer.put

    def stop(self: TimedStreamer, value: Any) -> None:
        put(self, value)
        if len(self.tokens) == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(TimedStreamer, "put", stop)
    out, err = generate([PROMPT, "--policy", POLICY], 130)
    assert out == wanted(tiny, PROMPT, POLICY, 4)[0] + "\n"
    assert "by Ctrl-C after 4 tokens" in err
    out, _ = generate([PROMPT, "--policy", POLICY, "--compare", "full", "--json"], 130)
    (run,) = json.loads(out)["runs"]
    assert run["interrupted"] and len(run["tokens"]) == 4
    assert not kvpolicy.attach(tiny[0], "full").detach()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("a --policy nonsense", "got 'nonsense'"),
        ("a --compare nonsense", "got 'nonsense'"),
        ("a --model FOLDER", "cannot be loaded"),
        ("a --model llama-3-70b", "because only its config ships; try kvpolicy plan llama-3-70b."),
        ("a --model FOLDER/t5", "cannot be loaded: only decoder-only causal language models are supported."),
        ("a --model FOLDER/mute", "The tokenizer of the model"),
        (f"a --seed {2**64}", "--seed"),
        ("a --file FOLDER/text", "must be given once, got both an argument and --file"),
        ("--file FOLDER/text", "text' cannot be read (no such file or directory)"),
        ("--file=", "The file '' cannot be read"),
        ("--file FOLDER", "cannot be read"),
        ("--file FOLDER/latin", "latin must be UTF-8, got an invalid byte at position 3"),
        ("--file FOLDER/empty", "must contain text, got an empty one"),
        ("-", "must contain text, got an empty one"),
        ("--model other", "must be an argument, a file or standard input, got no prompt"),
        ("a --new 2047", "2,048 positions"),
        ("a --chat", "must have a chat template for --chat"),
        ("a --dtype nonsense", "--dtype must be one of bfloat16, float16, float32, float64, got 'nonsense'"),
        ("a --dtype float8_e4m3fn", "--dtype must be one of bfloat16, float16, float32, float64, got 'float8_e4m3fn'"),
        ("\udcff\udcfea", "text of the argument must be UTF-8, got an invalid character at position 0"),
        ("a --temperature -1", "temperature"),
        ("a --temperature inf", "--temperature must be finite, got inf"),
        ("a --device hpu", "The device 'hpu' cannot be used ("),
        ("a --model FOLDER/heads", "cannot be loaded"),
        ("a --new 0", "--new"),
    ],
)
def test_error_messages(
    line: str, message: str, tmp_path: Path, run: Run, piped: Callable[[bytes], None], tiny: Tiny
) -> None:
    piped(b"")
    (tmp_path / "latin").write_bytes("année".encode("latin-1"))
    (tmp_path / "empty").write_bytes(b"\n")
    if line.endswith("t5"):
        T5Config(d_model=8, num_layers=1).save_pretrained(tmp_path / "t5")
        tiny[1].save_pretrained(tmp_path / "t5")
    if line.endswith("heads"):
        (tmp_path / "heads").mkdir()
        (tmp_path / "heads" / "config.json").write_text('{"model_type": "llama", "num_key_value_heads": 0}')
        tiny[1].save_pretrained(tmp_path / "heads")
    if line.endswith("mute"):
        tiny[0].config.save_pretrained(tmp_path / "mute")
    assert message in run(f"generate {line.replace('FOLDER', str(tmp_path))}", 2)


def test_speculation_gives_the_text_of_the_full_cache(tiny: Tiny, generate: Generate) -> None:
    words = [PROMPT, "--speculate", POLICY, "--new", "10", "--gamma", "3"]
    out, err = generate(words)
    text, tokens, _ = wanted(tiny, PROMPT, "full", 10)
    assert out == f"{text}\n" and "accepted, by streaming:sinks=1@0.3" in err
    found = json.loads(generate([*words, "--json"])[0])["speculation"]
    assert (found["text"], found["tokens"], found["policy"]) == (text, tokens, POLICY)
    assert found["accepted"] + found["rounds"] >= len(tokens) - 1
    for more in (["--compare", "full"], ["--policy", "h2o@0.5"]):
        assert "--speculate must be given without" in generate([*words, *more], 2)[1]
    assert "--gamma must be given with --speculate" in generate([PROMPT, "--gamma", "3"], 2)[1]


def test_the_text_begins_with_its_space(tmp_path: Path, generate: Generate) -> None:
    """With a tokenizer that drops the space of the first word it decodes, in every way to generate."""
    words = [QUESTION, "--model", saved(counting_model(), tmp_path), "--new", "20"]
    assert generate(words)[0] == f"{ANSWER}\n"
    assert json.loads(generate([*words, "--json"])[0])["runs"][0]["text"] == ANSWER
    assert generate([*words, "--speculate", "streaming@0.5"])[0] == f"{ANSWER}\n"
    assert f"\n{ANSWER}\n" in generate([*words, "--compare", "full"])[0]
    assert generate([*words[:-1], "3"])[0] == " paris\ufffd\ufffd\n"


def test_a_printed_text_comes_token_by_token(capsys: pytest.CaptureFixture[str]) -> None:
    """A character is printed once it is whole."""
    _, tokenizer = counting_model()
    prompt, new = (tokenizer.convert_tokens_to_ids(words) for words in (WORDS[1:6], WORDS[6:13]))
    printer = TextPrinter(tokenizer)
    printer.put(torch.tensor([prompt]))
    printed: list[str] = []
    for token in new:
        printer.put(torch.tensor([token]))
        printed.append(capsys.readouterr().out)
    printer.end()
    assert printed == [" paris", "", "", "", "🙂", " on", " river"]
    assert capsys.readouterr().out == "\n"


def test_the_first_step_of_compiled_steps_is_told(
    tiny: Tiny, generate: Generate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same text; what is compiled is tested in tests/engine/test_compiled_generation.py."""
    monkeypatch.setattr(compiled_generation, "is_plain_step", lambda *_: False)
    text, _, _ = wanted(tiny, PROMPT, POLICY, 4)
    out, err = generate([PROMPT, "--policy", POLICY, "--new", "4", "--compile"])
    assert out == text + "\n"
    assert re.search(r"^ *first step +\d+\.\d\d s, with the compilation$", err, re.MULTILINE)
    _, err = generate([PROMPT, "--policy", POLICY, "--new", "4"])
    assert "first step" not in err
    _, err = generate([PROMPT, "--speculate", POLICY, "--compile"], 2)
    assert "--compile must be given without --speculate" in err
    for option, value in (("--tile", ["64"]), ("--hold-codes", [])):
        _, err = generate([PROMPT, "--speculate", POLICY, option, *value], 2)
        assert f"{option} must be given without --speculate" in err
