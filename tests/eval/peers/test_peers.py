"""The comparison with peers: its protocol with a made-up side, its tables, and the real peer if it is installed."""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import kvpolicy
from kvpolicy_eval.peers import command, env, pair, runs, tables
from kvpolicy_eval.peers.ours import Ours
from kvpolicy_eval.peers.process import START, Failed, Process
from kvpolicy_eval.peers.side import storage_bytes
from kvpolicy_eval.peers.traps import TRAPS, Trap
from tests.eval.pages import page_with

FAKE = """
from kvpolicy_eval.peers.side import Side, serve


class Fake(Side):
    def echo(self, word):
        print("noise that must not be taken for an answer")
        return {"said": word}

    def fail(self):
        raise ValueError("two\\nlines")

    def leave(self):
        raise SystemExit


serve(Fake())
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A side that is made up, as a module on the path."""
    (tmp_path / "made_up.py").write_text(FAKE, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    with Process("made_up") as process:
        yield process


def test_a_side_answers_and_fails_in_json(fake: Process) -> None:
    assert fake.ask("echo", word="ü") == {"said": "ü"}
    with pytest.raises(Failed, match=r"^ValueError: two lines$"):
        fake.ask("fail")
    with pytest.raises(Failed, match="no request '_secret'"):
        fake.ask("_secret")
    assert fake.ask("versions")["torch"] == version("torch")
    with pytest.raises(RuntimeError, match="ended during 'leave'"):
        fake.ask("leave")


def test_a_peer_sees_our_files_and_none_of_our_packages(tmp_path: Path) -> None:
    package = tmp_path / "site" / "kvpolicy_eval"
    package.mkdir(parents=True)
    (package / "look.py").write_text("import sys; print(sys.path, __name__)", encoding="utf-8")
    command_line = [sys.executable, "-c", START, str(package), "kvpolicy_eval.look"]
    done = subprocess.run(command_line, capture_output=True, text=True, check=True)
    assert "__main__" in done.stdout and str(tmp_path / "site") + "'" not in done.stdout


@pytest.mark.parametrize("name", ["side", "stock", "theirs"])
def test_the_peer_s_side_imports_nothing_of_ours(name: str) -> None:
    source = (Path(runs.__file__).parent / f"{name}.py").read_text(encoding="utf-8")
    assert not re.search(r"import kvpolicy\n|from kvpolicy[ .]", source)


def test_our_side(ours: Ours) -> None:
    ids = list(range(3, 67))
    kept = ours.ask({"do": "kept", "ids": [ids], "method": "streaming:sinks=4", "keep": 8})["kept"]
    assert kept == [[[0, 1, 2, 3, 60, 61, 62, 63]] * 2] * 2
    averaged = ours.ask({"do": "kept", "ids": [ids], "method": "averaged", "keep": 8})["kept"]
    assert len(averaged[0][0]) == 8
    full = 66 * 2 * 2 * 2 * 16 * 4
    got = ours.ask({"do": "answer", "ids": [ids], "method": "knorm", "limit": full // 2, "new": 3})
    assert len(got["ids"]) == 3 and got["held"] <= full // 2 and got["walked"] == got["held"]
    for method in ("full", "snapkv"):
        got = ours.ask({"do": "time", "method": method, "length": 32, "share": 0.5, "steps": 2})
        assert got["prefill"] > 0 and got["step"] > 0 and got["held"] > 0


@pytest.mark.parametrize(
    "trap", [trap for trap in TRAPS if trap.ours or trap.name == "sinks"], ids=lambda t: t.question
)
def test_our_side_falls_into_no_trap(ours: Ours, trap: Trap) -> None:
    ids = list(range(3, 131))
    arguments: dict[str, Any] = {"first": ids[:80], "second": ids[40:]} if trap.name == "two" else {"ids": ids}
    arguments |= {"method": trap.ours} if trap.ours else {}
    arguments |= trap.options | ({"steps": 20} if trap.name == "sinks" else {})
    got = ours.ask({"do": "trap", "name": trap.name, **arguments})
    expected = {"compiled": "refused", "two": 0.0}.get(trap.name, got.get("of"))
    assert got["value"] == (expected if trap.name != "bytes" else pytest.approx(0.55, abs=0.06))


def test_every_storage_is_counted_once() -> None:
    cache = DynamicCache()
    cache.update(torch.zeros(1, 2, 8, 4), torch.zeros(1, 2, 8, 4), 0)
    assert storage_bytes(list(cache.layers)) == 2 * 8 * 8 * 4
    whole = torch.zeros(64)
    assert storage_bytes([whole[:1], {"again": (whole[2:],)}, torch.float32, 7, "text"]) == 256


PEAK = """
import torch
from kvpolicy_eval.peers.side import peak_bytes, reset_peak

first = torch.ones(2**22 + 2**20)
del first  # from here on, malloc keeps what is smaller in its heap
rows = [torch.ones(2**21) for _ in range(24)]
above = torch.ones(2**20)
del rows  # lies below what is still held: the heap keeps it
idle = reset_peak()
held = torch.ones(2**24)
print("unknown" if idle is None else (peak_bytes() - idle) / held.nbytes)
"""


def test_peak_memory_is_that_of_now_even_where_it_lies_in_what_was_freed() -> None:
    said = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True).stdout.strip()
    if said == "unknown":
        pytest.skip("no /proc")
    assert 0.9 <= float(said) <= 1.5


SPEED: dict[str, Any] = {"prefill": 1.0, "step": 0.01, "peak": 2**20, "held": 2**21}
RESULTS: dict[str, Any] = {
    "versions": {"ours": {"kvpolicy": "1", "torch": "3"}, "theirs": {"kvpress": "2", "torch": "3"}},
    "options": {"traps": "Here. "},
    "kept": [
        {"method": name, "ours": "a", "theirs": "b", "share": share, "overlap": 0.5, "same": 0.25, "ties": 1, "edge": 1}
        for name in ("Knorm", "TOVA")
        for share in (0.5, 0.1)
    ],
    "recall": [
        {"side": "ours", "method": "tova", "share": 0.1, "right": 0.5, "held": 0.1},
        {"side": "ours", "method": "masked", "share": 0.1, "right": 0.5, "held": 1.0},
        {"side": "theirs", "method": "quanto-4", "share": None, "right": 0.5, "held": 0.3},
        {"side": "theirs", "method": "tova", "share": 0.1, "error": "no"},
    ],
    "traps": [
        {"trap": "one", "ours": {"value": 16, "of": 16}, "theirs": {"value": 256, "of": 128}},
        {"trap": "two", "ours": {"value": "refused", "of": 3}, "theirs": {"error": "ValueError: no"}},
        {"trap": "three", "theirs": {"value": 0.57854}},
    ],
    "speed": [
        {"method": "SnapKV", "length": 2048, "ours": SPEED, "theirs": {"error": "no"}},
        {"method": "TOVA", "length": 2048, "ours": SPEED | {"peak": None}, "theirs": SPEED | {"step": 0.02}},
        {"method": "Knorm", "length": 2048, "theirs": SPEED | {"step": 0.02}},
    ],
    "generate": [{"model": "tiny", "library": "kvpolicy", "method": "tova@0.2", "error": "ValueError: no"}],
}


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("kept", "| Knorm | `a` | `b` | 0.500 (25%) | 0.500 (25%) | equal tokens have equal norms"),
        ("recall", "| transformers | `quanto-4` | 0.50 (bytes 0.30) |  |  |  |"),
        ("recall", "| kvpress | `tova` |  |  |  | fails |"),
        ("traps", "| one | 16 of 16 | 256, should be 128 |"),
        ("traps", "| two | refused | fails: ValueError |\n| three | not measured | 0.579 |"),
        ("traps", "Here. Ours: kvpolicy 1, torch 3. Theirs: kvpress 2."),
        ("recall", "| kvpolicy | `tova` |  |  |  | 0.50 |"),
        ("recall", "| kvpolicy | `masked` |  |  |  | 0.50 (bytes 1.00) |"),
        ("speed", "| SnapKV | 2,048 | 1.00/fails | 10.0/fails |  | 1.0/fails | 2.0/fails |"),
        ("speed", "| Knorm | 2,048 | -/1.00 | -/20.0 |  | -/1.0 | -/2.0 |"),
        ("generate", "| `tova@0.2` | fails: ValueError |"),
        ("speed", "| TOVA | 2,048 | 1.00/1.00 | 10.0/20.0 | 0.50 | /1.0 | 2.0/2.0 |"),
    ],
)
def test_tables(name: str, wanted: str) -> None:
    assert wanted in tables.text_of(name, RESULTS)


