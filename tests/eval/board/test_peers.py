"""Rows of other libraries on the board: what they are asked, what counts as right, and what has no row."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import kvpolicy
from kvpolicy_eval.board import __main__ as command
from kvpolicy_eval.board.cells import Board, Cell
from kvpolicy_eval.board.page import peer_refusals, row
from kvpolicy_eval.board.peers import METHODS, PEERS, PeerEvaluator
from kvpolicy_eval.board.policies import Entry
from kvpolicy_eval.data.tasks import draw_prompts
from kvpolicy_eval.peers.process import Failed
from kvpolicy_lm_eval.data.modes import MODES, place, second_question

SNAPKV = PEERS[0]
ADAKV = next(entry for entry in PEERS if "Ada" in entry.spec)
TOVA = Entry("TOVAPress()", "kvpress")
TOKEN_BYTES = 2 * 8 * 4 * 32 * 4
"""Keys and values, layers, KV heads, channels, fp32."""


class Peer:
    """Answers recall alone, holds what it may, or everything as AdaKV, and fails as TOVA."""

    def __init__(self, docs: int, mode: str) -> None:
        _, self.tokenizer = kvpolicy.tiny()
        self.answers: dict[tuple[int, ...], list[int]] = {}
        self.compressed: dict[tuple[int, ...], str] = {}
        self.asked: list[dict[str, Any]] = []
        for task, prompts in draw_prompts(docs, 512).items():
            for prompt in prompts:
                if mode == "second" and second_question(prompt) is None:
                    continue
                placed = place(prompt, mode)
                ids = tuple(self.tokenizer(placed.compressed + placed.fed).input_ids)
                self.compressed[ids] = placed.compressed
                if task == "recall":
                    self.answers[ids] = self.tokenizer(placed.answer, add_special_tokens=False).input_ids

    def ask(self, do: str, **asked: Any) -> dict[str, Any]:
        if do == "load":
            assert (Path(asked["path"]) / "model.safetensors").exists() and asked["dtype"] == "float32"
            return {}
        self.asked.append(asked)
        if asked["method"] == "tova":
            raise Failed("ValueError: too short")
        ids = tuple(asked["ids"][0])
        new = asked["new"]
        full = (len(ids) + new - 1) * TOKEN_BYTES
        return {"ids": self.answers.get(ids, [0] * new), "held": full if "ada" in asked["method"] else asked["limit"]}


@pytest.mark.parametrize("mode", MODES)
def test_a_peer_gets_the_prompts_of_the_board_and_the_bytes(mode: str) -> None:
    peer: Any = Peer(2, mode)
    right, held = PeerEvaluator(peer, 2, 512, "tiny").accuracy(SNAPKV.spec, 0.1, mode)
    assert right == {task: float(task == "recall") for task in right} and ("passkey" in right) == (mode != "second")
    assert held == pytest.approx(0.1, abs=1e-4)
    for asked in peer.asked:
        ids = asked["ids"][0]
        after = asked["after"]
        assert asked["limit"] == int(0.1 * (len(ids) + asked["new"] - 1) * TOKEN_BYTES)
        assert asked["method"] == METHODS[SNAPKV.spec]
        text = peer.tokenizer.decode(ids[:-after] if after else ids, skip_special_tokens=True)
        whole = peer.compressed[tuple(ids)]
        # The last token of few_shot's questions is held back, since its answers have a single token.
        assert text == whole if asked["new"] > 1 or mode != "inside" else whole.startswith(text) and after == 1


def test_what_holds_more_or_fails_has_no_row_and_its_reason_is_listed(tmp_path: Path) -> None:
    peer: Any = Peer(1, "inside")
    board = Board(tmp_path / "results.jsonl", {512: 1}, "tiny", peer)
    for entry in (SNAPKV, ADAKV, TOVA):
        board.cell(Cell(entry, 0.2, "inside", 512))
    assert row(board, SNAPKV, 0.2, 512)[:3] == [f"`{SNAPKV.spec}`", "kvpress", "0.17 (.03-.56)"]
    assert row(board, ADAKV, 0.2, 512)[2:6] == row(board, TOVA, 0.2, 512)[2:6] == ["", "", "", ""]
    assert peer_refusals(board, [SNAPKV, ADAKV, TOVA], [0.2], [512]).splitlines()[2:] == [
        f"| `{ADAKV.spec}` | 512 tokens at 20% | It holds 100.0% of the full cache's bytes. |",
        "| `TOVAPress()` | 512 tokens at 20% | ValueError: too short |",
    ]


def test_without_a_peer_its_cells_are_refused_and_the_command_measures_none(tmp_path: Path) -> None:
    board = Board(tmp_path / "results.jsonl", {512: 1}, "tiny")
    with pytest.raises(ValueError, match="--peers"):
        board.cell(Cell(SNAPKV, 0.2, "inside", 512))
    command.main(["--results", str(board.results), "--only", SNAPKV.spec, "--no-times"])
    assert not board.results.exists()
    with pytest.raises(ValueError, match="no environment of the peers"):
        command.main(["--results", str(board.results), "--peers", "--env", str(tmp_path / "none"), "--no-times"])


@pytest.mark.parametrize("entry", PEERS)
def test_the_code_of_a_row_is_what_the_peer_makes(entry: Entry, monkeypatch: pytest.MonkeyPatch) -> None:
    """A method of `theirs` makes the press, or the cache, that the row names."""
    from types import ModuleType

    from kvpolicy_eval.peers import theirs

    def recorded(name: str) -> Any:
        return lambda *args, compression_ratio=None, **options: (
            f"{name}({', '.join([*args, *(f'{key}={value}' for key, value in options.items())])})"
        )

    fake: Any = ModuleType("kvpress")
    for name in [*theirs.PRESSES.values(), "AdaKVPress"]:
        setattr(fake, name, recorded(name))
    monkeypatch.setitem(sys.modules, "kvpress", fake)
    press, _, quant = METHODS[entry.spec].partition("+")
    if entry.kind == "transformers":
        quant = press
        press = ""
    made = [theirs.press_of(press, 0.5)] if press else []
    if quant:
        backend, bits = quant.split("-")
        made.append(f"QuantizedCache('{backend}', nbits={bits})")
    assert ", ".join(made) == entry.spec
