"""A server whose model several ranks share answers as one with the whole model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest
import torch
import transformers

import kvpolicy
from kvpolicy.cli.model_loading import load
from kvpolicy.serving import several_ranks
from kvpolicy.serving.capacity import Capacity
from kvpolicy.serving.prefix import PrefixFile
from kvpolicy.serving.server import following
from kvpolicy.serving.several_ranks import Channel, Leading, follow
from tests.parallel.launchers import LIMIT, free_port, words
from tests.parallel.ranks import RankError, run_ranks
from tests.serving.servers import client_of, is_healthy, metric, running
from tests.vllm import models

POLICIES = ("snapkv@0.5", "squeeze+kvcrush/h2o+tokenwise@0.5", "uniform/adakv+snapkv@0.5")
RECORDS = {"tiger": 4821, "lion": 7193, "wolf": 2650, "otter": 9384, "sheep": 7764, "falcon": 1937, "crane": 6042}
TEXT = "".join(f"{word}={number}\n" for word, number in RECORDS.items())
QUESTIONS = ["?tiger=", "?lion=", "horse=5523\n?horse=", "?wolf="]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The embedded model as a checkpoint."""
    where = tmp_path_factory.mktemp("model")
    for part in kvpolicy.tiny():
        part.save_pretrained(where)
    return str(where)


def ask(port: int, number: int, model: str = "tiny") -> Any:
    with client_of(port) as client:
        return client.completions.create(
            model=model, prompt=TEXT + QUESTIONS[number % 4], max_tokens=5, temperature=0, n=1 + number % 2
        )


def answers(port: int) -> list[tuple[list[str], int]]:
    """The texts of several requests at once, and how many tokens of a prompt are kept."""
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda number: ask(port, number), range(6)))
    return [([choice.text for choice in each.choices], each.usage.kvpolicy["kept_tokens"]) for each in found]


def _serve(rank: int, world: int, folder: str, policy: str, rows: int, file: PrefixFile | None = None) -> Any:
    """On the first rank: answers, bytes of a cache, tokens that were not computed, bytes of the text of a file, the
    status of an answer that is too long, and whether the answers are the same again.
    """
    capacity = Capacity(rows=rows, length=256)
    model, tokenizer = load(folder, tp=world)
    channel = Channel()
    start = file.load if file else None
    if rank:
        following(model, policy, channel, start, capacity=capacity)
        return None
    how: dict[str, Any] = {"policy": policy, "capacity": capacity, "compile": False, "channel": channel}
    with running((model, tokenizer), start, **how) as port:
        found = answers(port)
        usage = ask(port, 0).usage
        cached = usage.prompt_tokens_details.cached_tokens if file else 0
        held = usage.kvpolicy["cache_nbytes"], cached, metric(port, "prefix_nbytes")
        return found, *held, _status(lambda: _complete(port, TEXT, 5000)), answers(port) == found


def save_text(folder: str, policy: str, path: Path) -> None:
    """Save the cache of `TEXT`, on the ranks that share a model or on one."""
    models.save_text(load(folder, tp=int(os.environ.get("WORLD_SIZE", 1))), TEXT, policy, path)


TEXT_POLICIES = ("kvzip+tokenwise:bits=8@0.5", "uniform/adakv+kvzip@0.5")


def _save_and_serve(rank: int, world: int, folder: str, policy: str, path: str) -> Any:
    save_text(folder, policy, Path(path))
    torch.distributed.barrier()
    file = PrefixFile(Path(path), kvpolicy.Policy.parse(policy), False, world)
    return _serve(rank, world, folder, policy, 1, file)


def test_ranks_start_from_the_files_that_they_wrote(folder: str, tmp_path: Path) -> None:
    path = tmp_path / "text.safetensors"
    policy = TEXT_POLICIES[0]
    (found, *_), _ = run_ranks(_save_and_serve, 2, folder, policy, str(path))
    assert not path.exists() and len([*tmp_path.iterdir()]) == 2
    save_text(folder, policy, path)
    with running(load(folder), PrefixFile(path, kvpolicy.Policy.parse(policy)).load, policy=policy) as port:
        assert answers(port) == found


def _complete(port: int, text: str, new: int = 2) -> None:
    with client_of(port) as client:
        client.completions.create(model="tiny", prompt=text, max_tokens=new)


def _status(call: Callable[[], Any]) -> int:
    try:
        call()
    except openai.APIStatusError as error:
        return error.status_code
    return 200


