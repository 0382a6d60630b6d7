"""Every kind of file about a model: what is written comes back, and anything else is refused in one sentence."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import kvpolicy
from kvpolicy.allocators.head_files import HEAD_FILES, HeadFile
from kvpolicy.allocators.profile import PROFILES, Profile
from kvpolicy.codecs._files import FACTS, TENSORS, CalibrationFile, check_model, folder_of
from kvpolicy.planning.curves import TUNED_FILES, Curves, Layers
from kvpolicy.protocols import ModelInfo
from kvpolicy.selectors.center_files import CENTER_FILES, CenterFile, Centers
from kvpolicy.selectors.filter_files import FILTER_FILES, FilterFile
from kvpolicy.selectors.gate_files import GATE_FILES, GateFile, Inner, LayerGate
from kvpolicy.text.embedded_names import EMBEDDED
from kvpolicy.text.model_file import ModelFile

WEIGHTS = torch.linspace(-1, 1, 64)
MODEL = {"name": "m", "type": "llama", "layers": 2, "heads": 2, "head_dim": 4, "weights": WEIGHTS.tolist()}
INFO = ModelInfo(layers=2, heads=2, head_dim=4, weights=WEIGHTS, hidden=8)
MADE = {"tokens": 300}
POLICIES = tuple(kvpolicy.Policy.parse(spec) for spec in ("window@0.5", "h2o@0.25"))
CURVES = Curves(
    MODEL, {"windows": 1, "prompt": 5, "new": 2}, "kl", (0, 1), 2, POLICIES, [[1.0, None]] * 2, [[0.0, None]] * 2
)


def gate(number: float) -> LayerGate:
    inner = Inner(torch.full((3, 8), number), torch.ones(3))
    return LayerGate(torch.full((2, 3), number), torch.ones(2), inner)


class Kind(NamedTuple):
    """A kind of file, and how to make one of a number; `part` is the file whose JSON, or whose hash, is read first."""

    file: ModelFile[Any]
    content: Callable[[float], Any]
    check: Callable[[Any, str, ModelInfo], None] | None = None
    part: str = ""
    hashed: bool = True

    def __str__(self) -> str:
        return self.file.noun.replace(" ", "-")


KINDS = [
    Kind(
        folder_of("kvquant"),
        lambda n: CalibrationFile({"model": MODEL, "tokens": 300}, {"a.0": torch.full((2, 3), n)}),
        check_model,
        FACTS,
    ),
    Kind(
        FILTER_FILES,
        lambda n: FilterFile({layer: torch.full((2, 4), n) for layer in (0, 1)}, MODEL, MADE),
        FILTER_FILES.check,
    ),
    Kind(
        CENTER_FILES,
        lambda n: CenterFile(
            {layer: Centers(torch.full((4, 4), n), torch.ones(4, 2)) for layer in (0, 1)}, MODEL, MADE
        ),
        CENTER_FILES.check,
    ),
    Kind(GATE_FILES, lambda n: GateFile({layer: gate(n) for layer in (0, 1)}, MODEL, MADE), GATE_FILES.check),
    Kind(
        HEAD_FILES,
        lambda n: HeadFile(((n, 0.5), (1.0, 0.0)), "share", 4, 16, MODEL, made=MADE),
        HEAD_FILES.check,
        hashed=False,
    ),
    Kind(PROFILES, lambda n: Profile((n, 0.5), "m"), hashed=False),
    Kind(TUNED_FILES, lambda n: CURVES._replace(distortion=[[n, None]] * 2), hashed=False),
]
ALL = pytest.mark.parametrize("kind", KINDS, ids=str)


def plain(content: Any) -> Any:
    """Content in which tensors are lists, to compare."""
    if isinstance(content, Tensor):
        return [str(content.dtype), content.tolist()]
    if hasattr(content, "_asdict"):
        content = content._asdict()
    elif hasattr(content, "__dataclass_fields__"):
        content = {name: getattr(content, name) for name in content.__dataclass_fields__}
    if isinstance(content, dict):
        return {name: plain(value) for name, value in content.items()}  # pyright: ignore[reportUnknownVariableType]
    if isinstance(content, (list, tuple)):
        return [plain(value) for value in content]  # pyright: ignore[reportUnknownVariableType]
    return content


def edit(path: Path, **fields: Any) -> None:
    """Change fields of the description of a file, and not its hash."""
    if path.suffix == ".json":
        path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | fields), encoding="utf-8")
        return
    blob = path.read_bytes()
    start = 8 + int.from_bytes(blob[:8], "little")
    header: dict[str, Any] = json.loads(blob[8:start])
    (key,) = set(header["__metadata__"]) - {"format"}
    header["__metadata__"][key] = json.dumps(json.loads(header["__metadata__"][key]) | fields)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + blob[start:])


def name_of(kind: Kind) -> str:
    """A name as the files of the kind have."""
    return "x" if kind.part else "x.safetensors" if kind.hashed else "x.json"


@ALL
def test_what_is_written_comes_back(kind: Kind, tmp_path: Path) -> None:
    path = tmp_path / "new" / name_of(kind)
    kind.file.save(path, kind.content(0.25))
    found = kind.file.load(str(path))
    want = plain(kind.content(0.25))
    assert plain(found) == (want | {"model": ""} if kind.file is PROFILES else want)
    assert kind.file.load(os.path.relpath(path)) is found, "it is read once"
    kind.file.save(path, kind.content(0.75))
    assert plain(kind.file.load(str(path))) != plain(found), "it is read again after it has changed"
    assert [each.name for each in path.parent.iterdir()] == [path.name], "nothing else is left"
    kind.file.save(path, found)
    assert plain(kind.file.load(str(path))) == plain(found)


@ALL
def test_a_relative_path_is_of_the_current_folder(kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder, number in (("a", 0.25), ("b", 0.75)):  # files of one size and one time
        path = tmp_path / folder / name_of(kind)
        kind.file.save(path, kind.content(number))
        for part in path.iterdir() if kind.part else [path]:
            os.utime(part, ns=(0, 0))
        monkeypatch.chdir(path.parent)
        want = plain(kind.content(number))
        assert plain(kind.file.load(path.name)) == (want | {"model": ""} if kind.file is PROFILES else want)


@ALL
def test_a_failed_write_leaves_the_old_file(kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / name_of(kind)
    kind.file.save(path, kind.content(0.25))
    found = kind.file.load(str(path))

    def fail(*args: Any) -> None:
        raise OSError("disk")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail)
        with pytest.raises(kvpolicy.KVPolicyError, match=r"The .*x.* must be writable, got disk; try another file\."):
            kind.file.save(path, kind.content(0.75))
    assert kind.file.load(str(path)) is found
    assert not [each for each in tmp_path.rglob(".*")]


@ALL
def test_what_is_no_such_file(kind: Kind, tmp_path: Path) -> None:
    path = tmp_path / name_of(kind)
    with pytest.raises(kvpolicy.KVPolicyError, match=rf"The .*{kind.file.noun.split()[-1]}.*try .*kvpolicy") as raised:
        kind.file.load(str(path))
    assert kind.file.command in str(raised.value) and str(path) in str(raised.value)
    kind.file.save(path, kind.content(0.25))
    for blob in (b"", b"{", b"\xff\xfe\x00", b"[" * 100_000, b"[1]", b"\x80\x04K\x01."):
        (path / kind.part).write_bytes(blob)
        with pytest.raises(kvpolicy.KVPolicyError) as raised:
            kind.file.load(str(path))
        assert str(path)[-10:] in str(raised.value) and kind.file.command in str(raised.value)
        assert "\n" not in str(raised.value) and len(str(raised.value)) < 500


@ALL
def test_a_newer_or_edited_file(kind: Kind, tmp_path: Path) -> None:
    """The version is named before the hash is compared, which a newer one may compute in another way."""
    path = tmp_path / name_of(kind)
    kind.file.save(path, kind.content(0.25))
    edit(path / kind.part, kvpolicy="0.0.1")
    if kind.hashed:
        with pytest.raises(kvpolicy.KVPolicyError, match="must be as it was written, got an edited or damaged one"):
            kind.file.load(str(path))
    else:
        kind.file.load(str(path))
    edit(path / kind.part, format=2, kvpolicy="99.0")
    with pytest.raises(kvpolicy.KVPolicyError, match=r"format 1 or older, got .*2.* kvpolicy 99\.0"):
        kind.file.load(str(path))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.hashed], ids=str)
def test_a_changed_number_is_noticed(kind: Kind, tmp_path: Path) -> None:
    path = tmp_path / name_of(kind)
    kind.file.save(path, kind.content(0.25))
    file = path / TENSORS if kind.part else path
    blob = bytearray(file.read_bytes())
    blob[-1] ^= 1
    file.write_bytes(blob)
    with pytest.raises(kvpolicy.KVPolicyError, match=r"must be as it was written, got .* edited .*; try .*kvpolicy c"):
        kind.file.load(str(path))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.check], ids=str)
@pytest.mark.parametrize(
    ("info", "message"),
    [
        (INFO._replace(layers=3), "2 layers instead of 3"),
        (INFO._replace(heads=4), "2 KV heads instead of 4"),
        (INFO._replace(head_dim=8), "a head dimension of 4 instead of 8"),
        (INFO._replace(weights=-WEIGHTS), r"\(llama 'm', whose weights differ\)"),
    ],
)
def test_another_model(kind: Kind, info: ModelInfo, message: str) -> None:
    assert kind.check is not None
    kind.check(kind.content(0.25), "x", INFO)
    with pytest.raises(kvpolicy.KVPolicyError, match=rf"The {kind.file.noun} 'x' must .* another model .*{message}"):
        kind.check(kind.content(0.25), "x", info)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.file.asset], ids=str)
@pytest.mark.parametrize("name", EMBEDDED)
def test_the_embedded_models_have_files(kind: Kind, name: Any) -> None:
    """They were written by earlier versions."""
    calibration = pytest.importorskip("kvpolicy.calibration")
    content = kind.file.load(name)
    assert kind.check is not None
    kind.check(content, name, calibration.model_info(kvpolicy.tiny(name=name)[0]))
    model = content.meta["model"] if isinstance(content, CalibrationFile) else content.model
    assert model["name"] == name
    with pytest.raises(kvpolicy.KVPolicyError, match="made for another model"):
        kind.check(content, name, INFO)


def test_layers_are_a_tuned_file_too(tmp_path: Path) -> None:
    TUNED_FILES.save(tmp_path / "x.json", Layers(POLICIES))
    found = TUNED_FILES.load(str(tmp_path / "x.json"))
    assert isinstance(found, Layers) and found.policies[1].budget == 0.25
