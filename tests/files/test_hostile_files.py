"""Files with hand-made headers are refused in one sentence, or are loaded as what they were."""

from __future__ import annotations

import itertools
import json
import os
import random
import stat
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

import kvpolicy
from kvpolicy import KVPolicyError, PolicyCache
from kvpolicy.cli.commands.cache import check, describe
from kvpolicy.hf import cache_file
from kvpolicy.hf.cache_header import KEY, read_header
from tests.conformance.models import build
from tests.conformance.play import forward, make_batch
from tests.files.test_saved_cache import CUT, start
from tests.robust.hostile import refused

NASTY = [
    '"x"',
    '""',
    '"\\ud800\\u001b[2J"',
    "-1",
    "-0.5",
    "0.5",
    "NaN",
    "-Infinity",
    "1e999",
    "9" * 5000,
    str(2**62),
    "true",
    "null",
    "[]",
    "{}",
    "[[[-1]]]",
    '{"x": [null]}',
    "[" * 100 + "]" * 100,
]
"""JSON texts of values that no field, or few, may hold."""

SAMPLE = 80
"""Files of each policy."""

PLAUSIBLE = {("scale", "0.5"), ("has_tokens", "true"), ("may_exceed_plan", "true"), ("reading", "true")}
"""A field and a value that a cache of another model or history may have, so that it is no error."""

POLICIES = [
    "h2o+quest:read=6:page=2:dense=0:resort=3@0.8",
    "squeeze/adakv+snapkv:window=6:kernel=3+tokenwise:residual_length=2:block_size=3@0.5",
    "h2o+kivi:group_size=4:residual_length=4@0.5",
    "uniform/adakv+expected:sinks=2:horizon=6:decode=grow@0.5",
]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value in a header; of several layers, the first."""
    if path:
        yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ()
    for key, held in inner:
        if not (len(path) == 1 and path[0] == "layers" and key != "0"):
            yield from places(held, (*path, key))


def changed(header: dict[str, Any], path: tuple[Any, ...], text: str | None) -> str:
    """The JSON of a header with another value at a path; without the field if the value is None."""
    copied = json.loads(json.dumps(header))
    inner = copied
    for key in path[:-1]:
        inner = inner[key]
    if text is None:
        del inner[path[-1]]
        return json.dumps(copied)
    inner[path[-1]] = "KVPOLICY_HERE"
    return json.dumps(copied).replace('"KVPOLICY_HERE"', text)


def forge(path: Path, text: str, tensors: dict[str, Tensor]) -> None:
    """Write a file with a header as given, and the hash that it needs, as far as it has one."""
    try:
        header = json.loads(text)
        header["sha256"] = cache_file._digest(header, tensors)  # pyright: ignore[reportPrivateUsage]
        text = json.dumps(header)
    except (ValueError, TypeError):
        pass  # what has no hash is refused before
    save_file(tensors, path, metadata={"format": "pt", KEY: text})


def stored(cache: PolicyCache, path: Path, **options: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The header, without its hash, and the tensors of a saved cache as they are in the file."""
    cache.save(path, **options)
    header = read_header(path)
    del header["sha256"]
    return header, load_file(path)


def next_logits(model: Any, cache: PolicyCache) -> Tensor:
    """What a cache says to some further tokens, and in the steps behind them."""
    ids, _ = make_batch([9, 9])
    mask = torch.ones(2, cache.get_seq_length() + 9, dtype=torch.int64)
    begin = cache.get_seq_length()
    whole = torch.cat([ids.new_zeros(2, begin), ids], 1)
    steps = [(begin, begin + 5), *((begin + n, begin + n + 1) for n in range(5, 9))]
    return torch.cat([forward(model, whole, mask, *step, cache) for step in steps], 1)


@pytest.mark.parametrize("spec", POLICIES)
def test_every_field_with_nasty_values(spec: str, path: Path) -> None:
    model = build("llama", layers=2)
    with kvpolicy.attach(model, spec):
        cache, ids, _ = start(model, [26, 26])
        header, tensors = stored(cache, path, tokens=ids[:, : cache.get_seq_length()], compress="zlib")
        expected = next_logits(model, PolicyCache.load(model, path))
        cases = [*itertools.product(places(header), [None, *NASTY])]
        loaded = 0
        for place, text in random.Random(0).sample(cases, SAMPLE):
            if any((part, text) in PLAUSIBLE for part in place):
                continue
            forge(path, changed(header, place, text), tensors)
            try:
                describe(path)
                check(path)
                found = PolicyCache.load(model, path)
            except KVPolicyError as error:
                assert "\n" not in str(error) and len(str(error)) < 800, place
                continue
            loaded += 1
            if found.policy != cache.policy:  # another policy with the same tensors, whose choices may differ
                next_logits(model, found)
                continue
            assert torch.equal(next_logits(model, found), expected), (place, text)
        assert 0 < loaded < 100


