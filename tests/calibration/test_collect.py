"""What is collected is what the model computes: vectors, gradients, moments and windows of text."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    FalconConfig,
    FalconForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

import kvpolicy
from kvpolicy import DoubleSparsity, KVPolicyError, LowRank
from kvpolicy.calibration import (
    calibrate_channels,
    calibrate_kvquant,
    calibrate_lowrank,
    collect,
    identity,
    model_info,
    read_texts,
    token_windows,
)
from kvpolicy.calibration.lowrank import Moments, basis_of, collect_moments
from kvpolicy.calibration.samples import fisher_information
from kvpolicy.codecs._files import CalibrationFile, check_model, load
from kvpolicy.hf.discovery import find_sites
from tests.calibration.test_heads import llama, projected, windows


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 100.0},
        {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 16},
    ],
)
def test_keys_without_the_embedding_are_the_projections(rope: dict[str, Any]) -> None:
    model = llama(rope_parameters=rope)
    texts = windows(2, 20)
    samples = collect(model, texts, tokens=1000)
    expected = [projected(model, ids) for ids in texts]
    for layer in range(2):
        keys = torch.cat([each[layer][1] for each in expected], 1)
        torch.testing.assert_close(samples.unrotated[layer], keys, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(samples.values[layer], torch.cat([each[layer][2] for each in expected], 1))
        assert not torch.allclose(samples.rotated[layer], keys, atol=1e-2)


def test_memory_is_bounded_and_the_draw_is_fixed() -> None:
    model = llama()
    one, again, other = (collect(model, windows(3, 20), tokens=10, seed=seed) for seed in (0, 0, 1))
    assert one.unrotated[1].shape == one.rotated[0].shape == one.values[1].shape == (2, 12, 8)
    assert torch.equal(one.unrotated[1], again.unrotated[1])
    assert not torch.equal(one.unrotated[1], other.unrotated[1])
    assert not collect(model, windows(3, 20), key_spaces=("rotated",)).unrotated


def test_squared_gradients_are_those_of_the_loss() -> None:
    """Against finite differences of what the values projection adds."""
    model = llama(initializer_range=0.5)
    ids = windows(1, 6)[0]
    # The first channel of a key turns by two radians up to this token.
    layer = 1
    head = 1
    token = 2
    channel = 0
    fisher = collect(model, [ids], fisher=True).fisher[layer]
    assert fisher.shape == (2, 2, 6, 8)

    def loss(amount: float, side: str) -> float:
        def add(module: Any, args: Any, output: Tensor) -> Tensor:
            changed = output.clone()
            changed[0, token, head * 8 + channel] += amount
            return changed

        handle = getattr(find_sites(model).layers[layer].attention, side).register_forward_hook(add)
        with torch.no_grad():
            result: Any = model(ids[None], labels=ids[None]).loss
        handle.remove()
        return float(result)

    for which, side in enumerate(("k_proj", "v_proj")):
        slope = (loss(1e-2, side) - loss(-1e-2, side)) / 2e-2
        assert float(fisher[which, head, token, channel]) == pytest.approx(slope**2, rel=0.02, abs=1e-12)


def test_gradients_do_not_depend_on_what_is_trained() -> None:
    """Adapters train some weights, and frozen models none."""
    model: Any = llama()
    want = collect(model, windows(3, 20), fisher=True).fisher
    model.requires_grad_(False)
    with torch.inference_mode():
        frozen = collect(model, windows(3, 20), fisher=True).fisher
    model.model.layers[1].self_attn.q_proj.requires_grad_(True)
    adapted = collect(model, windows(3, 20), fisher=True).fisher
    for layer, squares in want.items():
        assert squares.any() and torch.equal(frozen[layer], squares) and torch.equal(adapted[layer], squares)
    assert not model.get_input_embeddings()._forward_hooks
    assert all(parameter.grad is None for parameter in model.parameters())


def test_layers_without_an_embedding_are_not_unrotated() -> None:
    """SmolLM3 has an embedding in some layers alone."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = SmolLM3Config(
        num_hidden_layers=2, intermediate_size=32, vocab_size=40, no_rope_layers=[1, 0], pad_token_id=0, **sizes
    )
    model = SmolLM3ForCausalLM(config).eval()
    ids = windows(1, 20)[0]
    samples = collect(model, [ids], tokens=1000)
    for layer, (_, keys, _) in projected(model, ids).items():
        torch.testing.assert_close(samples.unrotated[layer], keys, rtol=1e-4, atol=1e-5)
        assert torch.equal(samples.unrotated[layer], samples.rotated[layer]) is (layer == 1)


