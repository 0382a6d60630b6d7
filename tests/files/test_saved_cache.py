"""A cache that was saved and loaded goes on bit for bit, and what is not such a file is refused in one sentence."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import kvpolicy
from kvpolicy import KVPolicyError, Policy, PolicyCache
from kvpolicy.hf import cache_file
from kvpolicy.hf.cache_header import KEY, read_header
from kvpolicy.hf.saved_cache import TOKENS
from kvpolicy.registry import names
from tests.conformance.access import static_tensors
from tests.conformance.models import build
from tests.conformance.play import forward, make_batch
from tests.conformance.policies import MERGERS, star_of_three, words
from tests.engine.live import tensors_of
from tests.sampling import product

TURNS = [26, 1, 1, 1, 1, 1, 6, 1, 1, 1, 1, 1, 1]
CUT = 32
"""Columns before the file: a prompt and some steps."""

OTHERS = [
    "uniform/adakv+h2o+compensate@0.5",
    "squeeze/adakv+snapkv:window=6:kernel=3+tokenwise:residual_length=2:block_size=3@0.5",
    "uniform/even+h2o:decode=grow@0.5",
    "uniform/adakv+expected:sinks=2:horizon=6:decode=grow@0.5",
    *(words("h2o", name) for name in MERGERS if name != "drop"),
    "h2o+quest:read=6:page=2:dense=0:resort=3@0.8",
    words("h2o", "tokenwise", "sparq"),
    words("h2o", "centroids"),
    words("h2o", "retrieval"),
    words("h2o", "shadowkv"),
    "window+shadowkv:joint=true:read=6:page=2:rank=3:recent=2@0.5",
    "h2o+reuse:every=2:dense=0/exact:read=6@0.8",
    "h2o+labels:read=6:channels=3:dense=0:host=true@0.5",
    words("kvzip"),
]
EVERY = [*(words(*row) for row in star_of_three()), *OTHERS]
OWN = ["keyformer", "kvzap", "rkv", "triattention", "vase"]
"""Selectors with a state of their own, beside a score: queries, offsets, what was generated."""
SOME = [
    *OTHERS,
    words("squeeze", "snapkv", "plain"),
    *(words("uniform", "h2o", codec) for codec in names("codec")),
]


def start(model: Any, lengths: list[int], **expected: Any) -> tuple[PolicyCache, Tensor, Tensor]:
    """A cache in the middle of a conversation, and the whole of it."""
    ids, mask = make_batch(lengths, TURNS)
    cache = PolicyCache(model, **expected)
    forward(model, ids, mask, 0, TURNS[0], cache)
    for column in range(TURNS[0], CUT):
        forward(model, ids, mask, column, column + 1, cache)
    return cache, ids, mask


def go_on(model: Any, cache: PolicyCache, ids: Tensor, mask: Tensor) -> list[Tensor]:
    """The logits of the rest: steps, another prompt where there is one, steps."""
    logits: list[Tensor] = []
    column = CUT
    while column < ids.shape[1]:
        stop = column + (6 if column == CUT else 1)
        logits.append(forward(model, ids, mask, column, stop, cache))
        column = stop
    return logits


def check_same(model: Any, path: Path, cache: PolicyCache, ids: Tensor, mask: Tensor) -> None:
    """A loaded cache and the one that was saved say the same, and go on alike, from memory that is aligned alike."""
    loaded = PolicyCache.load(model, path)
    assert all(t.untyped_storage().data_ptr() % 64 == 0 for _, t in tensors_of(loaded))
    assert _told(loaded) == _told(cache)
    assert loaded.plan == cache.plan and loaded.policy == cache.policy and loaded.nbytes == cache.nbytes
    rows = zip(go_on(model, cache, ids, mask), go_on(model, loaded, ids, mask), strict=True)
    assert all(torch.equal(one, other) for one, other in rows)
    assert all(torch.equal(a, b) for a, b in zip(static_tensors(cache), static_tensors(loaded), strict=True))


def _told(cache: PolicyCache) -> dict[str, Any]:
    """The report, without what the last step read, which may have had fewer rows."""
    report = cache.report().as_dict()
    layers = [{name: value for name, value in layer.items() if name != "moved"} for layer in report["layers"]]
    return report | {"layers": layers, "moved": None}


@product(("policy", "lengths"), EVERY, [[26, 17, 11], [26]], sample=[(policy, [26, 17, 11]) for policy in SOME])
def test_it_goes_on_bit_for_bit(policy: str, lengths: list[int], path: Path) -> None:
    model = build("llama", layers=2)
    with kvpolicy.attach(model, policy):
        cache, ids, mask = start(model, lengths)
        cache.save(path, tokens=ids[:, :CUT], compress="zlib")
        check_same(model, path, cache, ids, mask)
    assert torch.equal(cache_file.read(path).tensors[TOKENS], ids[:, :CUT])


@pytest.mark.parametrize("selector", OWN)
def test_states_of_selectors_are_saved_as_they_are(selector: str, path: Path) -> None:
    """Right after a whole prompt, without compression: a file takes no tensors that share memory, of two layers say."""
    model = build("llama")
    ids, mask = make_batch([26, 26], TURNS)
    with kvpolicy.attach(model, words(selector)):
        cache = PolicyCache(model)
        forward(model, ids, mask, 0, TURNS[0], cache)
        cache.save(path)
        loaded = PolicyCache.load(model, path)
        for column in range(TURNS[0], CUT):
            both = [forward(model, ids, mask, column, column + 1, each) for each in (cache, loaded)]
            assert torch.equal(*both)


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("gemma2", torch.float32),  # layers that no policy manages are saved with the others
        ("falcon_grouped", torch.float32),
        ("mimo_v2_flash", torch.float32),  # their values are smaller than their keys
        ("llama", torch.bfloat16),
        ("llama", torch.float16),
    ],
)
def test_families_and_dtypes(family: str, dtype: torch.dtype, path: Path) -> None:
    model = build(family, dtype)
    with kvpolicy.attach(model, words("h2o", "kivi")):
        cache, ids, mask = start(model, [26, 17])
        cache.save(path)
        check_same(model, path, cache, ids, mask)


def test_the_same_cache_is_the_same_file_and_loses_nothing(path: Path) -> None:
    """Such as it is by its hash, for tools that store or send a file once."""
    with saved(path, words("h2o", "kivi")) as model:
        wanted = path.read_bytes()
        for _ in range(8):
            PolicyCache.load(model, path).save(path)
            assert path.read_bytes() == wanted


@pytest.mark.parametrize("family", ["gemma2", "llama", "lfm2", "qwen3_5"])
def test_a_cache_of_autocast_is_loaded_under_autocast(family: str, path: Path) -> None:
    """Where a GPU is present, its dtype is not that of a model on the CPU. Stock layers may hold the model's."""
    model = build(family)
    with kvpolicy.attach(model, "h2o@0.5"):
        with torch.autocast("cpu", torch.bfloat16):
            cache, ids, mask = start(model, [26, 17])
            assert cache.policy_layers[0].keys.dtype == torch.bfloat16
            cache.save(path)
            check_same(model, path, cache, ids, mask)
        with pytest.raises(kvpolicy.KVPolicyError, match="must be for keys and values in float32, got bfloat16"):
            PolicyCache.load(model, path)


