"""CSR's calibration from a model to a file that the codec reads, also by the command and after an interruption."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

import kvpolicy
from kvpolicy.calibration import Dictionaries, Training, calibrate_csr, calibrate_kvquant, csr, estimate_csr, model_info
from kvpolicy.calibration.csr import UNFINISHED, Progress
from kvpolicy.codecs._files import TENSORS, load
from kvpolicy.codecs.csr.csr import CSR
from kvpolicy.codecs.kvquant import KVQuant
from tests.calibration.test_heads import llama, windows

OPTIONS = Dictionaries(
    key_spaces=("unrotated", "rotated"),
    value_chunks=(1, 2),
    atoms=16,
    pairs=4,
    key_groups="0,1-2",
    training=Training(epochs=3, batch=64),
)


def test_the_codec_reads_what_was_written(tmp_path: Path) -> None:
    model = llama(num_hidden_layers=3)
    meta = calibrate_csr(model, windows(5, 40), tmp_path, OPTIONS)
    found = load(str(tmp_path), "csr")
    assert found.meta["groups"]["keys.pre"] == found.meta["groups"]["keys.post"] == [[0], [1, 2]]
    assert sorted({layer for group in meta["groups"]["values.sn2"] for layer in group}) == [0, 1, 2]
    assert found.tensors["keys.post.1"].shape == (8, 16)
    assert found.tensors["values.sn2.0"].shape == (4, 16)
    for tensor in found.tensors.values():
        assert tensor.dtype == torch.float16
        torch.testing.assert_close(tensor.float().norm(dim=0), torch.ones(16), rtol=0, atol=2e-3)
    for name, losses in meta["losses"].items():
        assert min(losses) <= losses[0], name
    for sn in (1, 2):
        codec = CSR(nnz=4, value_chunks=sn, prompt_atoms=0, dictionary=str(tmp_path))  # pyright: ignore[reportArgumentType]
        codec.check(model_info(model))
    with pytest.raises(ValueError, match="another model"):
        CSR(nnz=4, prompt_atoms=0, dictionary=str(tmp_path)).check(model_info(llama(1, num_hidden_layers=3)))
    assert not (tmp_path / UNFINISHED).exists()


def test_an_interrupted_run_gives_the_same_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calibrate_csr(llama(num_hidden_layers=3), windows(5, 40), tmp_path / "whole", OPTIONS)
    trained = list[str]()
    save = Progress.save

    def interrupted(self: Progress, name: str, state: Any) -> None:
        save(self, name, state)
        trained.append(name)
        if len(trained) == 7:  # in the middle of the second dictionary
            raise KeyboardInterrupt

    monkeypatch.setattr(Progress, "save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        calibrate_csr(llama(num_hidden_layers=3), windows(5, 40), tmp_path / "parts", OPTIONS)
    assert not (tmp_path / "parts" / TENSORS).exists()
    before = trained.copy()
    calibrate_csr(llama(num_hidden_layers=3), windows(5, 40), tmp_path / "parts", OPTIONS)
    assert before[0] not in trained[7:]
    assert trained[7:].count(before[-1]) < before.count(before[0])
    assert (tmp_path / "parts" / TENSORS).read_bytes() == (tmp_path / "whole" / TENSORS).read_bytes()
    assert load(str(tmp_path / "parts"), "csr").meta == load(str(tmp_path / "whole"), "csr").meta


def test_another_unfinished_run_is_not_mixed_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(out: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(csr, "clear", stop)
        calibrate_csr(llama(num_hidden_layers=3), windows(5, 40), tmp_path, OPTIONS)
    with pytest.raises(ValueError, match="must be of the same model, text and options"):
        calibrate_csr(llama(1, num_hidden_layers=3), windows(5, 40), tmp_path, OPTIONS)
    with pytest.raises(ValueError, match="must be of the same model, text and options"):
        calibrate_csr(llama(num_hidden_layers=3), windows(5, 40)[:4], tmp_path, OPTIONS)
    file = next((tmp_path / UNFINISHED).iterdir())
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(ValueError, match="got one that cannot be parsed; try deleting it"):
        calibrate_csr(llama(num_hidden_layers=3), windows(5, 40), tmp_path, OPTIONS)


def test_a_finished_one_is_replaced_only_when_that_is_said(tmp_path: Path) -> None:
    small = replace(OPTIONS, training=Training(epochs=1, batch=64))
    calibrate_csr(llama(num_hidden_layers=3), windows(5, 40), tmp_path, small, name="one")
    calibrate_csr(
        llama(num_hidden_layers=3), windows(5, 40), tmp_path, small, name="two"
    )  # the same, whatever it is called
    other = replace(small, atoms=8)
    for given, told in (
        ((llama(1, num_hidden_layers=3), windows(5, 40), tmp_path, small), "differs in model;"),
        ((llama(num_hidden_layers=3), windows(5, 40)[:4], tmp_path, small), "differs in text;"),
        ((llama(num_hidden_layers=3), windows(5, 40), tmp_path, other), "differs in atoms; try another folder"),
    ):
        with pytest.raises(ValueError, match=told):
            calibrate_csr(*given)
    with pytest.raises(ValueError, match="differs in method"):
        calibrate_kvquant(llama(num_hidden_layers=3), windows(5, 40), tmp_path)
    assert load(str(tmp_path), "csr").meta["atoms"] == 16
    calibrate_csr(llama(num_hidden_layers=3), windows(5, 40), tmp_path, other, force=True)
    assert load(str(tmp_path), "csr").meta["atoms"] == 8
    (tmp_path / TENSORS).write_bytes(b"")
    calibrate_csr(
        llama(num_hidden_layers=3), windows(5, 40), tmp_path, small
    )  # what is damaged may always be made again


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"value_chunks": (3,)}, r"value_chunks must be divisors of pairs=8, got \(3,\)"),
        ({"value_chunks": (16,), "pairs": 16}, "divisors of the head dimension, 8, got 16"),
        ({"key_spaces": ("mid",)}, "key_spaces must be .* both, got"),
        ({"atoms": 4096}, "fewer atoms"),
        ({"value_groups": "0"}, "must contain each of the layers"),
    ],
)
def test_bad_options(tmp_path: Path, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        calibrate_csr(llama(num_hidden_layers=3), windows(5, 40), tmp_path, Dictionaries(**fields))


@pytest.mark.parametrize("fisher", [True, False])
def test_kvquant_reads_what_was_written(tmp_path: Path, fisher: bool) -> None:
    model = llama(num_hidden_layers=3)
    calibrate_kvquant(model, windows(5, 40), tmp_path, bits=(2, 3), fisher=fisher)
    found = load(str(tmp_path), "kvquant")
    assert found.meta["model"]["layers"] == 3
    assert found.tensors["keys.offset.2"].shape == (2, 8)
    codec = KVQuant(bits=3, calibration=str(tmp_path))
    codec.check(model_info(model))
    assert codec.load_calibration(2, "cpu")
    with pytest.raises(ValueError, match="one or several of 1 to 8, got 9"):
        calibrate_kvquant(model, windows(5, 40), tmp_path, bits=(9,))
    with pytest.raises(ValueError, match="must be at least 128, got 125"):
        calibrate_kvquant(model, windows(5, 40), tmp_path, tokens=122)
    with pytest.raises(ValueError, match="fraction of outliers must be"):
        calibrate_kvquant(model, windows(5, 40), tmp_path, outliers=1.0)
    assert json.loads((tmp_path / "calibration.json").read_text())["method"] == "kvquant"


@pytest.mark.parametrize("kind", ["Gemma2", "Gemma3Text"])
def test_layers_that_bound_themselves_are_left_out(tmp_path: Path, kind: str) -> None:
    """A file has the layers under the policy, which are not the first ones."""
    layers = ["sliding_attention", "full_attention"] * 2
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = getattr(transformers, f"{kind}Config")(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=4,
        head_dim=8,
        query_pre_attn_scalar=8,
        vocab_size=40,
        sliding_window=12,
        layer_types=layers,
        attn_implementation="eager",
        **sizes,
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    calibrate_kvquant(model, windows(5, 40), tmp_path / "k", bits=(3,))
    calibrate_csr(
        model,
        windows(5, 40),
        tmp_path / "c",
        replace(OPTIONS, key_groups="all", key_spaces=("unrotated",), value_chunks=(2,)),
    )
    assert model_info(model).indices == (1, 3)
    for codec in (KVQuant(calibration=str(tmp_path / "k")), CSR(nnz=4, prompt_atoms=0, dictionary=str(tmp_path / "c"))):
        with kvpolicy.attach(model, kvpolicy.Policy(codec=codec)):
            assert (
                model.generate(windows(5, 40)[0][None], max_new_tokens=3, do_sample=False, pad_token_id=0).shape[1]
                == 43
            )


def test_a_refused_run_announces_nothing(tmp_path: Path) -> None:
    seconds: list[float] = []
    calibrate_csr(llama(num_hidden_layers=3), windows(5, 40), tmp_path, OPTIONS, announce=seconds.append)
    assert len(seconds) == 1 and seconds[0] > 0
    with pytest.raises(ValueError, match="--force"):
        calibrate_csr(llama(1, num_hidden_layers=3), windows(5, 40), tmp_path, OPTIONS, announce=seconds.append)
    assert len(seconds) == 1


TIMED = Dictionaries(
    key_spaces=("unrotated", "rotated"),
    value_chunks=(2,),
    atoms=16,
    pairs=4,
    tokens=200,
    training=Training(epochs=3, batch=64, held_out=0.05),
)
TEXTS = [torch.arange(3, 53)] * 5
"""40 tokens of each are used: 160 vectors of the 4 heads, in each of 8 layers."""


def test_the_estimate_counts_windows_steps_and_initial_atoms(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_second(run: Callable[[], object]) -> float:
        run()
        return 1.0

    monkeypatch.setattr(csr, "_timed", one_second)
    vectors = 5 * 40 * 4 * 8
    steps = vectors / 64 * (3 + 0.05 * 4)
    dictionaries = 3 * 8
    model = kvpolicy.tiny()[0]
    assert estimate_csr(model, TEXTS, TIMED) == pytest.approx(5 + 3 * steps + dictionaries)
    # Above 256 atoms, the initial ones are scaled up by the square of their number.
    assert estimate_csr(model, TEXTS, replace(TIMED, atoms=512)) == pytest.approx(5 + 3 * steps + 4 * dictionaries)


def test_other_files_beside_the_checkpoints_stay(tmp_path: Path) -> None:
    small = replace(OPTIONS, training=Training(epochs=1, batch=64))
    (tmp_path / UNFINISHED).mkdir()
    (tmp_path / UNFINISHED / "notes.txt").write_text("mine")
    calibrate_csr(llama(num_hidden_layers=3), windows(5, 40), tmp_path, small)
    assert [file.name for file in (tmp_path / UNFINISHED).iterdir()] == ["notes.txt"]
    save_file({"mine": torch.ones(1)}, tmp_path / UNFINISHED / "mine.safetensors")
    csr.clear(tmp_path)
    assert (tmp_path / UNFINISHED / "mine.safetensors").exists()


def test_a_plan_counts_the_tensors_that_are_there_now(tmp_path: Path) -> None:
    small = replace(OPTIONS, training=Training(epochs=1, batch=64))
    model = llama(num_hidden_layers=3)
    policy = f"csr:nnz=4:value_chunks=1:prompt_atoms=0:dictionary={tmp_path}"
    sizes: list[int] = []
    for atoms in (16, 8):
        calibrate_csr(model, windows(5, 40), tmp_path, replace(small, atoms=atoms), force=True)
        sizes.append(kvpolicy.plan(model, policy, prompt=64).resident_nbytes)
    assert sizes[0] > sizes[1] > 0
