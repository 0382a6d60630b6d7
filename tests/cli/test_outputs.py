"""Whatever a command writes: never over an input, over nothing of the user's without --force, and whole or not at all.

The commands and their options come from the programs themselves, so that a new command is tested as it is.
"""

from __future__ import annotations

import argparse
import importlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from kvpolicy.cli import model_loading
from kvpolicy.cli.app import app, main
from kvpolicy.hf.cache_header import read_header
from kvpolicy.text.output import check_output
from kvpolicy_eval import cli as eval_cli
from tests.cli.conftest import Run

READ = {"file", "text", "more", "model", "prefix", "gguf"}
"""Parameters with the metavar FILE or DIR that are read; every other one is written."""
CALIBRATION = {"tensors.safetensors", "calibration.json"}
TEXT = "tiger=4821\nlion=1234\nwolf=9310\nsheep=7764\n" * 30
MINE = b"what a user wrote"


def _commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, command in getattr(group, "commands", {}).items():
        if hasattr(command, "commands"):
            yield from _commands(command, (*path, name))
        else:
            yield (*path, name), command


def _outputs() -> Iterator[Any]:
    for path, command in _commands(get_command(app)):
        for option in command.params:
            if option.metavar in ("FILE", "DIR", "FOLDER", "PATH") and option.name not in READ:
                yield pytest.param(path, command, option, id=f"{' '.join(path)} {option.opts[0]}")


def _line(path: tuple[str, ...], command: Any, option: Any, text: Path, out: Path, *more: str) -> list[str]:
    """A command line with this output, whose inputs are all this text."""
    words = [*path]
    for each in command.params:
        value = {"model": "tiny", "text": str(text), "file": str(text), "policies": "window@0.5"}.get(each.name)
        needed = each.required or each.name in ("file", "text")
        if each is option or not needed:
            continue
        assert value is not None, f"say in this test what the required parameter {each.name} of {path} is"
        words += [value] if each.param_type_name == "argument" else [each.opts[0], value]
    return [*words, option.opts[0], str(out), *more]


def test_the_commands_that_write_are_found() -> None:
    found = {f"{' '.join(each.values[0])} {each.values[2].opts[0]}" for each in _outputs()}
    assert {"cache make --out", "inspect --html", "tune --out", "calibrate csr --out", "calibrate gate --out"} <= found
    assert len(found) >= 11


@pytest.mark.parametrize("path,command,option", list(_outputs()))
def test_nothing_of_a_user_is_lost(path: tuple[str, ...], command: Any, option: Any, tmp_path: Path, run: Run) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    folder = tmp_path / "out"
    folder.mkdir()
    names = CALIBRATION if option.metavar != "FILE" else {"mine.txt"}
    for name in names:
        (folder / name).write_bytes(MINE)
    said = run(_line(path, command, option, text, folder if option.metavar != "FILE" else folder / "mine.txt"), 2)
    assert "must be absent, " in said and "; try another file, or --force to replace it." in said
    assert {each.name: each.read_bytes() for each in folder.iterdir()} == dict.fromkeys(names, MINE)


@pytest.mark.parametrize("path,command,option", list(_outputs()))
def test_no_input_is_replaced_with_or_without_force(
    path: tuple[str, ...], command: Any, option: Any, tmp_path: Path, run: Run
) -> None:
    text = tmp_path / ("text.txt" if option.metavar == "FILE" else "calibration.json")
    text.write_text(TEXT)
    link = tmp_path / "link"
    link.symlink_to(text)
    for where in [text, link] if option.metavar == "FILE" else [tmp_path]:
        for more in ([], ["--force"]):
            assert "must not be an input of the command" in run(_line(path, command, option, text, where, *more), 2)
    assert text.read_text() == TEXT and {each.name for each in tmp_path.iterdir()} == {text.name, "link"}


@pytest.mark.skipif(not Path("/dev/null").is_char_device(), reason="there is no such device")
def test_no_device_is_replaced(run: Run) -> None:
    make = ["cache", "make", TEXT, "--out", "/dev/null", "--force"]
    assert "must be a file, got the device '/dev/null'" in run(make, 2)
    assert Path("/dev/null").is_char_device()