@pytest.mark.parametrize(
    "spec",
    [
        "snapkv:window=6:kernel=3+kivi:group_size=4:residual_length=4@0.5",
        "full",
        "h2o+tokenwise:block_size=3:residual_length=2+sparq:read=5:channels=3@0.8",
        "full+centroids:read=8:page=2",
    ],
)
def test_after_beams_and_in_inference_mode(spec: str, path: Path) -> None:
    model = build("llama", layers=2)
    with kvpolicy.attach(model, spec):
        with torch.inference_mode():
            cache, ids, mask = start(model, [26, 17])
        cache.batch_repeat_interleave(2)
        cache.reorder_cache(torch.tensor([0, 0, 3, 2]))
        ids = ids[[0, 0, 1, 1]]
        mask = mask[[0, 0, 1, 1]]
        cache.save(path)
        check_same(model, path, cache, ids, mask)


def test_room_for_more(path: Path) -> None:
    """A file loads with the slots that it was saved with; `new` asks for more."""
    model = build("llama")
    with kvpolicy.attach(model, "h2o:decode=grow@0.5"):
        cache, ids, mask = start(model, [26, 17], new=8)
        cache.save(path)
        assert PolicyCache.load(model, path).nbytes == cache.nbytes
        roomy = PolicyCache.load(model, path, new=64)
        assert roomy.nbytes > cache.nbytes
        before = roomy.nbytes
        rows = zip(go_on(model, cache, ids, mask), go_on(model, roomy, ids, mask), strict=True)
        assert all(torch.allclose(one, other, atol=1e-5) for one, other in rows)
        assert roomy.nbytes == before


@pytest.mark.parametrize("budget", ["200", "20KB"])
def test_pages_of_a_growing_cache_under_a_budget_beyond_its_text(budget: str, path: Path) -> None:
    """The cache was given pages for its prompt and what is known to follow, and counts no others."""
    model = build("llama", layers=2)
    ids, mask = make_batch([26], TURNS)
    with kvpolicy.attach(model, f"uniform/adakv+h2o:decode=grow+tokenwise:residual_length=4:block_size=4@{budget}"):
        cache = PolicyCache(model)
        forward(model, ids, mask, 0, CUT, cache)
        assert int(cache.policy_layers[0].budget) <= 216
        cache.save(path)
        check_same(model, path, cache, ids, mask)