def test_heads_that_the_stock_cache_repeats_are_counted_once() -> None:
    """Grouped Falcon's; the gradient of a key is the sum of its copies'."""
    torch.manual_seed(0)
    config = FalconConfig(
        hidden_size=32,
        num_attention_heads=4,
        num_kv_heads=2,
        num_hidden_layers=2,
        ffn_hidden_size=32,
        vocab_size=40,
        new_decoder_architecture=True,
        alibi=False,
        num_ln_in_parallel_attn=None,
        initializer_range=0.5,
    )
    model = FalconForCausalLM(config).eval()
    ids = windows(1, 6)[0]
    samples = collect(model, [ids], key_spaces=("rotated",), fisher=True)
    attention = find_sites(model).layers[1].attention
    assert samples.rotated[1].shape == samples.values[1].shape == (2, 6, 8)
    assert samples.fisher[1].shape == (2, 2, 6, 8)

    def run(amount: float) -> tuple[float, Tensor]:
        found: list[Tensor] = []

        def add(module: Any, args: Any, output: Tensor) -> Tensor:
            split = output.clone().unflatten(-1, (2, 4, 8))  # of each head two queries, a key and a value
            split[0, 2, 1, 3, 5] += amount
            found.append(split[0, :, :, 3].transpose(0, 1))
            return split.flatten(2)

        handle = attention.get_submodule("query_key_value").register_forward_hook(add)
        with torch.no_grad():
            loss: Any = model(ids[None], labels=ids[None]).loss
        handle.remove()
        return float(loss), found[0]

    assert torch.equal(samples.values[1], run(0.0)[1])
    slope = (run(1e-2)[0] - run(-1e-2)[0]) / 2e-2
    assert float(samples.fisher[1][1, 1, 2, 5]) == pytest.approx(slope**2, rel=0.02)


def test_a_window_may_be_a_row_of_a_batch() -> None:
    model = llama()
    texts = windows(3, 20)
    one = collect(model, texts)
    other = collect(model, [ids[None].int() for ids in texts])
    assert torch.equal(one.unrotated[1], other.unrotated[1])
    stacked: Any = torch.stack(texts)
    assert torch.equal(one.unrotated[1], collect(model, stacked).unrotated[1])


@pytest.mark.parametrize(
    ("window", "told"),
    [
        (torch.ones(2, 5, dtype=torch.int64), r"must have the shape \[n\] or \[1, n\], got \[2, 5\]"),
        (torch.tensor(5), r"got \[\]"),
        (torch.ones(5), r"must be an integer tensor \[n\], got float32"),
        ([1, 2, 3], "got list"),
    ],
)
def test_what_is_no_window_is_told(tmp_path: Path, window: Any, told: str) -> None:
    for run in (collect, lambda model, texts: calibrate_kvquant(model, texts, tmp_path)):
        with pytest.raises(TypeError, match=told):
            run(llama(), [window])


def test_a_calibration_knows_its_model() -> None:
    model = llama()
    info = model_info(model)
    assert info[:3] == (2, 2, 8)
    assert info.weights is not None and len(info.weights) == 64
    found = CalibrationFile({"model": identity(model)}, {})
    check_model(found, "f", model_info(model.bfloat16()))
    with pytest.raises(ValueError, match="weights differ"):
        check_model(found, "f", model_info(llama(seed=1)))
    with pytest.raises(ValueError, match="with 2 layers instead of 3"):
        check_model(found, "f", model_info(llama(num_hidden_layers=3)))


def test_no_folder_of_this_machine_is_written_down() -> None:
    assert identity(kvpolicy.tiny()[0])["name"] == "tiny"
    assert identity(llama())["name"] == "LlamaForCausalLM"


def letters(bos: int | None = 1) -> Any:
    def encode(text: str, **_: Any) -> list[int]:
        return [ord(letter) for letter in text]

    return SimpleNamespace(bos_token_id=bos, encode=encode)


