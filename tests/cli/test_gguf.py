"""Commands on models in GGUF files: what transformers is asked for, and a small file that is written here."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvpolicy
from kvpolicy.cli.app import main
from kvpolicy.cli.model_loading import load
from kvpolicy.hf import embedded
from kvpolicy.hf.embedded import checkpoint_of
from tests.cli.conftest import Run

HEAD_DIM = 16


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "find_spec", lambda name: object())


@pytest.mark.usefixtures("installed")
def test_a_path_is_a_folder_and_a_file_and_so_is_a_name_on_the_hub(tmp_path: Path) -> None:
    path = tmp_path / "small.gguf"
    path.write_bytes(b"GGUF")
    assert checkpoint_of(str(path)) == (str(tmp_path), {"gguf_file": "small.gguf"})
    assert checkpoint_of("Qwen/Qwen3-4B-GGUF/q4.gguf") == ("Qwen/Qwen3-4B-GGUF", {"gguf_file": "q4.gguf"})
    assert checkpoint_of("Qwen/Qwen3-4B") == ("Qwen/Qwen3-4B", {}) == checkpoint_of("Qwen/Qwen3-4B")
    for missing in ("none.gguf", "./a/b/none.gguf", "/a/none.gguf", "a/b/c/none.gguf"):
        with pytest.raises(kvpolicy.KVPolicyError, match=r"must exist, got .*; try its path, or OWNER/REPOSITORY/FILE"):
            checkpoint_of(missing)


@pytest.mark.usefixtures("installed")
def test_both_loaders_are_given_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "small.gguf"
    path.write_bytes(b"GGUF")
    model, tokenizer = kvpolicy.tiny()
    asked: list[tuple[str, Any]] = []

    def answering(found: Any) -> Any:
        def from_pretrained(name: str, **options: Any) -> Any:
            asked.append((name, options["gguf_file"]))
            return found

        return from_pretrained

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", answering(model))
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", answering(tokenizer))
    monkeypatch.setattr(embedded, "config_of", lambda name: model.config)
    assert load(str(path)) == (model, tokenizer)
    assert asked == [(str(tmp_path), "small.gguf")] * 2


def test_without_the_package_it_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    path = tmp_path / "small.gguf"
    path.write_bytes(b"GGUF")
    monkeypatch.setattr(embedded, "find_spec", lambda name: None)
    for words in (["generate", "a", "--gguf", str(path)], ["plan", str(path)], ["bench", "full", "--model", str(path)]):
        said = run(words, 2)
        assert "A GGUF file needs the package gguf, which is not installed; run pip install 'kvpolicy[gguf]'." in said


@pytest.mark.skipif(importlib.util.find_spec("gguf") is None, reason="needs the extra gguf")
def test_a_file_generates_and_is_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str], run: Run) -> None:
    path = written(tmp_path / "small.gguf")
    assert main(["generate", "the quick brown fox", "--gguf", str(path), "--policy", "window@0.5", "--new", "4"]) == 0
    assert "kept" in capsys.readouterr().err
    assert "window@0.5" in run(["plan", str(path), "window@0.5", "--prompt", "100", "--new", "4"])
    model, tokenizer = load(str(path))
    assert model.config.num_hidden_layers == 2 and tokenizer("a b").input_ids


def written(path: Path) -> Path:
    """A GGUF file of a Llama of two layers with random weights."""
    import numpy as np

    package: Any = importlib.import_module("gguf")

    rng = np.random.default_rng(0)
    writer: Any = package.GGUFWriter(path, "llama")
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *map(chr, range(33, 127))]
    hidden = 2 * HEAD_DIM
    writer.add_context_length(256)
    writer.add_embedding_length(hidden)
    writer.add_block_count(2)
    writer.add_feed_forward_length(64)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_rope_freq_base(10000.0)
    writer.add_file_type(0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * len(tokens))
    writer.add_token_types([2, 3, 3, *[6] * 256, *[1] * (len(tokens) - 259)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    shapes = {"token_embd": (len(tokens), hidden), "output": (len(tokens), hidden), "output_norm": (hidden,)}
    for layer in range(2):
        shapes |= {f"blk.{layer}.attn_{part}": (hidden, hidden) for part in ("q", "k", "v", "output")}
        shapes |= {f"blk.{layer}.ffn_{part}": (64, hidden) for part in ("gate", "up")}
        shapes |= {f"blk.{layer}.ffn_down": (hidden, 64)}
        shapes |= {f"blk.{layer}.{part}_norm": (hidden,) for part in ("attn", "ffn")}
    for name, shape in shapes.items():
        tensor = np.ones(shape) if len(shape) == 1 else rng.normal(0, 0.1, shape)
        writer.add_tensor(f"{name}.weight", tensor.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