def test_fills_a_page_from_an_earlier_run(tmp_path: Path) -> None:
    page = page_with(tmp_path / "page.md", "peers-traps")
    results = tmp_path / "peers.json"
    results.write_text(json.dumps(RESULTS), encoding="utf-8")
    main = [sys.executable, "-m", "kvpolicy_eval.peers", "table", "--out", str(results), "--only", "traps"]
    paths = {"PYTHONPATH": ":".join(filter(None, sys.path))}
    done = subprocess.run([*main, "--fill", str(page)], env=paths, capture_output=True, text=True)
    assert done.returncode == 0 and "| one | 16 of 16 |" in page.read_text(encoding="utf-8")
    done = subprocess.run([*main[:5], str(tmp_path / "none.json")], env=paths, capture_output=True, text=True)
    assert done.returncode == 2 and "holds no results" in done.stderr and "Traceback" not in done.stderr


def test_a_table_keeps_the_versions_that_it_was_measured_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in a file of format 1, which had one set of versions for all of its tables."""
    newer = {"ours": {"kvpolicy": "8"}, "theirs": {"kvpress": "9"}}
    monkeypatch.setattr(env, "find", lambda _: "python")
    monkeypatch.setattr(command, "Process", lambda *_, **__: contextlib.nullcontext())
    monkeypatch.setattr(command, "run_all", lambda names, *_: {"versions": newer} | {n: RESULTS[n] for n in names})
    place = tmp_path / "peers.json"
    place.write_text(json.dumps(RESULTS | {"format": 1}), encoding="utf-8")
    parser = argparse.ArgumentParser()
    command.add(parser)
    for only in ("kept", "speed"):
        command.run(parser.parse_args(["run", "--out", str(place), "--only", only]))
    results = command.read(place)
    texts = {name: tables.text_of(name, results) for name in tables.TABLES}
    assert all(texts[name].endswith("Ours: kvpolicy 8. Theirs: kvpress 9.") for name in ("kept", "speed"))
    assert all(texts[name].endswith("Ours: kvpolicy 1, torch 3. Theirs: kvpress 2.") for name in ("recall", "traps"))


def test_says_where_the_environment_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no environment of the peers in .* make-env"):
        env.find(tmp_path)
    (tmp_path / "other.json").write_text("[]", encoding="utf-8")
    with pytest.raises(ValueError, match="holds no results"):
        command.read(tmp_path / "other.json")


@pytest.mark.slow
@pytest.mark.network
def test_the_real_peer() -> None:
    try:
        python = env.find()
    except ValueError as error:
        pytest.skip(str(error))
    with Process("kvpolicy_eval.peers.ours") as mine, Process("kvpolicy_eval.peers.theirs", python) as theirs:
        both = pair.Pair(mine, theirs)
        results = runs.run(["traps"], both, pair.Options(n=1))
        assert theirs.ask("versions")["kvpress"] == env.KVPRESS
        with pair.embedded_model() as path:
            both.load(path)
            _, tokenizer = kvpolicy.tiny()
            ids = tokenizer("7 5 3 1 2 9 " * 20).input_ids
            for method in ("tova", "streaming"):
                asked: Any = {"ids": [ids], "method": method, "keep": 24}
                assert mine.ask("kept", **asked) == theirs.ask("kept", **asked)
    assert not [line for line in results["traps"] if "error" in line["theirs"]]
