"""Windows: read from files as the model would see them, divided without a prompt on both sides, identified."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

import kvpolicy
from kvpolicy.tuning.windows import Window, read_windows, split, windows_sha256

_, TOKENIZER = kvpolicy.tiny()


def written(path: Path, *lines: Any) -> Path:
    texts = (line if isinstance(line, str) else json.dumps(line, ensure_ascii=False) for line in lines)
    path.write_text("\n".join(texts), encoding="utf-8")
    return path


def words(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def closing() -> Any:
    """A tokenizer of words, which puts tokens around a text, and merges `a` and `b` that are not apart."""
    vocabulary = {"[B]": 0, "[E]": 1, "a": 2, "b": 3, "ab": 4, "[U]": 5}
    tokenizer = Tokenizer(models.BPE({**vocabulary}, [("a", "b")], unk_token="[U]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = TemplateProcessing(single="[B] $A [E]", special_tokens=[("[B]", 0), ("[E]", 1)])
    tokenizer.add_special_tokens(["[B]", "[E]"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="[B]", eos_token="[E]")


def test_a_prompt_is_what_the_model_would_see(tmp_path: Path) -> None:
    prompt = "tiger=4821\nlime=1207\n"
    question = "?lime="
    answer = "1207"
    lines = [{"prompt": prompt, "question": question, "answer": answer}, {"answer": answer, "prompt": prompt, "id": 1}]
    first, second = read_windows(TOKENIZER, written(tmp_path / "w.jsonl", *lines))
    assert first.prompt.tolist() == TOKENIZER.encode(prompt) == [1, *words(prompt)]
    assert first.question.tolist() == words(question) and first.answer.tolist() == words(answer)
    assert torch.equal(first.follow, torch.cat([first.question, first.answer])) and not len(second.question)
    assert torch.equal(torch.cat([first.prompt, first.follow]), torch.tensor(TOKENIZER.encode(prompt + "?lime=1207")))
    assert {part.dtype for part in first} == {torch.int64}


def test_special_tokens_are_at_the_start_alone(tmp_path: Path) -> None:
    lines = [{"prompt": "a b", "answer": " a"}, {"prompt": "[B] a", "answer": " b"}, {"prompt": "a", "answer": "b"}]
    found = read_windows(closing(), written(tmp_path / "w.jsonl", *lines))
    assert [window.prompt.tolist() for window in found] == [[0, 2, 3], [0, 2], [0, 2]]
    # In the last one `ab` would be a single token, which is not the prompt's: the answer stands alone.
    assert [window.answer.tolist() for window in found] == [[2], [3], [3]]


@pytest.mark.parametrize("seed", range(3))
def test_a_window_has_the_tokens_of_its_text(tmp_path: Path, seed: int) -> None:
    """Texts of any characters, also those at which a line would be split by mistake."""
    rng = Random(seed)
    characters = 'ab 01?=\n\t\r\u2028\x85\x0b\x1c"\\é漢'
    texts = [{k: "".join(rng.choices(characters, k=9)) for k in ("prompt", "question", "answer")} for _ in range(20)]
    found = read_windows(TOKENIZER, written(tmp_path / "w.jsonl", *texts))
    assert len(found) == 20
    for window, text in zip(found, texts, strict=True):
        ids = torch.cat([window.prompt, window.follow])
        assert ids[0] == TOKENIZER.bos_token_id
        assert TOKENIZER.decode(ids[1:]) == text["prompt"] + text["question"] + text["answer"]


def test_the_format_is_found_by_name_or_content(tmp_path: Path) -> None:
    line = {"prompt": "lime=12\n", "answer": "12"}
    assert len(read_windows(TOKENIZER, written(tmp_path / "w.txt", "", line, "", line, ""))) == 2
    for first in ('{"prompt": 1}', "[" * 100_000, "3", "{"):
        text = written(tmp_path / "t.txt", first, "some words and more of them")
        assert read_windows(TOKENIZER, text, prompt=2, answer=1), "plain text"


def test_plain_text_is_cut_into_windows(tmp_path: Path) -> None:
    text = "".join(f"word{n} = {n * n}\n" for n in range(100))
    path = written(tmp_path / "text.txt", text)
    found = read_windows(TOKENIZER, path, prompt=40, answer=9)
    assert {(len(window.prompt), len(window.answer), len(window.question)) for window in found} == {(40, 9, 0)}
    joined = torch.cat([torch.cat([window.prompt[1:], window.answer]) for window in found]).tolist()
    assert joined == words(text)[: len(joined)] and len(words(text)) - len(joined) < 48
    assert {int(window.prompt[0]) for window in found} == {TOKENIZER.bos_token_id}


def test_of_many_windows_some_are_chosen(tmp_path: Path) -> None:
    path = written(tmp_path / "w.jsonl", *({"prompt": f"lime={n}\n", "answer": str(n)} for n in range(40)))

    def chosen(**options: int) -> list[str]:
        return [TOKENIZER.decode(window.answer) for window in read_windows(TOKENIZER, path, **options)]

    assert chosen() == [str(n) for n in range(40)]
    some = chosen(limit=7, seed=3)
    assert some == chosen(limit=7, seed=3) != chosen(limit=7, seed=4)
    assert len(set(some)) == 7 and some == sorted(some, key=int)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([{"prompt": "a", "answer": "b"}, "{"], r"Line 2 of .*w\.jsonl must be a JSON object, got Expecting"),
        (["", {"prompt": "a"}], "Line 2 .* must have a text as its answer, got no answer; try "),
        ([{"answer": "b"}], "Line 1 .* must have a text as its prompt, got no prompt"),
        ([{"prompt": "", "answer": "b"}], "as its prompt, got an empty text"),
        ([{"prompt": "a", "answer": ""}], "as its answer, got an empty text"),
        ([{"prompt": "a", "answer": 4821}], "as its answer, got int"),
        ([{"prompt": "a", "answer": "b", "question": None}], "as its question, got NoneType"),
        (["[1]"], "must be a JSON object, got list; try"),
        (['{"prompt": "\\ud800", "answer": "b"}'], "must have Unicode text as its prompt"),
        (["[" * 100_000], "Line 1 .* must be a JSON object"),
        (["", " ", ""], "must contain windows, got an empty file"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, lines: list[Any], message: str) -> None:
    with pytest.raises(kvpolicy.KVPolicyError, match=message) as error:
        read_windows(TOKENIZER, written(tmp_path / "w.jsonl", *lines))
    assert "\n" not in str(error.value)


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "missing.jsonl", tmp_path, tmp_path / "bytes"):
        with pytest.raises(kvpolicy.KVPolicyError, match="must be readable UTF-8 text, got"):
            read_windows(TOKENIZER, path)
    text = written(tmp_path / "text.txt", "a few words")
    with pytest.raises(kvpolicy.KVPolicyError, match="must have at least 1088 tokens, 1024 of a prompt and 64 of its"):
        read_windows(TOKENIZER, text)
    wrongs: list[dict[str, Any]] = [{"limit": 0}, {"prompt": 1}, {"answer": 0}, {"prompt": 2.5}]
    for wrong in wrongs:
        with pytest.raises(kvpolicy.KVPolicyError, match="must be"):
            read_windows(TOKENIZER, text, **wrong)
    with pytest.raises(kvpolicy.KVPolicyError, match="length answer must be given only for plain text, got answer=5"):
        read_windows(TOKENIZER, written(tmp_path / "w.jsonl", {"prompt": "a", "answer": "b"}), answer=5)


def of(*prompts: int) -> list[Window]:
    return [Window(torch.tensor([prompt]), torch.tensor([number])) for number, prompt in enumerate(prompts)]


@pytest.mark.parametrize("seed", range(6))
def test_no_prompt_is_on_both_sides(seed: int) -> None:
    rng = Random(seed)
    windows = of(0, 1, *rng.choices(range(6), k=rng.randrange(30)))
    share = rng.choice([0.01, 0.25, 0.5, 0.99])
    tuning, held_out = split(windows, share, seed)
    sides = [[int(window.answer) for window in side] for side in (tuning, held_out)]
    assert all(side == sorted(side) and side for side in sides)
    assert sorted(sides[0] + sides[1]) == list(range(len(windows)))
    assert not {int(window.prompt) for window in tuning} & {int(window.prompt) for window in held_out}
    again = split(windows, share, seed)
    assert [[int(window.answer) for window in side] for side in again] == sides


def test_the_share_is_held_out_and_the_seed_decides() -> None:
    windows = of(*range(40))
    assert [len(side) for side in split(windows, 0.25)] == [30, 10]
    assert len({tuple(int(w.answer) for w in split(windows, 0.25, seed)[1]) for seed in range(5)}) == 5
    for wrong in (of(), of(3), of(3, 3, 3)):
        with pytest.raises(kvpolicy.KVPolicyError, match="must be windows of at least two prompts"):
            split(wrong, 0.5)
    for share in (0.0, 1.0, float("nan")):
        with pytest.raises(kvpolicy.KVPolicyError, match="must be between 0 and 1"):
            split(windows, share)


def test_a_hash_identifies_every_part_and_its_place() -> None:
    one, two, three = (torch.tensor([n]) for n in (1, 2, 3))
    some = [
        [Window(one, two)],
        [Window(one, three)],
        [Window(two, one)],
        [Window(torch.tensor([1, 2]), three)],
        [Window(one, three, two)],
        [Window(one, torch.tensor([2, 3]))],
        [Window(one, two), Window(one, two)],
    ]
    assert len({windows_sha256(windows) for windows in some}) == len(some)
    assert windows_sha256([Window(one.clone(), two.int())]) == windows_sha256(some[0])