def bombs(path: Path) -> Iterator[tuple[dict[str, Any], dict[str, Tensor]]]:
    """Headers and tensors that ask for more memory than the file holds."""
    header = read_header(path)
    tensors = load_file(path)
    name = next(iter(header["packed"]))
    zeros = torch.frombuffer(bytearray(zlib.compress(bytes(2**26))), dtype=torch.uint8)
    tensors = {**tensors, name: zeros}
    for shape in ([2**26], [2**40], [2**40] * 600, [0], [0, 2**40, 2**40], [1] * 99):
        yield {**header, "packed": {**header["packed"], name: ["uint8", shape]}}, tensors
    yield {**header, "packed": {**header["packed"], "nowhere": ["uint8", [4]]}}, tensors
    positions = {"layers.0.positions": zeros}
    yield {**header, "packed": {"layers.0.positions": ["int32", [2**23 + 1]]}}, {**load_file(path), **positions}
    layer = header["layers"]["0"]
    for change in (
        {"capacity": 2**39},
        {"expected_len": [2**39]},
        {"shape": [1, 4, 2**39]},
        {"shape": [1, 2**39, 8]},
        {"group": 2**39},
        {"layout": [2**39, [2**39]]},
        {"largest_block": 2**39},
        {"reserved": 2**39},
        {"free_steps": 2**39},
    ):
        yield {**header, "layers": {**header["layers"], "0": {**layer, **change}}}, load_file(path)