def test_windows_begin_with_bos_and_miss_nothing() -> None:
    texts = ["abcdefghijklmnopqrstuvwxyz" * 2, "A" * 19]
    cut = token_windows(letters(), texts, 21, 99, 0)
    assert [len(window) for window in cut] == [21, 21, 20]
    assert all(int(window[0]) == 1 for window in cut)
    assert "".join(chr(token) for window in cut for token in window[1:].tolist()) == texts[0][:40] + texts[1]
    assert len(token_windows(letters(None), texts, 21, 99, 0)[0]) == 21
    assert token_windows(letters(), ["ab"], 21, 99, 0)[0].tolist() == [1, 97, 98]  # better than nothing


def test_fewer_windows_are_drawn_by_the_seed() -> None:
    texts = [chr(97 + number) * 20 for number in range(20)]
    picks = [[window.tolist() for window in token_windows(letters(), texts, 21, 5, seed)] for seed in (0, 0, 1)]
    assert len(picks[0]) == 5
    assert picks[0] == picks[1] != picks[2]


def test_short_windows_are_drawn_where_there_are_no_longer_ones() -> None:
    texts = ["a" * 38, "b" * 17, "c" * 38]  # windows of 20 and 18, of 17, of 20 and 18
    for seed in range(4):
        sizes = [[len(window) for window in token_windows(letters(None), texts, 20, most, seed)] for most in (1, 2, 3)]
        assert sizes[:2] == [[20], [20, 20]]
        assert sorted(sizes[2]) == [18, 20, 20]