@pytest.mark.parametrize(
    ("policy", "rows", "start"),
    [
        *((POLICIES[0], 1, ""), (POLICIES[0], 3, ""), (POLICIES[1], 3, ""), (POLICIES[2], 1, "")),
        *((TEXT_POLICIES[0], 3, "copies"), (TEXT_POLICIES[1], 1, "copies"), (TEXT_POLICIES[0], 1, "shared")),
    ],
)
def test_two_ranks_answer_as_one(policy: str, rows: int, start: str, folder: str, tmp_path: Path) -> None:
    """Also from a saved cache of one process, of which each rank starts from its heads."""
    path = tmp_path / "text.safetensors"
    save_text(folder, policy, path)
    parsed = kvpolicy.Policy.parse(policy)
    one, two = (PrefixFile(path, parsed, start == "shared", ranks) if start else None for ranks in (1, 2))
    how: dict[str, Any] = {"policy": policy, "capacity": Capacity(rows=rows, length=256), "compile": False}
    with running(load(folder), one.load if one else None, **how) as port:
        alone = answers(port)
        nbytes = ask(port, 0).usage.kvpolicy["cache_nbytes"]
        saved_nbytes = metric(port, "prefix_nbytes")
    (found, own, cached, own_saved, refused, again), other = run_ranks(_serve, 2, folder, policy, rows, two)
    assert [texts for texts, _ in found] == [texts for texts, _ in alone]
    if not policy.startswith("uniform/"):  # whose heads keep different numbers, of which a rank knows its own
        assert found == alone
    assert again and refused == 400 and other is None
    if start:
        assert cached == len(kvpolicy.tiny()[1](TEXT).input_ids) and saved_nbytes * 0.4 < own_saved < saved_nbytes * 0.7
    else:  # scores and positions of tokens that all heads have in common are whole
        assert nbytes / 2 <= own < nbytes * 0.6


def test_the_command(folder: str, tmp_path: Path) -> None:
    """As a user starts it; SIGTERM ends all ranks with exit code 0."""
    port = free_port()
    path = tmp_path / "text.safetensors"
    save_text(folder, POLICIES[0], path)
    serve = ["-m", "kvpolicy", "serve", folder, POLICIES[0], "--tp", "2", "--port", str(port), "--quiet"]
    serve += ["--prefix", str(path)]
    launch = [sys.executable, *words("torchrun"), *serve]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(launch, env=environment, stderr=subprocess.DEVNULL, start_new_session=True) as job:
        try:
            deadline = time.monotonic() + LIMIT
            while not is_healthy(port):
                assert job.poll() is None and time.monotonic() < deadline
                time.sleep(0.5)
            answer = ask(port, 1, folder)
            assert len(answer.choices) == 2 and answer.usage.prompt_tokens_details.cached_tokens > 0
            assert metric(port, 'requests_total{outcome="answered"}') == 2  # one for each choice
            job.send_signal(signal.SIGTERM)
            assert job.wait(LIMIT) in (0, 1, -signal.SIGTERM)  # what torchrun makes of the signal
        finally:
            with suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)  # the ranks too


class Recorder:
    """Forwards that note what they are asked, and caches that are known by what made them."""

    class Cache:
        def __init__(self, made: str) -> None:
            self.made = made

    count = 2

    def __init__(self) -> None:
        self.breaks_at: list[int] = []
        self.calls: list[Any] = []
        self.caches: weakref.WeakSet[Recorder.Cache] = weakref.WeakSet()

    def _make(self, what: str) -> Cache:
        cache = Recorder.Cache(what)
        self.caches.add(cache)
        return cache

    def read(self, answer: Any) -> tuple[Cache, Any]:
        self.calls.append(("read", answer.text, len(answer.tokens), answer.prompt.config.max_new_tokens))
        if answer.text == UNREADABLE:
            raise kvpolicy.KVPolicyError("The prompt must be another one.")
        if answer.text == self.breaks_at:
            raise ValueError("a defect of the model")
        return self._make(f"read {answer.text}"), None

    def copy(self, cache: Cache) -> Cache:
        self.calls.append(("copy", cache.made))
        return self._make(f"copy of {cache.made}")

    def put(self, row: int, cache: Cache) -> None:
        self.calls.append(("put", row, cache.made))

    def drop(self, row: int) -> None:
        self.calls.append(("drop", row))

    def step(self, tokens: list[int]) -> Any:
        self.calls.append(("step", tokens))

    def usage(self, row: int) -> Any:
        return None

    def must_read_again(self, length: int) -> bool:
        return False

    def restart(self) -> None:
        self.calls.append("restart")


