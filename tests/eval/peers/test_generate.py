"""The part `generate` of the comparison: what it counts and times, with the caches of transformers and ours."""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.cache_utils import Cache, QuantizedLayer

import kvpolicy
from kvpolicy_eval.peers import command, env, generate, tables
from kvpolicy_eval.peers.generate import METHODS, STOCK, Method
from kvpolicy_eval.peers.ours import Ours
from kvpolicy_eval.peers.pair import Options, Pair, Question
from kvpolicy_eval.peers.process import Failed
from kvpolicy_eval.peers.side import Stream, storage_bytes
from kvpolicy_eval.peers.stock import stock_cache
from kvpolicy_eval.peers.theirs import Theirs
from tests.doc_blocks import DOCS

IDS = list(range(3, 67))
NEW = 8
TOKEN = 2 * 2 * 2 * 16 * 4
"""Bytes of a token in the full cache of the fixture's model: keys and values, layers, KV heads, head dim, fp32."""


def ask(side: Any, method: str, share: float | None = None, new: int = NEW) -> dict[str, Any]:
    return side.ask({"do": "generate", "ids": IDS, "method": method, "share": share, "new": new})


def test_the_stock_cache_holds_every_token_but_the_last(ours: Ours) -> None:
    got = ask(ours, "")
    assert got["held"] == (len(IDS) + NEW - 1) * TOKEN
    assert got["prefill"] > 0 and got["step"] > 0
    out = ours.model.generate(
        torch.tensor([IDS]), max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert got["ids"] == out[0, len(IDS) :].tolist()


def test_no_end_token_shortens_the_text(ours: Ours, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ours.model.generation_config, "eos_token_id", ask(ours, "")["ids"][0])
    assert len(ask(ours, "")["ids"]) == NEW


@pytest.mark.parametrize("spec", ["full+kivi:bits=4", "full+tokenwise:bits=2", "window@0.5", "snapkv+kivi:bits=4@0.5"])
def test_our_bytes_are_the_most_that_the_cache_reports(ours: Ours, spec: str) -> None:
    """The slow version: `generate` by hand, and the report of the cache after each of its calls."""
    name, at, share = spec.partition("@")
    got = ask(ours, name, float(share) if at else None)
    reported: list[int] = []
    tokens: list[int] = []
    with torch.no_grad(), kvpolicy.attach(ours.model, spec):
        cache = kvpolicy.PolicyCache(ours.model, prompt=len(IDS), new=NEW)
        inputs = torch.tensor([IDS])
        for _ in range(NEW):
            logits = ours.model(inputs, cache=cache, logits_to_keep=1).logits
            reported.append(cache.nbytes)
            inputs = logits[:, -1:].argmax(-1)
            tokens.append(int(inputs))
    assert got["held"] == max(reported) and got["ids"] == tokens


class HalfLayer(QuantizedLayer):
    """A quantized layer whose codes are halves, for an environment without the backends of transformers."""

    def _quantize(self, tensor: torch.Tensor, axis: int) -> Any:
        return tensor.half()

    def _dequantize(self, q_tensor: torch.Tensor) -> Any:
        return q_tensor.float()


def test_codes_and_the_residual_buffer_are_counted(ours: Ours, monkeypatch: pytest.MonkeyPatch) -> None:
    """The most is held before the residual buffer is encoded, when it has one token less than its length."""
    residual = 5

    def made(config: Any, quantization: str = "") -> Cache:
        return Cache(layers=[HalfLayer(residual_length=residual) for _ in range(config.num_hidden_layers)])

    monkeypatch.setattr("kvpolicy_eval.peers.ours.stock_cache", made)
    halves = TOKEN // 2
    # After two steps, the buffer has two tokens; after five, all are codes; after eight, it has three.
    for steps, codes, buffer in [(2, 64, 2), (4, 64, 4), (5, 64, 4), (8, 69, 3)]:
        most = max(64 * halves + 4 * TOKEN * (steps >= 4), codes * halves + buffer * TOKEN)
        assert ask(ours, "quanto-4", new=steps + 1)["held"] == most


@pytest.mark.parametrize("backend", ["quanto", "hqq"])
@pytest.mark.parametrize("bits", [4, 2])
def test_backends_of_transformers(ours: Ours, backend: str, bits: int) -> None:
    pytest.importorskip({"quanto": "optimum.quanto", "hqq": "hqq"}[backend])
    cache = stock_cache(ours.model.config, f"{backend}-{bits}")
    with torch.no_grad():
        ours.model(torch.tensor([IDS]), cache=cache)
    group = 32
    codes = len(IDS) * TOKEN * bits // 32
    groups = len(IDS) * TOKEN // 4 // group
    assert storage_bytes(list(cache.layers)) == codes + groups * 2 * 4


def test_theirs_gives_a_press_and_a_cache(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a press that does nothing: the names are read, and the cache is that of the quantization."""
    made: list[tuple[Any, ...]] = []
    side = Theirs()
    monkeypatch.setattr("kvpolicy_eval.peers.theirs.import_module", lambda name: None)
    side.load(str(llama))

    def press_of(method: str, ratio: float) -> Callable[[Any], Any]:
        made.append((method, round(ratio, 3)))
        return lambda model: contextlib.nullcontext()

    def cache_of(config: Any, quantization: str = "") -> Any:
        made.append((quantization,))
        return stock_cache(config)

    monkeypatch.setattr("kvpolicy_eval.peers.theirs.press_of", press_of)
    monkeypatch.setattr("kvpolicy_eval.peers.theirs.stock_cache", cache_of)
    for method, share in [("", None), ("snapkv:window_size=32", 0.2), ("snapkv+quanto-4", 0.2), ("hqq-4", None)]:
        assert len(ask(side, method, share)["ids"]) == NEW
    pressed = [("snapkv:window_size=32", 0.8), ("",), ("snapkv", 0.8), ("quanto-4",)]
    assert made == [("",), *pressed, ("hqq-4",)]


def test_counting_is_no_part_of_the_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    stream = Stream(lambda: time.sleep(0.05) or 7)
    for _ in range(3):
        stream.put(torch.zeros(1))
    stream.end()
    assert stream.held == [7, 7, 7] and len(stream.seconds()) == 2 and max(stream.seconds()) < 0.04


def test_one_thread_is_timed_by_its_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for threads, waits in ((1, False), (2, True)):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        stream = Stream(lambda: 0)
        stream.put(torch.zeros(1))
        time.sleep(0.05)
        stream.put(torch.zeros(1))
        assert (stream.seconds()[0] > 0.04) == waits


class FakeSide:
    """A process that answers from a table and notes what it is asked."""

    def __init__(self, versions: dict[str, str] | None = None, failing: str | None = None) -> None:
        self.asked: list[str] = []
        self.loaded = 0
        self._versions = versions or {}
        self._failing = failing

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        if do == "versions":
            return self._versions
        if do == "load":
            self.loaded += 1
            return {}
        assert do == "generate" and arguments["new"] in (generate.NEW, generate.WARM_UP)
        method = arguments["method"]
        self.asked.append(method + "!" * (arguments["new"] == generate.WARM_UP))
        if method == self._failing:
            raise Failed("RuntimeError: no such size")
        factor = 1 if not method else 3
        text = list(range(generate.NEW))
        text[10] += bool(method)
        return {"ids": text, "prefill": 2.0 * factor, "step": 0.01 * factor, "held": len(arguments["ids"]) * factor}


def pair_of(ours: FakeSide) -> Any:
    """The sides of a comparison."""
    return Pair(ours, FakeSide())  # pyright: ignore[reportArgumentType]


INSTALLED = {"optimum-quanto": "1", "hqq": "2"}
PROMPTS = [Question("a", [3] * 10, [1] * 4), Question("b", [3] * 20, [1] * 11), Question("c", [3] * 30, [])]


def test_measures_in_turn_around_the_stock_cache_of_the_same_side() -> None:
    pair = pair_of(FakeSide())
    ours_methods = [Method("ours", STOCK), *(Method("ours", name, name) for name in "xyz")]
    methods = [*ours_methods, Method("theirs", STOCK), Method("theirs", "p", "p")]
    results = generate.measure(pair, methods, PROMPTS, rounds=2)
    # A short call warms up; then there are two rounds with each of three prompts, and every second one is reversed.
    assert pair.ours.asked == ["!", "x!", "y!", "z!", *["y", "", "x", "", "z", "x", "", "y", "z", ""] * 3]
    assert pair.theirs.asked == ["!", "p!", *["", "p", "p", ""] * 3]
    stock = results[methods[0]]
    ours = results[methods[1]]
    assert (stock["step_ratio"], stock["held_ratio"], stock["same_answers"]) == (1, 1, 1)
    assert stock["same_tokens"] == generate.NEW
    assert (ours["step_ratio"], ours["prefill_ratio"], ours["held_ratio"], ours["held"]) == (3, 3, 3, 60)
    # The eleventh token differs: it belongs to the second answer and not to the first one.
    assert (ours["same_answers"], ours["same_tokens"]) == (0.5, 10)


def test_ratios_are_of_neighboring_calls() -> None:
    """A machine that becomes slower with every call: the ratios stay near those of the methods."""

    class Slower(FakeSide):
        def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
            result = super().ask(do, **arguments)
            return {key: value * 1.2 ** len(self.asked) if key == "step" else value for key, value in result.items()}

    pair = pair_of(Slower())
    names = "abcdefgh"
    methods = [Method("ours", STOCK), *(Method("ours", name, name) for name in names), Method("theirs", STOCK)]
    results = generate.measure(pair, methods, PROMPTS[:2], rounds=1)
    assert [results[method]["step_ratio"] for method in methods[1:-1]] == [pytest.approx(3.05)] * len(names)


def test_a_method_that_fails_has_its_error_and_the_others_go_on() -> None:
    pair = pair_of(FakeSide(failing="x"))
    methods = [Method("ours", STOCK), Method("ours", "x", "x"), Method("theirs", STOCK)]
    results = generate.measure(pair, methods, PROMPTS, rounds=1)
    assert results[methods[1]] == {"error": "RuntimeError: no such size"}
    assert pair.ours.asked == ["!", "x!", "", "", ""] and "step" in results[methods[0]]
    with pytest.raises(Failed):
        generate.measure(pair_of(FakeSide(failing="")), methods, PROMPTS, 1)


@pytest.mark.parametrize("missing", [(), ("hqq",), ("optimum-quanto", "hqq")])
def test_missing_packages_are_skipped_with_a_sentence(
    missing: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    versions = {name: number for name, number in INSTALLED.items() if name not in missing}
    pair = pair_of(FakeSide(versions))
    monkeypatch.setattr(generate, "questions", lambda n, names, length: PROMPTS)
    lines = list(generate.generate(pair, Options(rounds=1, layers=1, hidden=64)))
    assert [line["method"] for line in lines] == [method.code for method in METHODS] * 2
    skipped = [line for line in lines if "skipped" in line]
    assert len(skipped) == 4 * len(missing) and not any("hqq" in name for name in pair.ours.asked if "hqq" in missing)
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("generate: ")]  # no progress bars
    assert len(said) == len(missing)
    for name, sentence in zip(missing, said, strict=True):
        assert sentence == f"generate: {name} is not installed; try `pip install {' '.join(env.QUANTIZERS)}`"
    # Theirs has an environment of its own, which `make-env` makes with all packages.
    assert not any(line["side"] == "theirs" for line in skipped)
    assert pair.ours.loaded == pair.theirs.loaded == 2


def test_our_side_reports_only_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ours, "packages", ("torch", "no-such-package"))
    assert set(Ours().versions()) == {"kvpolicy", "python", "torch"}


def test_each_method_is_of_its_library_and_parses() -> None:
    libraries = {method.code: method.library for method in METHODS}
    assert libraries[STOCK] == "transformers" and libraries["QuantizedCache('hqq', nbits=2)"] == "transformers"
    assert {method.library for method in METHODS if method.side == "theirs"} == {"transformers", "kvpress"}
    for method in METHODS:
        if method.library == "kvpolicy":
            policy = kvpolicy.Policy.parse(method.code)
            budget = "" if method.share is None else f"@{method.share}"
            assert policy == kvpolicy.Policy.parse(f"{method.name}{budget}")


TIMES = {"prefill": 2.5, "prefill_ratio": 1.02, "step": 0.0123, "step_ratio": 0.617}
HELD = {"held": 3 * 2**20, "held_ratio": 0.204, "same_answers": 0.8, "same_tokens": 28.4, "tokens": 129}
OURS: dict[str, Any] = {"model": "tiny-4k", "side": "ours", "library": "kvpolicy", "method": "snapkv@0.2"}
LINES = [
    OURS | TIMES | HELD,
    OURS | {"library": "transformers", "method": "Q", "error": "RuntimeError: a|b"},
    OURS | {"library": "transformers", "method": "Q", "skipped": "hqq is not installed"},
    OURS | TIMES | HELD | {"model": "random", "prefill_ratio": 1.5, "same_answers": None},
    OURS | TIMES | HELD | {"method": STOCK},
    OURS | TIMES | HELD | {"method": STOCK, "prefill": 1.25},
]


def test_the_table() -> None:
    lines = tables.generate(LINES).splitlines()
    assert "| tiny-4k: same answers |" in lines[0] and "random: same answers" not in lines[0]
    assert len(lines) == 7 and {*lines[2:]} == {
        "| `snapkv@0.2` | 1.02 | 0.62 | 0.20 | 80% | 28 | 1.50 | 0.62 | 0.20 | 28 |",
        "| `Q` | fails: RuntimeError |  |  |  |  |  |  |  |  |",
        "| `Q` | skipped: hqq is not installed |  |  |  |  |  |  |  |  |",
        "| `DynamicCache()` | 2,500 ms | 12.3 ms | 3.0 MiB | 80% | 28 |  |  |  |  |",
        "| `DynamicCache()` | 1,250 ms | 12.3 ms | 3.0 MiB | 80% | 28 |  |  |  |  |",
    }


def test_the_command_has_the_part() -> None:
    parser = argparse.ArgumentParser()
    command.add(parser)
    args = parser.parse_args(["run", "--only", "generate", "--rounds", "2", "--threads", "1"])
    assert args.only == ["generate"] and args.rounds == 2
    said = command.describe("generate", Options(threads=3, rounds=2, layers=5, hidden=128))
    assert "3 thread(s), wall time" in said and "2 round(s)" in said and "5 layers, hidden size 128" in said
    assert "1 thread(s), CPU time" in command.describe("generate", Options())


def test_the_page_installs_the_versions_of_the_environment() -> None:
    page = (DOCS / "compare.md").read_text(encoding="utf-8")
    assert f"pip install -c constraints.txt {' '.join(env.QUANTIZERS)}\n" in page
