"""The cases of the record, and how one is run."""

from __future__ import annotations

import copy
import functools
import logging
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from kvpolicy import Policy
from tests.golden import ranks, scenarios
from tests.golden.calibrations import write_files
from tests.golden.digests import FAILED, REFUSED, Fields
from tests.golden.families import KINDS, MAIN, build
from tests.golden.policies import OPTIONS, SCORERS, parse, star


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A policy on a family in a dtype, and what it is put through.

    Attributes:
        label: Of the policy.
        spec: The policy as text, in which FOLDER stands for the folder of calibrations.
        family: The model family.
        dtype: `fp32` or `bf16`.
        scenario: The name of the scenario.
    """

    label: str
    spec: str
    family: str
    dtype: str
    scenario: str

    @property
    def name(self) -> str:
        """What the record calls it."""
        return f"{self.scenario} {self.family} {self.dtype} {self.label}"


def all_cases(quick: bool = False) -> dict[str, Case]:
    """Every case by name, or the quick ones."""
    found: list[Case] = []

    def add(policies: dict[str, str], scenario: str, families: Iterable[str], dtypes: Iterable[str]) -> None:
        found.extend(
            Case(label=label, spec=spec, family=family, dtype=dtype, scenario=scenario)
            for family in families
            for dtype in dtypes
            for label, spec in policies.items()
        )

    few = star()
    many = {**star(), **OPTIONS, **SCORERS}
    if quick:
        add(few, "turns", ["llama"], ["fp32"])
        add(few, "prompt", ["llama"], ["bf16"])
        add(few, "rows", ["llama"], ["fp32"])
    else:
        add(few, "turns", MAIN, ["fp32", "bf16"])
        add(few, "turns", ["llama"], ["fp16"])
        add(few, "prompt", MAIN, ["fp32"])
        add(many, "prompt", ["llama"], ["bf16"])
        add({**OPTIONS, **SCORERS}, "turns", ["llama", "gemma2"], ["fp32"])
        add(many, "rows", ["llama"], ["fp32"])
        add(few, "rows", ["gpt_oss"], ["bf16"])
        add(many, "beams", ["llama"], ["fp32"])
        add(few, "beams", ["gemma2"], ["bf16"])
        add(few, "long", ["llama", "gpt_oss"], ["fp32"])
        add(few, "turns", KINDS, ["fp32"])
        add(few, "prompt", KINDS, ["bf16"])
        add(few, "rows", KINDS, ["fp32"])
        add(many, "ranks", ["llama"], ["fp32"])
        add(few, "ranks", ["qwen3", "llama_mqa"], ["fp32"])
    return {case.name: case for case in found}


def prepare() -> None:
    """Set what makes results repeatable, once in a process."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    logging.getLogger("kvpolicy").setLevel(logging.ERROR)


def run_cases(cases: Sequence[Case]) -> dict[str, Fields]:
    """The fields of each case, by name."""
    found: dict[str, Fields] = {}
    with tempfile.TemporaryDirectory() as folder:
        write_files(Path(folder))
        for case in cases:
            if case.scenario != "ranks":
                found[case.name] = run_case(case, Path(folder))
        on_ranks = [case.name for case in cases if case.scenario == "ranks"]
        if on_ranks:
            found |= ranks.run_on_ranks(on_ranks, Path(folder))
    return found


def run_case(case: Case, folder: Path, *, rank: int = 0, quiet: bool = False) -> Fields:
    """The fields of one case; `refused` alone where the policy or the model is refused."""
    start = time.perf_counter()
    said = ""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            found = _play(case, parse(case.spec, folder), rank)
        except ValueError as error:
            found = {REFUSED: True}
            said = f" refused: {error}"
        except Exception as error:
            traceback.print_exc()
            found = {FAILED: type(error).__name__}
            said = f" failed: {error}"
    if not quiet:
        print(f"{time.perf_counter() - start:6.2f} s  {case.name}{said}", file=sys.stderr, flush=True)
    return found


def _play(case: Case, policy: Policy, rank: int) -> Fields:
    if case.scenario == "ranks":
        return scenarios.turns(_sharded(case.family, case.dtype, rank), policy, told=False)
    scenario: Any = getattr(scenarios, case.scenario)
    return scenario(build(case.family, case.dtype), policy)


@functools.cache
def _sharded(family: str, dtype: str, rank: int) -> Any:
    return ranks.shared(copy.deepcopy(build(family, dtype)), rank)