def test_compressed_codes_are_the_same_in_fewer_bytes(tmp_path: Path) -> None:
    model, tokenizer = kvpolicy.tiny()
    ids = tokenizer("the same words again and again, " * 12, return_tensors="pt").input_ids
    sizes: list[int] = []
    with torch.no_grad(), kvpolicy.attach(model, "kivi:residual_length=0:group_size=16"):
        cache = PolicyCache(model)
        model(ids, cache=cache)
        for name in (None, "zlib"):
            cache.save(tmp_path / f"{name}.safetensors", compress=name)
            sizes.append((tmp_path / f"{name}.safetensors").stat().st_size)
        plain, packed = (cache_file.read(tmp_path / f"{name}.safetensors").tensors for name in (None, "zlib"))
    assert sizes[1] < 0.9 * sizes[0]
    assert plain.keys() == packed.keys() and all(torch.equal(plain[name], packed[name]) for name in plain)


def test_codes_that_would_not_become_smaller_stay_as_they_are() -> None:
    noise = torch.randint(256, (1000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    held = {f"layers.0.codes.{number}.keys": codes for number, codes in enumerate((noise, torch.zeros_like(noise)))}
    names, blobs = cache_file._pack(held)  # pyright: ignore[reportPrivateUsage]
    assert [*names] == [*blobs] == ["layers.0.codes.1.keys"]


def edited(path: Path, change: Callable[[dict[str, Any], dict[str, Tensor]], object]) -> None:
    """Write a file again with another header or other tensors, as if a forger had computed the hash as well."""
    content = cache_file.read(path, mapped=False)
    header = json.loads(json.dumps(content.header))
    tensors = dict(content.tensors)
    change(header, tensors)
    cache_file.write(path, cache_file.CacheFile(header, tensors), deflates=True)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def flip(path: Path) -> None:
    blob = bytearray(path.read_bytes())
    blob[-40] ^= 1
    path.write_bytes(blob)


def another_header(path: Path, **fields: Any) -> None:
    header = read_header(path) | (fields or {"rows": 7})
    save_file(load_file(path), path, metadata={"format": "pt", KEY: json.dumps(header)})


def newer(path: Path) -> None:
    another_header(path, format=99, kvpolicy="9.0")


def another_shape(path: Path) -> None:
    edited(path, lambda _, tensors: tensors.update({"layers.0.keys": tensors["layers.0.keys"][:, :, 1:]}))


def without_a_tensor(path: Path) -> None:
    edited(path, lambda _, tensors: tensors.pop("layers.1.positions"))


def another_calibration(path: Path) -> None:
    edited(path, lambda header, _: header.update(calibrations="0" * 64))


def other_ranks(path: Path) -> None:
    edited(path, lambda header, _: header["ranks"].update(size=2, queries=[2, 2], heads=[1, 1]))
    path.rename(cache_file.rank_path(path, 0, 2))


def foreign(path: Path) -> None:
    save_file({"x": torch.zeros(3)}, path)


def pickled(path: Path) -> None:
    torch.save({"x": torch.zeros(3)}, path)


REFUSED: dict[Callable[[Path], object], str] = {
    cut: "truncated or edited",
    flip: "truncated or edited",
    another_header: "truncated or edited",
    another_shape: r"must fit the policy and the model, got keys as",
    without_a_tensor: "must fit the policy and the model, got no tensor",
    another_calibration: "with the calibration that it was made with",
    other_ranks: "as many ranks as it was saved on, got 1 instead of 2",
    newer: "must have format 2 or older, got 99, written by kvpolicy 9.0",
    foreign: "has no header of kvpolicy",
    pickled: "truncated or edited",
    Path.unlink: "must exist",
}


@contextmanager
def saved(path: Path, policy: str = "h2o@0.5") -> Generator[Any]:
    """A model under a policy, whose cache was saved to a file."""
    model = build("llama", layers=2)
    with kvpolicy.attach(model, policy):
        start(model, [26])[0].save(path)
        yield model


@pytest.mark.parametrize("damage", REFUSED, ids=lambda damage: damage.__name__)
def test_damaged_files(damage: Callable[[Path], object], path: Path) -> None:
    with saved(path, words("h2o", "csr")) as model:
        damage(path)
        with pytest.raises(KVPolicyError, match=REFUSED[damage]):
            PolicyCache.load(model, path)


def test_files_of_other_models(path: Path) -> None:
    with saved(path) as model:
        pass
    other, turned = (copy.deepcopy(build("llama", layers=2)) for _ in range(2))
    with torch.no_grad():
        other.model.layers[0].self_attn.q_proj.weight.mul_(1.001)
    turned.config.rope_parameters = {**turned.config.rope_parameters, "rope_theta": 7.0}
    wrong = {
        other: "whose weights differ",
        turned: "rotary embedding",
        build("llama", layers=3): "with 2 layers instead of 3",
        build("llama", torch.bfloat16, layers=2): "weights differ|in bfloat16, got float32",
    }
    for bad, told in wrong.items():
        with kvpolicy.attach(bad, "h2o@0.5"), pytest.raises(KVPolicyError, match=told):
            PolicyCache.load(bad, path)
    with pytest.raises(KVPolicyError, match="must have a policy attached"):
        PolicyCache.load(model, path)


class Unnamed(kvpolicy.SlidingWindow):
    """A selector that no spec can name."""


def test_caches_that_cannot_be_saved(tmp_path: Path, path: Path) -> None:
    model = build("llama", layers=2)
    with kvpolicy.attach(model, words("kvzip")):
        cache = PolicyCache(model, prompt=26)
        with pytest.raises(KVPolicyError, match="must have seen a prompt"):
            cache.save(path)
        ids, mask = make_batch([26])
        forward(model, ids, mask, 0, 20, cache)
        with pytest.raises(KVPolicyError, match="incomplete prompt"):
            cache.save(path)
        forward(model, ids, mask, 20, 26, cache)
        with pytest.raises(KVPolicyError, match=r"\[1, 26\], got \[1, 27\]"):
            cache.save(path, tokens=ids[:, :27])
        with pytest.raises(KVPolicyError, match="compress must be one of"):
            cache.save(path, compress="lzma")
        with pytest.raises(KVPolicyError, match="folder of a cache file must exist"):
            cache.save(tmp_path / "nowhere" / "cache.safetensors")
    unnamed = Policy(selector=Unnamed(), budget=0.5)
    with kvpolicy.attach(model, unnamed), pytest.raises(KVPolicyError, match="must be registered"):
        start(model, [26])[0].save(path)
    assert not [*tmp_path.iterdir()]


LONGEST = 26
DUE = 13
DATES = (LONGEST, LONGEST + 2, LONGEST + 6)
"""Columns before a file: behind the prompt, and inside the first and the second period."""

PERIODS = [
    "keydiff:every=5@0.5",
    "expected:sinks=2:horizon=6:every=5@0.5",
    "uniform/adakv+h2o+tokenwise:residual_length=2:block_size=5@0.5",
    "probe:recent=0.2:random=0.2+zipcache:recode_every=5@0.5",
    "h2o+mikv:high=0.3:high_bits=8:residual_length=2:block_size=5@0.5",
    "h2o+kivi:bits=4:group_size=5:residual_length=5@0.5",
    "h2o+quest:read=6:page=2:dense=0:resort=5@0.8",
    "keydiff:every=5:decode=grow@0.5",
    "kvcrush:split=0.25/keydiff:every=4@0.5",
    "snapkv+staircase:tokens_8bit=4:tokens_4bit=4:group_size=4:residual_length=2@0.8",
]


@pytest.mark.parametrize("policy", PERIODS)
def test_work_inside_a_period(policy: str, tmp_path: Path) -> None:
    model = build("llama", layers=1)
    ids, mask = make_batch([LONGEST, 17], [LONGEST, *[1] * DUE])
    with kvpolicy.attach(model, policy):
        cache = PolicyCache(model)
        forward(model, ids, mask, 0, LONGEST, cache)
        logits: dict[int, torch.Tensor] = {}
        for column in range(LONGEST, LONGEST + DUE):
            if column in DATES:
                cache.save(tmp_path / f"{column}.safetensors")
            logits[column] = forward(model, ids, mask, column, column + 1, cache)
        for cut in DATES:
            loaded = PolicyCache.load(model, tmp_path / f"{cut}.safetensors")
            for column in range(cut, LONGEST + DUE):
                assert torch.equal(forward(model, ids, mask, column, column + 1, loaded), logits[column])
            pairs = zip(static_tensors(cache), static_tensors(loaded), strict=True)
            assert all(torch.equal(one, other) for one, other in pairs)


def test_an_announced_prompt_of_which_a_part_was_seen(tmp_path: Path) -> None:
    """The next chunk is compressed to a share of the whole prompt."""
    model = build("llama", layers=2)
    ids, mask = make_batch([20, 12], [20, 4, 16])
    with kvpolicy.attach(model, "h2o@0.5"):
        cache = PolicyCache(model, prompt=[40, 32])
        forward(model, ids, mask, 0, 20, cache)
        cache.save(tmp_path / "cache.safetensors")
        loaded = PolicyCache.load(model, tmp_path / "cache.safetensors")
        for start, stop in ((20, 24), (24, 40)):
            logits = [forward(model, ids, mask, start, stop, each) for each in (cache, loaded)]
            assert torch.equal(*logits)
            assert [layer.budget.tolist() for layer in loaded.policy_layers] == [[20, 16]] * 2
