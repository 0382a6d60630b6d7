"""Documents by name: what a file says, what a name may be, and when a file is read again."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from kvpolicy import KVPolicyError
from kvpolicy_vllm import documents, prompt, read_document
from kvpolicy_vllm.documents import SALT, Document, Library, as_ids
from kvpolicy_vllm.prompts import second_request
from tests.vllm.models import Saved, make_text, save


def document(**fields: Any) -> Document:
    defaults: dict[str, Any] = {"path": Path("/d.safetensors"), "digest": "ab", "kept": 5, "total": 9, "model": {}}
    merged: dict[str, Any] = defaults | {"tokens": (7, 8, 7, 9), "dtype": "float32", "spec": "keydiff@5"} | fields
    return Document(**merged)


@pytest.fixture
def folder(saved: Saved, tmp_path: Path) -> Path:
    inside = tmp_path / "documents"
    inside.mkdir()
    (inside / "text.safetensors").write_bytes(saved.path.read_bytes())
    (inside / ".hidden.safetensors").write_bytes(saved.path.read_bytes())
    (inside / "notes.txt").write_text("no document")
    (tmp_path / "outside.safetensors").write_bytes(saved.path.read_bytes())
    return inside


@pytest.mark.parametrize("verify", [True, False])
def test_a_document_says_what_its_file_does(saved: Saved, verify: bool) -> None:
    found = read_document(saved.path, verify=verify)
    assert (found.path, found.kept, found.total) == (saved.path, 35, 70)
    assert [*found.tokens] == saved.text
    assert (found.dtype, found.model["type"]) == ("float32", "llama")
    assert re.fullmatch(SALT + "[0-9a-f]{64}", found.salt)


def test_an_edited_file_is_refused_where_it_is_verified(saved: Saved, tmp_path: Path) -> None:
    content = bytearray(saved.path.read_bytes())
    content[-1] ^= 1
    path = tmp_path / "edited.safetensors"
    path.write_bytes(bytes(content))
    assert read_document(path, verify=False).digest == read_document(saved.path).digest
    with pytest.raises(KVPolicyError, match="edited"):
        read_document(path)


def test_a_document_without_tokens(saved: Saved, tmp_path: Path) -> None:
    import kvpolicy

    with torch.no_grad(), kvpolicy.attach(saved.model, "keydiff@9"):
        cache = kvpolicy.PolicyCache(saved.model)
        saved.model(torch.tensor([saved.text]), cache=cache)
        cache.save(tmp_path / "d.safetensors")
    for verify in (True, False):
        found = read_document(tmp_path / "d.safetensors", verify=verify)
        assert found.tokens == () and found.placeholders == [0] * 9


@pytest.mark.parametrize(
    ("kept", "tokens", "placeholders"),
    [(3, (7, 8, 7, 9), [7, 8, 9]), (2, (7, 8, 7, 9), [7, 8]), (5, (7, 8, 7), [7, 8, 7, 8, 7]), (2, (), [0, 0])],
)
def test_placeholders_are_distinct_tokens_as_far_as_there_are(
    kept: int, tokens: tuple[int, ...], placeholders: list[int]
) -> None:
    assert document(kept=kept, tokens=tokens).placeholders == placeholders


def test_a_prompt_begins_with_the_placeholders_and_goes_on() -> None:
    found = document(kept=3)
    assert found.begins([7, 8, 9, 1]) and found.begins((7, 8, 9, 9, 9))
    assert not found.begins([7, 8, 9]) and not found.begins([7, 9, 8, 1]) and not found.begins([])


@pytest.mark.parametrize("name", ["text", "text.safetensors"])
def test_names_of_a_folder(folder: Path, name: str) -> None:
    library = Library(folder, verify=True, paths=True)
    assert library.names() == ["text"]
    assert library.path_of(name) == folder / "text.safetensors"
    assert library.path_of(str(folder / name)) == folder / "text.safetensors"
    assert library.find(name).kept == 35


def test_a_folder_may_be_named_by_a_link(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(folder)
    library = Library(tmp_path / "link", verify=True, paths=True)
    assert library.find(str(tmp_path / "link" / "text.safetensors")).kept == 35


NO_NAMES = ["../outside", "..", ".", "/", "sub/text", ".hidden", "text\\", "text\0", "a\nb", "", 7, None, ["text"]]
MISSING = ["missing", "notes", "notes.txt", "text.safetensors.safetensors", "x" * 5000]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        *((name, "document must be the name of a document, got") for name in NO_NAMES),
        *((name, r"document must be one of the folder's \(text\), got") for name in MISSING),
    ],
)
def test_what_is_no_name(folder: Path, name: object, message: str) -> None:
    with pytest.raises(KVPolicyError, match=message):
        Library(folder, verify=True).path_of(name)


def test_paths_outside_of_the_folder(folder: Path) -> None:
    library = Library(folder, verify=True)
    for path in (folder.parent / "outside.safetensors", folder / ".." / "outside.safetensors", folder.parent):
        with pytest.raises(KVPolicyError, match="document must be"):
            library.path_of(str(path))
    with pytest.raises(KVPolicyError, match=r"The folder of documents must exist, got .*; try creating it"):
        Library(folder / "missing", verify=True)


def test_links_lead_to_names_of_the_folder_alone(folder: Path) -> None:
    (folder / "alias.safetensors").symlink_to(folder / "text.safetensors")
    (folder / "leak.safetensors").symlink_to(folder.parent / "outside.safetensors")
    (folder / "broken.safetensors").symlink_to(folder / "nothing.safetensors")
    (folder / "folder.safetensors").mkdir()
    library = Library(folder, verify=True)
    assert library.find("alias").digest == library.find("text").digest
    for name in ("leak", "broken", "folder"):
        with pytest.raises(KVPolicyError, match="document must be one of the folder's"):
            library.find(name)


def test_without_a_folder_paths_are_taken(saved: Saved, tmp_path: Path) -> None:
    library = Library(None, verify=True)
    assert library.names() == []
    assert library.find(str(saved.path)).kept == 35
    for missing in (tmp_path / "missing.safetensors", tmp_path / ("x" * 5000)):
        with pytest.raises(KVPolicyError, match="document must be a file that exists"):
            library.find(str(missing))
    with pytest.raises(KVPolicyError, match="must be one file, got the folder"):
        library.find(str(tmp_path))


def test_files_are_read_again_when_they_have_changed(
    saved: Saved, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[Path] = []

    def read_and_count(path: Path, *, verify: bool) -> Document:
        reads.append(path)
        return read_document(path, verify=verify)

    monkeypatch.setattr(documents, "read_document", read_and_count)
    library = Library(folder, verify=False)
    first = library.find("text")
    assert library.find("text") is first and len(reads) == 1
    save(saved.model, "keydiff@0.5", make_text(saved.model, 70, 1), folder / "text.safetensors")
    second = library.find("text")
    assert second.digest != first.digest and second.tokens != first.tokens and len(reads) == 2
    os.utime(folder / "text.safetensors", ns=(1, 1))
    assert library.find("text").digest == second.digest and len(reads) == 3
    (folder / "text.safetensors").unlink()
    with pytest.raises(KVPolicyError, match="document must be one of"):
        library.find("text")


@pytest.mark.parametrize("question", [[5, 6], (5, 6), [[5, 6]], torch.tensor([5, 6]), torch.tensor([[5, 6]])])
def test_questions_are_lists_or_tensors_of_ids(question: Any) -> None:
    assert as_ids(question) == [5, 6]


@pytest.mark.parametrize(
    ("question", "message"),
    [
        *(
            (question, "question_ids must be token ids, got")
            for question in ("text", None, [5, -1], [True], [1.5], [[5], [6]], torch.tensor(5), {"a": 1})
        ),
        *(
            (question, "question_ids must have at least one token, got none")
            for question in ([], (), [[]], torch.tensor([]))
        ),
    ],
)
def test_what_is_no_question(question: Any, message: str) -> None:
    with pytest.raises(KVPolicyError, match=message):
        as_ids(question)


def test_a_prompt_has_placeholders_salt_name_and_digest(saved: Saved) -> None:
    text, params = prompt(saved.path, torch.tensor([[5, 6]]))
    found = read_document(saved.path)
    assert text == {"prompt_token_ids": [*found.placeholders, 5, 6], "cache_salt": found.salt}
    assert params == {"document": str(saved.path), "digest": found.digest}


@pytest.mark.parametrize(("kept", "tail"), [(2, 1), (3, 1), (10, 5), (150, 64)])
def test_a_compressed_prompt_ends_as_the_prompt_does(kept: int, tail: int) -> None:
    """Parsers of reasoning look for the last mark of the chat template, behind which there may be others."""
    ids = [*range(100, 200), *range(200, 300)]
    found = second_request(ids, kept, "n")[0]["prompt_token_ids"]
    assert len(found) == kept and found[-tail:] == ids[-tail:]
    assert found[:-tail] == ids[: kept - tail]