def test_files_that_would_need_more_memory_than_they_hold(
    tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build("llama", layers=2)
    whole = tmp_path / "whole.safetensors"
    largest = 0
    empty = torch.empty

    def counting(*args: Any, **options: Any) -> Tensor:
        nonlocal largest
        made = empty(*args, **options)
        largest = max(largest, 0 if made.is_meta else made.nbytes)
        return made

    with kvpolicy.attach(model, "h2o+kivi:group_size=4:residual_length=4@0.5"):
        start(model, [26])[0].save(whole, compress="zlib")
        monkeypatch.setattr(torch, "empty", counting)
        for header, tensors in bombs(whole):
            del header["sha256"]
            forge(path, json.dumps(header), tensors)
            with pytest.raises(KVPolicyError):
                PolicyCache.load(model, path)
    assert largest < cache_file.MOST_INFLATED * 2**16


def test_codes_of_zeros_can_be_read_again(path: Path) -> None:
    """What compresses better than a file may is written as it is."""
    model = build("llama", layers=2)
    with kvpolicy.attach(model, "h2o@0.5"):
        cache = start(model, [26])[0]
        cache.save(path)
        content = cache_file.read(path)
        zeros = torch.zeros(2**24, dtype=torch.uint8)
        cache_file.write(path, content._replace(tensors=content.tensors | {"a.codes.b": zeros}), deflates=True)
    assert torch.equal(cache_file.read(path).tensors["a.codes.b"], zeros)


def test_paths_and_tokens_of_wrong_kinds(tmp_path: Path, path: Path) -> None:
    model = build("llama", layers=2)
    wrong: Any
    with kvpolicy.attach(model, "h2o@0.5"):
        cache, ids, _ = start(model, [26])
        ids = ids[:, : cache.get_seq_length()]
        for wrong in (ids.float(), ids.bool(), [[1, 2], [3]], [["a"]], "text", object(), [[2**70]], ids.tolist()[:0]):
            with pytest.raises(KVPolicyError, match="tokens must be"):
                cache.save(path, tokens=wrong)
        with pytest.raises(KVPolicyError, match="must be a file, got the folder"):
            cache.save(tmp_path)
        wrong = 3
        with pytest.raises(KVPolicyError, match="must be a string or a Path, got int"):
            cache.save(wrong)
        assert not [*tmp_path.iterdir()]
        cache.save(path, tokens=ids.to(torch.int32))
        assert cache_file.read(path).tensors["tokens"].dtype == torch.int64


def test_places_where_nothing_can_be_written_or_read(
    tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build("llama", layers=2)
    wrong: Any
    with kvpolicy.attach(model, "h2o@0.5"):
        cache, _, _ = start(model, [26])
        with refused(r"must be writable, got file name too long; try another folder, or free some space\."):
            cache.save(tmp_path / ("z" * 300))
        for missing in ("z" * 300, "a**b.safetensors", "a[b.safetensors"):
            with pytest.raises(KVPolicyError, match="A cache file must exist"):
                PolicyCache.load(model, tmp_path / missing)
        with refused(r"A cache must be one file, got the folder .*; try a file in it\."):
            PolicyCache.load(model, tmp_path)
        wrong = b"cache.safetensors"
        with refused("must be a string or a Path, got bytes"):
            PolicyCache.load(model, wrong)

        def full(*_: Any, **__: Any) -> None:
            raise SafetensorError("Error while serializing: No space left on device")

        cache.save(path)
        before = path.read_bytes()
        monkeypatch.setattr("safetensors.torch.save_file", full)
        with pytest.raises(KVPolicyError, match=r"must be writable, got an error of safetensors .*No space left"):
            cache.save(path)
        assert path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == ["cache.safetensors"]


def test_a_cache_may_be_read_by_whom_other_files_may_be_read(path: Path) -> None:
    model = build("llama", layers=2)
    with kvpolicy.attach(model, "h2o@0.5"):
        cache, _, _ = start(model, [26])
        for mask in (0o022, 0o077):
            before = os.umask(mask)
            try:
                cache.save(path)
            finally:
                os.umask(before)
            assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mask


Change = Callable[[dict[str, Any], dict[str, Tensor]], None]


def codes(edit: Callable[[Tensor], Tensor]) -> Change:
    """Other compressed codes."""

    def change(header: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        name = next(iter(header["packed"]))
        tensors[name] = edit(tensors[name])

    return change


def window(edit: Callable[[Tensor], Tensor]) -> Change:
    """Other values of a sliding layer."""

    def change(header: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        name = f"layers.{next(iter(header['windows']))}.values"
        tensors[name] = edit(tensors[name]).contiguous()

    return change


def first(name: str, number: int) -> Change:
    """Another first number in a tensor of layer 0."""

    def change(_: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors[f"layers.0.{name}"].view(-1)[0] = number

    return change


def pins(header: dict[str, Any], _: dict[str, Tensor]) -> None:
    """A policy that pins more tokens, for which nothing is allocated."""
    header["policy"]["codec"]["rotate"]["sinks"] = 30_000


KIVI = "h2o+kivi:group_size=4:residual_length=4@0.5"
PAGES = "uniform/adakv+h2o@0.7"
EDITED: dict[str, tuple[str, str, Change, str]] = {
    "longer codes": ("llama", KIVI, codes(lambda t: torch.cat([t, t[:1]])), "must be as it was written"),
    "shorter codes": ("llama", KIVI, codes(lambda t: t[:-1]), "must be as it was written"),
    "no codes": ("llama", KIVI, codes(lambda t: t[:0]), "must be as it was written"),
    "heads": ("gemma2", "h2o@0.5", window(lambda t: t[:, :1]), "must have the tensor layers.0.values as"),
    "tokens": ("gemma2", "h2o@0.5", window(lambda t: t[:, :, :1]), "must have the tensor layers.0.values as"),
    "dtype": ("gemma2", "h2o@0.5", window(lambda t: t.half()), "must have the tensor layers.0.values as"),
    "dimensions": ("gemma2", "h2o@0.5", window(lambda t: t[0]), "must have the tensor layers.0.values as"),
    "pinned": ("llama", "rotate:sinks=2:group_size=4:residual_length=4", pins, "another number of pinned tokens"),
    "unseen": ("llama", PAGES, first("positions", CUT), "positions in layer 0 of tokens that its rows have not seen"),
    "negative": ("llama", PAGES, first("positions", -2), "positions in layer 0 of tokens that its rows have not seen"),
    "owner": ("llama", PAGES, first("owner", 3), "pages in layer 0 of heads that it does not have"),
    "no owner": ("llama", PAGES, first("owner", -1), "pages in layer 0 of heads that it does not have"),
}


@pytest.mark.parametrize("edit", EDITED)
def test_tensors_that_do_not_fit(edit: str, path: Path) -> None:
    family, policy, change, message = EDITED[edit]
    model = build(family, layers=None if family == "gemma2" else 2)
    with kvpolicy.attach(model, policy):
        header, tensors = stored(start(model, [26])[0], path, compress="zlib")
        change(header, tensors)
        forge(path, json.dumps(header), tensors)
        with pytest.raises(KVPolicyError, match=message):
            PolicyCache.load(model, path)


EDITS: dict[str, Callable[[Tensor], Tensor]] = {
    "floats": lambda tokens: tokens.view(torch.float64),
    "other rows": lambda tokens: tokens.reshape(3, 4),
    "flat": torch.flatten,
}


@pytest.mark.parametrize("edit", EDITS)
def test_the_same_bytes_as_another_tensor(edit: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a file says of its tensors is covered by its hash."""
    monkeypatch.setattr(cache_file, "check_header", lambda *given: None)  # this header has few fields
    cache_file.write(path, cache_file.CacheFile({"rows": 4, "packed": {}}, {"tokens": torch.arange(12).reshape(4, 3)}))
    header = cache_file._read_mapped(path).header
    edited = {"tokens": EDITS[edit](load_file(path)["tokens"])}
    save_file(edited, path, metadata={"format": "pt", KEY: json.dumps(header)})
    with pytest.raises(KVPolicyError, match="truncated or edited"):
        cache_file.read(path)


def test_parts_of_one_storage_are_written_apart(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_file, "check_header", lambda *given: None)
    whole = torch.arange(24.0).reshape(4, 6)
    parts = {"rows": whole[1:3], "columns": whole[:, ::2], "first": whole[:1], "turned": whole.T, "whole": whole}
    cache_file.write(path, cache_file.CacheFile({}, parts))
    found = cache_file._read_mapped(path).tensors
    assert found.keys() == parts.keys() and all(torch.equal(found[name], part) for name, part in parts.items())
    assert (path).stat().st_size < 4 * (12 + 12 + 6 + 24 + 24) + 1500
