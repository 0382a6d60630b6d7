"""The table of memory on ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvpolicy_eval.tables import memory
from kvpolicy_eval.tables.__main__ import main


def test_lines_of_a_model() -> None:
    rows = list(memory.rows(["mixtral-8x7b"], ["full", "window@0.2"], 80 * 10**9, "deepspeed", 4096, 1024, 256))
    assert [line[:3] for line in rows[::2]] == [
        ["mixtral-8x7b", "2", "43.6 GiB"],
        ["mixtral-8x7b", "4", "21.9 GiB"],
        ["mixtral-8x7b", "8", "11.1 GiB"],
    ]
    token = 32 * 2 * 4 * 128 * 2  # bytes on the first of two ranks: 4 of 8 KV heads in 32 layers
    assert rows[0][3:5] == ["`full`", f"{5120 * token / 2**20:.0f} MiB"]
    assert rows[1][3:5] == ["`window@0.2`", f"{819 * (token + 32 * 4 * 4) / 2**20:.1f} MiB"]
    left = 80 * 10**9 - 46835179520
    whole, chunked = (int(cell.replace(",", "")) for cell in rows[1][5:])
    # In chunks, a row needs little more than its cache; at once, its activations too.
    assert whole < 0.2 * chunked < chunked < left // (819 * (token + 32 * 4 * 4))


def test_it_fills_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- table:memory -->\n<!-- /table -->\n")
    line = ["memory", "--models", "tiny", "--policies", "full", "--backend", "hf", "--fill", str(page)]
    monkeypatch.setattr(memory, "RANKS", [1, 2])
    main(line)
    assert "| tiny | 2 | 1.6 MiB | `full` |" in capsys.readouterr().out
    assert page.read_text().count("| tiny |") == 2
