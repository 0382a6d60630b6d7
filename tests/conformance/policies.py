"""The words of every registered method, with numbers that fit tiny models; a new method is found by its name."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from kvpolicy import Policy
from kvpolicy.allocators.profile import save_profile
from kvpolicy.registry import lookup, names
from tests.conformance.calibration import folder
from tests.sampling import pairwise, star

_WORDS = {
    "streaming": "streaming:sinks=2",
    "snapkv": "snapkv:window=6:kernel=3",
    "kvcrush": "kvcrush/snapkv:window=6:kernel=3",
    "probe": "probe:recent=0.2:random=0.2",
    "pyramid": "pyramid:beta=4",
    "kivi": "kivi:group_size=4:residual_length=4",
    "tokenwise": "tokenwise:group_size=4:residual_length=4:block_size=4",
    "bfp": "bfp:block_channels=4:residual_length=3:block_size=4",
    "gear": "gear:bits=4:group_size=4:rank=0:residual_length=4",
    "kvquant": f"kvquant:outliers=0.1:sinks=2:residual_length=2:block_size=3:calibration={folder('kvquant')}",
    "rotate": "rotate:group_size=4:sinks=2:residual_length=2:block_size=4",
    "turboquant": "turboquant:residual_length=2:block_size=4",
    "staircase": "staircase:tokens_8bit=4:tokens_4bit=4:group_size=4:residual_length=2",
    "csr": f"csr:nnz=4:prompt_atoms=2:residual_length=1:block_size=4:dictionary={folder('csr')}",
    "mikv": "mikv:high=0.3:high_bits=8:residual_length=2:block_size=3",
    "zipcache": "zipcache:recode_every=5",
}
"""GEAR's basis is anyone's, so that only without one it can be compared number by number."""

ALLOCATORS = [*names("allocator")]
SELECTORS = [name for name in names("selector") if name != "full"]
CODECS = [*names("codec")]
RANKED = [name for name in CODECS if lookup(name)[1]().traits.demote_by == "priority"]
"""Codecs whose precision follows a ranking, which `full` has none of."""
_UNRANKED = {("full", codec) for codec in RANKED}


def words(*methods: str, budget: str = "0.5") -> str:
    """The words of a policy of these methods, with small numbers."""
    return "+".join(_WORDS.get(method, method) for method in methods) + f"@{budget}"


def every_pair() -> list[str]:
    """Policies in which every allocator, selector and codec meets every other; `full` keeps all that there is."""
    rows = pairwise(ALLOCATORS, [*SELECTORS, "full"], CODECS, allowed=lambda row: row[1:] not in _UNRANKED)
    return [words(*row, budget="1.0" if row[1] == "full" else "0.5") for row in rows]


def star_of(selectors: Sequence[str] = SELECTORS, codecs: Sequence[str] = CODECS) -> list[tuple[str, str]]:
    """Each selector with `plain`, and each codec with `h2o`."""
    return star(selectors, codecs, centers=[("", "plain"), ("h2o", "")])


def star_of_three(
    allocators: Sequence[str] = ALLOCATORS, selectors: Sequence[str] = SELECTORS, codecs: Sequence[str] = CODECS
) -> list[tuple[str, str, str]]:
    """Each allocator with `snapkv`, each selector with `plain`, and each codec with `h2o`."""
    centers = [("", "snapkv", "plain"), ("uniform", "", "plain"), ("uniform", "h2o", "")]
    return star(allocators, selectors, codecs, centers=centers)


def with_profile(policy: str, folder: Path, cosines: Sequence[float]) -> Policy:
    """`squeeze` with a profile of these cosines, in place of measuring."""
    path = folder / "profile.json"
    save_profile(path, "a test", cosines)
    assert json.loads(path.read_text())["layers"] == len(cosines)
    return Policy.parse(policy.replace("squeeze", f"squeeze:profile={path}"))
