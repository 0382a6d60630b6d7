"""Tables of the documentation, each by its command: what is measured, and that a page gets it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import kvpolicy
from kvpolicy_eval.common import heldout
from kvpolicy_eval.tables import acceptance, files, memory, moved, requantize
from kvpolicy_eval.tables.__main__ import main
from tests.eval.pages import cells, page_with
from tests.files.kvtc import calibrated, spec
from tests.sampling import each_once, product

SLOTS = Path(__file__).parents[3] / "docs" / "design" / "slots.md"
READERS = ["exact", "quest:dense=0", "loki", "sparq", "centroids:page=16"]


def test_a_full_budget_is_always_accepted() -> None:
    model, tokenizer = kvpolicy.tiny()
    rows = acceptance.prompts(tokenizer, 1)[:, :40]
    assert acceptance.acceptance(model, "window@1.0", rows, 3)[0] == 1.0
    with pytest.raises(ValueError, match="--n must be at most"):
        acceptance.prompts(tokenizer, 10**6)


def test_the_page_of_accepted_drafts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = page_with(tmp_path / "page.md", "acceptance")
    monkeypatch.setattr(acceptance, "acceptance", lambda model, policy, rows, gamma: (0.5, 2.25))
    main(["acceptance", "--n", "1", "--only", "h2o", "--budgets", "0.5", "--fill", str(page)])
    assert "| `h2o` | 0.50 (2.2) |" in page.read_text()


def test_forms_are_compared_with_the_cache_that_was_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "PROMPT", 48)
    model = calibrated(tmp_path / "calibration")
    rows = [row[None] for row in torch.randint(3, 40, (2, 56), generator=torch.Generator().manual_seed(2))]
    wanted = {
        "none": None,
        "zlib": "zlib",
        "many": spec(tmp_path / "calibration", 1),
        "few": spec(tmp_path / "calibration", 4),
    }
    for policy in ("full", "h2o@0.8"):
        found = files.measured(model, rows, policy, wanted)
        assert found["none"] == found["zlib"] and found["none"].divergence == 0 and found["none"].same == 1
        assert found["none"].nbytes > found["many"].nbytes > found["few"].nbytes
        assert 0 < found["many"].divergence < found["few"].divergence
        assert found["few"].same <= 1


def test_layers_have_components_together_only_where_they_hold_the_same_tokens() -> None:
    found = {1: Path("one"), 8: Path("all")}
    assert "kvtc of 8 layers, ratio=4" in files.forms(found, "full")
    assert [*files.forms(found, "h2o@0.5")] == ["none", "zlib", "kvtc, ratio=4", "kvtc, ratio=16"]


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


def test_the_page_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = page_with(tmp_path / "page.md", "memory")
    line = ["memory", "--models", "tiny", "--policies", "full", "--backend", "hf", "--fill", str(page)]
    monkeypatch.setattr(memory, "RANKS", [1, 2])
    main(line)
    assert [row[1:4] for row in cells(page.read_text())] == [["1", "3.19 MiB", "full"], ["2", "1.6 MiB", "full"]]


@product("reader,share", READERS, [0.6, 0.25], sample=each_once(READERS, [0.6, 0.25]))
def test_one_more_page_would_not_fit(reader: str, share: float) -> None:
    def part(tokens: int) -> float:
        full = kvpolicy.plan("tiny", "full", prompt=moved.LENGTH).moved
        return kvpolicy.plan("tiny", f"{reader}:read={tokens}", prompt=moved.LENGTH).moved / full

    tokens = moved.read_for(reader, share)
    assert tokens == 0 or part(tokens) <= share
    assert part(tokens + 1) > share


def test_every_reader_of_the_table_fits_some_share() -> None:
    for reader in moved.READERS:
        assert any(moved.read_for(reader, share) for share in moved.SHARES)


def test_the_page_of_bytes_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = page_with(tmp_path / "page.md", "moved")
    tasks = {"tasks": {"recall": 0.5, "needles": 1.0}}
    monkeypatch.setattr(moved.Bench, "result", lambda *_: tasks)
    monkeypatch.setattr(moved.HeldOutText, "__init__", lambda *_: None)
    monkeypatch.setattr(moved.HeldOutText, "divergence", lambda self, policy: len(policy) / 100)
    main(["moved", "--only", "exact", "--shares", "0.6", "0.4", "--fill", str(page)])
    text = page.read_text()
    divergences = "divergence, 20% read | divergence, 10% read | divergence, 5% read"
    assert f"| bytes read, of the full cache | 60% | 40% | {divergences} |" in text
    assert "| `exact` | 0.75 (44) |  | 0.1400 | 0.1400 | 0.1500 |" in text


def test_the_full_cache_does_not_diverge_and_less_read_diverges_more(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, number in (("PROMPT", 96), ("FOLLOWING", 6), ("ROWS", 2)):
        monkeypatch.setattr(heldout, name, number)
    text = heldout.HeldOutText(*kvpolicy.tiny())
    some, few = (text.divergence(f"exact:read={read}") for read in (0.5, 0.05))
    assert abs(text.divergence("full")) < 1e-6 < some < few


def test_the_docs_show_the_errors_of_requantization() -> None:
    rows = cells(SLOTS.read_text(encoding="utf-8"))
    two = requantize.errors(2)
    assert two["fresh"] < two["overwrite"] < two["compact once"] < two["compact 5 times"]
    for bits in requantize.BITS:
        (shown,) = [row for row in rows if row[0] == str(bits)]
        found = requantize.errors(bits)
        assert [float(cell) for cell in shown[1:]] == pytest.approx(
            [found[case] for case in requantize.CASES], rel=0.02
        )