UNREADABLE = [9, 9]


class Messages:
    """A channel within one process, which sends what JSON can hold."""

    def __init__(self) -> None:
        self.met = 0
        self.sent: list[str] = []

    def send(self, *message: Any) -> None:
        self.sent.append(json.dumps(message))

    def receive(self, limit: timedelta | None = None) -> list[Any]:
        if not self.sent:
            raise RuntimeError("Operation timed out!")
        return json.loads(self.sent.pop(0))

    def meet(self) -> None:
        self.met += 1


def answer(text: list[int], new: int = 0) -> Any:
    config = transformers.GenerationConfig(max_new_tokens=7, eos_token_id=[2, 3])
    return SimpleNamespace(text=text, tokens=[5] * new, prompt=SimpleNamespace(config=config))


BROKEN = [8, 8]


@pytest.mark.parametrize(("where", "goes_on"), [("both", True), ("first", True), ("other", False), ("silent", False)])
def test_ranks_that_fail_alike_go_on(where: str, goes_on: bool) -> None:
    """One that fails alone ends, though the first one says nothing; one that was ready waits for no cache."""
    first, other, messages = Recorder(), Recorder(), Messages()
    first.breaks_at = BROKEN if where in ("both", "first") else []
    other.breaks_at = BROKEN if where != "first" else []
    leading = Leading(first, messages)  # pyright: ignore[reportArgumentType]
    with suppress(ValueError):
        leading.read(answer(BROKEN))
        if where != "silent":
            leading.put(0, leading.copy(leading.read(answer([6]))[0]))
    if goes_on:
        leading.read(answer([7]))
        leading.close()
        follow(other, messages)  # pyright: ignore[reportArgumentType]
        assert other.calls == first.calls and messages.met == 2 and not other.caches
    else:
        with pytest.raises(ValueError, match="a defect of the model"):
            follow(other, messages)  # pyright: ignore[reportArgumentType]


def _fail(rank: int, world: int, folder: str, ranks: list[int]) -> Any:
    """The status of a request at whose prompt the model fails on some ranks, and of the next one."""
    model, tokenizer = load(folder, tp=world)
    channel = Channel()
    several_ranks.ALIKE = timedelta(seconds=3)
    if rank in ranks:
        model.get_input_embeddings().register_forward_pre_hook(_break)
    if rank:
        following(model, POLICIES[0], channel)
        return None
    with running((model, tokenizer), policy=POLICIES[0], compile=False, channel=channel) as port:
        found = [_status(lambda text=text: _complete(port, text)) for text in (BROKEN_TEXT, TEXT)]
    return found


BROKEN_TEXT = "wolf=2650\n?wolf="


def _break(module: Any, args: Any) -> None:
    if args[0][0].tolist() == kvpolicy.tiny()[1](BROKEN_TEXT).input_ids:
        raise ValueError("a defect of the model")


def test_a_prompt_at_which_ranks_fail(folder: str) -> None:
    """Where all of them do, they go on."""
    assert run_ranks(_fail, 2, folder, [0, 1])[0] == [500, 200]
    with pytest.raises(RankError, match="ValueError: a defect of the model"):
        run_ranks(_fail, 2, folder, [1], limit=60)


def test_the_others_run_what_the_first_runs_and_free_what_it_frees() -> None:
    first, other, messages = Recorder(), Recorder(), Messages()
    leading = Leading(first, messages)  # pyright: ignore[reportArgumentType]
    cache, _ = leading.read(answer([1, 2, 3]))
    twin = leading.copy(cache)
    leading.put(0, twin)
    leading.put(1, cache)
    with pytest.raises(kvpolicy.KVPolicyError):
        leading.read(answer(UNREADABLE))
    leading.step([4, 5])
    del cache, twin
    leading.drop(0)
    leading.restart()
    last, _ = leading.read(answer([6], 3))
    leading.put(0, last)
    leading.close()
    held: list[int] = []
    receive = messages.receive

    def watched() -> list[Any]:
        held.append(len(other.caches))
        return receive()

    messages.receive = watched  # pyright: ignore[reportAttributeAccessIssue]
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    follow(other, messages)  # pyright: ignore[reportArgumentType]
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == handlers
    assert other.calls == first.calls and len(first.calls) == 10
    assert held == [0, 1, 2, 2, 2, 2, 2, 0, 0, 1, 1]