def test_texts_are_read_from_files_and_folders(tmp_path: Path) -> None:
    for name, text in (("b.txt", "two"), ("a.txt", "one"), ("c.md", "no")):
        (tmp_path / name).write_text(text)
    assert read_texts([tmp_path, tmp_path / "c.md"]) == ["one", "two", "no"]
    (tmp_path / "bad.txt").write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(ValueError, match=r"bad\.txt must be a readable UTF-8 file, got"):
        read_texts([tmp_path])
    with pytest.raises(ValueError, match="must be a readable UTF-8 file, got"):
        read_texts([tmp_path / "none.txt"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="must contain text to calibrate on, got none"):
        read_texts([tmp_path / "empty"])


def test_moments_are_those_of_all_tokens() -> None:
    """Of each head, and of two heads as one vector."""
    model = llama()
    texts = windows(2, 40)
    found = collect_moments(model, texts)
    joint = collect_moments(model, texts, groups=[2])
    samples = collect(model, texts, tokens=10**6)
    parts = {"keys.post": samples.rotated, "keys.pre": samples.unrotated, "values": samples.values}
    for part, layers in parts.items():
        for layer, x in layers.items():
            own = found[layer][part]
            x = x.double()
            torch.testing.assert_close(own.mean, x.mean(1), atol=1e-6, rtol=1e-5)
            torch.testing.assert_close(own.product, x.mT @ x / x.shape[1], atol=1e-6, rtol=1e-5)
            both = joint[layer][f"{part}.joint2"]
            long = torch.cat([*x], -1)
            torch.testing.assert_close(both.mean[0], long.mean(0), atol=1e-6, rtol=1e-5)
            torch.testing.assert_close(both.product[0], long.mT @ long / len(long), atol=1e-6, rtol=1e-5)


def test_fisher_information_is_that_of_all_tokens() -> None:
    """Windows of different lengths, whose loss is a mean, weigh as much as their tokens."""
    model = llama(initializer_range=0.5)
    texts = [windows(1, 40)[0], windows(1, 10)[0]]
    found = fisher_information(model, texts)
    every = [collect(model, [ids], tokens=10**6, key_spaces=("rotated",), fisher=True).fisher for ids in texts]
    for layer, both in found.items():
        squares = [own[layer].double() * len(ids) ** 2 for own, ids in zip(every, texts, strict=True)]
        want = torch.cat(squares, 2).mean((1, 2, 3))
        torch.testing.assert_close(torch.tensor(both, dtype=torch.float64), want, rtol=1e-5, atol=0)


def test_each_token_counts_once_in_the_salience_of_channels(tmp_path: Path) -> None:
    """Of two windows, the longer one counts more."""
    model = llama(vocab_size=90)
    # Tokens of other kinds, so that the windows differ by more than chance.
    texts = [torch.arange(3, 33).repeat(5), torch.arange(40, 85).repeat(10)]
    found: list[Tensor] = []
    for number, some in enumerate((texts[:1], texts[1:], texts)):
        calibrate_channels(model, some, tmp_path / str(number))
        found.append(DoubleSparsity(channels=4, calibration=str(tmp_path / str(number))).load_salience(1))
    short, long, both = found
    torch.testing.assert_close(both, (150 * short + 450 * long) / 600)
    assert not torch.allclose(both, (short + long) / 2, rtol=1e-3)


def test_directions_are_those_of_most_variance() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 500, 6, generator=generator).double() * torch.tensor([3.0, 0.1, 1.0, 0.0, 2.0, 0.5]) + 7
    found = basis_of(Moments(x.mean(1), x.mT @ x / 500))
    centered = x - x.mean(1, keepdim=True)
    assert (found["energy"].diff() <= 0).all() and (found["energy"] >= 0).all()
    along = (centered @ found["basis"].double()).square().mean(1)
    torch.testing.assert_close(along, found["energy"].double(), atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(found["mean"].double(), x.mean(1), atol=1e-5, rtol=0)


def test_files(tmp_path: Path) -> None:
    model = llama()
    texts = windows(2, 80)
    meta = calibrate_lowrank(model, texts, tmp_path)
    assert meta["tokens"] == 160 and sorted(meta["energy"]) == ["keys.post", "keys.pre", "values"]
    assert all(0.2 < share <= 1 for share in meta["energy"].values())
    written = load(str(tmp_path), "lowrank")
    assert {name.rpartition(".")[0] for name in written.tensors} == {
        *(f"{part}.{what}" for part in ("keys.pre", "keys.post", "values") for what in ("mean", "basis", "energy")),
        "queries.basis",
        "queries.energy",
    }
    calibrate_lowrank(model, texts, tmp_path)  # the same again
    with pytest.raises(KVPolicyError, match="force"):
        calibrate_lowrank(model, texts[:1] * 3, tmp_path)
    calibrate_lowrank(model, texts, tmp_path, key_spaces=["unrotated"], force=True)
    names = {name.rpartition(".")[0] for name in load(str(tmp_path), "lowrank").tensors}
    assert names == {f"{part}.{what}" for part in ("keys.pre", "values") for what in ("mean", "basis", "energy")}


def test_files_with_groups_and_information(tmp_path: Path) -> None:
    model = llama()
    texts = windows(2, 80)
    meta = calibrate_lowrank(model, texts, tmp_path, key_spaces=["rotated"], head_groups=[2], fisher=True)
    assert meta["head_groups"] == [2] and meta["fisher"] and sorted(meta["energy"]) == ["keys.post", "values"]
    found = load(str(tmp_path), "lowrank").tensors
    heads, dim = found["values.mean.0"].shape
    assert found["values.joint2.basis.0"].shape == (heads // 2, 2 * dim, 2 * dim)
    assert torch.equal(found["keys.post.joint2.mean.1"].flatten(), found["keys.post.mean.1"].flatten())
    want = {layer: torch.tensor(both) for layer, both in fisher_information(model, texts).items()}
    assert all(torch.equal(found[f"fisher.{layer}"], both) for layer, both in want.items())
    codec = LowRank(rank=2, ranks="fisher", head_group=2, calibration=str(tmp_path))
    codec.check(model_info(model))
    with pytest.raises(KVPolicyError, match=r"differs in head_groups, fisher; try"):
        calibrate_lowrank(model, texts, tmp_path, key_spaces=["rotated"])


@pytest.mark.parametrize("group", [1, 3, 4])
def test_groups_divide_the_heads(tmp_path: Path, group: int) -> None:
    with pytest.raises(KVPolicyError, match=f"must be at least 2 and divide the 2 KV heads of the model, got {group}"):
        calibrate_lowrank(llama(), windows(2, 80), tmp_path, head_groups=[group])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"key_spaces": ["both"]}, "must be of rotated and unrotated, got both"),
        ({"key_spaces": []}, "got none"),
    ],
)
def test_options(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(KVPolicyError, match=message):
        calibrate_lowrank(llama(), windows(2, 80), tmp_path, **options)