def test_a_file_of_the_same_kind_is_replaced_and_a_link_stays_one(tmp_path: Path, run: Run) -> None:
    page = tmp_path / "page.html"
    inspect = ["inspect", TEXT, "--policy", "window@0.5", "--no-importance", "--html"]
    run([*inspect, str(page)])
    run([*inspect, str(page)])
    cache = tmp_path / "cache.safetensors"
    make = ["cache", "make", TEXT, "--out"]
    run([*make, str(cache), "--policy", "window@0.5"])
    link = tmp_path / "link.safetensors"
    link.symlink_to(cache)
    run([*make, str(link), "--policy", "window@0.25"])
    assert link.is_symlink() and read_header(cache)["spec"] == "window@0.25"
    run([*inspect, str(cache)], 2)  # a saved cache is no page
    run([*make, str(page)], 2)
    run([*make, str(page), "--policy", "window@0.5", "--force"])
    assert read_header(page)["spec"] == "window@0.5"
    assert {each.name for each in tmp_path.iterdir()} == {"page.html", "cache.safetensors", "link.safetensors"}


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("~no-such-user/a.safetensors", "The folder of a cache file must exist, got '~no-such-user"),
        ("loop", "got a link to itself, 'loop'"),
        ("a\0b", "An argument must be without null bytes, got 'a\\x00b'; try another one."),
    ],
)
def test_names_at_which_no_file_can_be(
    out: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("loop").symlink_to("loop")
    assert message in run(["cache", "make", "a", "--policy", "full", "--out", out], 2)
    assert {each.name for each in tmp_path.iterdir()} == {"loop"}


def test_a_folder_that_is_read_only_is_told_before_anything_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    """Also the folder above one that would be made."""
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    monkeypatch.setattr(model_loading, "load", lambda *args, **options: pytest.fail("nothing may be loaded"))
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    for words in (
        ["cache", "make", "a", "--out", "cache.safetensors"],
        ["inspect", "a", "--html", "page.html"],
        ["tune", "tiny", "--text", str(text), "--out", "new/plan.json"],
        ["calibrate", "channels", "--model", "tiny", "--text", str(text), "--out", "new/channels"],
        ["calibrate", "kvquant", "--model", "tiny", "--text", str(text), "--out", "kvquant"],
    ):
        assert "folder that can be written to, got" in run([*words[:-1], str(tmp_path / words[-1])], 2), words
    assert [each.name for each in tmp_path.iterdir()] == ["text.txt"]


def test_files_of_a_policy_are_inputs(tmp_path: Path, run: Run) -> None:
    from kvpolicy.allocators.profile import save_profile

    profile = tmp_path / "profile.json"
    save_profile(profile, "tiny", [0.5] * 8)
    line = ["cache", "make", TEXT, "--policy", f"squeeze:profile={profile}+window@0.5", "--out", str(profile)]
    assert "must not be an input of the command" in run([*line, "--force"], 2)


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.html"
    inspect = ["inspect", TEXT, "--policy", "window@0.5", "--no-importance", "--html", str(page)]
    assert main(inspect) == 0
    before = page.read_bytes()

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    assert main(inspect) == 2
    assert page.read_bytes() == before and [each.name for each in tmp_path.iterdir()] == ["page.html"]


def test_a_folder_of_inputs_protects_its_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    check_output(tmp_path / "new.json", inputs=[tmp_path])
    with pytest.raises(ValueError, match="must not be an input"):
        check_output(tmp_path / "a.txt", inputs=[tmp_path], force=True)
    check_output(tmp_path / "a.txt", inputs=[tmp_path], is_own=lambda path: path.endswith("a.txt"))


def _eval_outputs() -> Iterator[Any]:
    for name, (module, _) in eval_cli.COMMANDS.items():
        parser = argparse.ArgumentParser()
        importlib.import_module(module).add(parser)
        for action in parser._actions:
            if action.type is Path and action.option_strings and action.dest != "fill":
                yield pytest.param(name, action.option_strings[0], id=f"{name} {action.option_strings[0]}")


@pytest.mark.parametrize("name,option", list(_eval_outputs()))
def test_an_evaluation_loses_nothing_either(
    name: str, option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "mine"
    out.write_bytes(MINE)
    first = {"sweep": ["figures"], "report": [str(tmp_path)], "peers": ["run"]}
    assert eval_cli.main([name, *first[name], option, str(out)]) == 2
    assert str(out) in capsys.readouterr().err
    assert out.read_bytes() == MINE and [each.name for each in tmp_path.iterdir()] == ["mine"]


def test_a_sweep_spares_a_table_that_no_sweep_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "table.csv").write_bytes(MINE)
    assert eval_cli.main(["sweep", "figures", "--out", str(tmp_path)]) == 2
    assert "must be absent, or the folder of a sweep, got table.csv" in capsys.readouterr().err
    assert (tmp_path / "table.csv").read_bytes() == MINE


@pytest.mark.parametrize(
    "module,words,name",
    [
        ("kvpolicy_eval.data.windows", ["--out", "{}/mine"], "mine"),
        ("kvpolicy_eval.gpu.__main__", ["--report", "--results", "{}/mine"], "mine"),
        ("kvpolicy_eval.real.__main__", ["--model", "tiny", "--page-only", "--results", "{}/mine"], "mine"),
        ("kvpolicy_eval.board.__main__", ["--page-only", "--results", "{}/mine"], "mine"),
        ("kvpolicy_eval.bench.__main__", ["throughput", "--results", "{}/mine"], "mine"),
        ("kvpolicy_eval.pictures.__main__", ["h2o", "--out", "{}"], "h2o.svg"),
        ("kvpolicy_eval.train.__main__", ["--out", "{}"], "mine"),
        ("kvpolicy_vllm.env", ["{}"], "mine"),
    ],
)
def test_a_program_loses_nothing_either(
    module: str, words: list[str], name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_bytes(MINE)
    try:
        code: Any = importlib.import_module(module).main([word.format(tmp_path) for word in words])
    except SystemExit as ended:
        code = ended.code
    assert code not in (0, None), capsys.readouterr()
    assert [(each.name, each.read_bytes()) for each in tmp_path.iterdir()] == [(name, MINE)]
