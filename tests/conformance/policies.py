"""The specs of every registered method, with numbers that fit tiny models; a new method is found by its name."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path

from kvpolicy import Policy
from kvpolicy.allocators.profile import save_profile
from kvpolicy.protocols import positions_only, whole_heads
from kvpolicy.registry import lookup, names
from tests.conformance.calibration import FOLDER, write
from tests.reference.versions import small
from tests.sampling import pairwise, star

COMPARING = [name for name in names("allocator") if lookup(name)[1]().layer_metric == "curve"]
"""Allocators that compare what tokens of different layers are worth, which not every selector says."""
ALLOCATORS = [name for name in names("allocator") if name not in COMPARING]
SELECTORS = [name for name in names("selector") if name != "full"]
WRAPPERS = [name for name in SELECTORS if "base" in lookup(name)[1].__dataclass_fields__]
"""Selectors that wrap another one."""
BASES = [name for name in SELECTORS if name not in WRAPPERS]
MERGERS = [*names("merger")]
CODECS = [*names("codec")]
RANKED = [name for name in CODECS if lookup(name)[1]().traits.demotion is not None]
"""Codecs whose precision follows a ranking, which `full` has none of."""
GROUPING = [name for name in CODECS if lookup(name)[1]().traits.groups is not None]
"""Codecs that store a part of several layers once, and are combined with few selectors; see `words`."""
WHOLE_HEADS = [name for name in SELECTORS if whole_heads(lookup(name)[1]())]
"""Selectors that rank a token by all of its head, which these codecs do not ask for."""
SAME_IN_ALL_LAYERS = [name for name in names("selector") if positions_only(lookup(name)[1]())]
"""Selectors that look at positions alone."""
REBUILDING = [name for name in names("reader") if lookup(name)[1]().traits.rebuilds]
"""Readers that rebuild keys, which take no codec."""
_KINDS = {name: lookup(name)[0] for name in names()}
_UNRANKED = {("full", codec) for codec in RANKED}


def words(*methods: str, budget: str = "0.5") -> str:
    """The spec of a policy of these methods, with small numbers; methods that are not registered names stay.

    With a codec that groups layers, `streaming` takes the place of a selector that it is not combined with, and no
    allocator but `uniform` is there.
    """
    if any(method.partition(":")[0] in GROUPING for method in methods):
        methods = tuple(filter(None, map(_in_all_layers, methods)))
    return "+".join(spec_of(method) if method in _KINDS else method for method in methods) + f"@{budget}"


def _in_all_layers(method: str) -> str:
    """A method, or what takes its place, beside a codec that groups layers."""
    name = method.partition(":")[0].partition("/")[0]
    if name in ALLOCATORS or name in COMPARING:
        return ""
    if name not in SELECTORS or name in SAME_IN_ALL_LAYERS:
        return method
    *_, base = method.split("/")
    if base.partition(":")[0] in SAME_IN_ALL_LAYERS:
        return base
    return "streaming" + ":decode=grow" * ("decode=grow" in method)


def spec_of(name: str) -> str:
    """The spec of a registered method, with small numbers."""
    spec = small(_KINDS[name], name)
    for method in re.findall("FOLDER/([a-z]+)", spec):
        write(method)
    return spec.replace("FOLDER", str(FOLDER))


def by_name(name: str) -> str:
    """The name of a registered method, with the file that it cannot do without."""
    return spec_of(name) if "FOLDER" in small(_KINDS[name], name) else name


def is_refused(selector: str, codec: str) -> bool:
    """Whether a codec ranks parts of what a selector ranks by the whole of, or keeps what all layers keep."""
    if codec in GROUPING:
        return selector != "full" and selector.partition(":")[0] not in SAME_IN_ALL_LAYERS
    return codec in RANKED and selector in WHOLE_HEADS


def parameters(name: str) -> list[str]:
    """The parameters of a registered method."""
    return [field.name for field in dataclasses.fields(lookup(name)[1])]


def every_pair() -> list[str]:
    """Policies in which every allocator, selector and codec meets every other; `full` keeps all that there is."""
    rows = pairwise(
        ALLOCATORS,
        [*SELECTORS, "full"],
        CODECS,
        allowed=lambda row: row[1:] not in _UNRANKED and not is_refused(*row[1:]),
    )
    return [words(*row, budget="1.0" if row[1] == "full" else "0.5") for row in rows]


def star_of_three(
    allocators: Sequence[str] = ALLOCATORS, selectors: Sequence[str] = SELECTORS, codecs: Sequence[str] = CODECS
) -> list[tuple[str, str, str]]:
    """Each allocator with `snapkv`, each selector with `plain`, and each codec with `h2o`."""
    centers = [("", "snapkv", "plain"), ("uniform", "", "plain"), ("uniform", "h2o", "")]
    return [*star(allocators, selectors, codecs, centers=centers), *((name, "snapkv", "plain") for name in COMPARING)]


def with_profile(policy: str, folder: Path, cosines: Sequence[float]) -> Policy:
    """`squeeze` with a profile of these cosines, in place of measuring."""
    path = folder / "profile.json"
    save_profile(path, "a test", cosines)
    assert json.loads(path.read_text())["layers"] == len(cosines)
    return Policy.parse(policy.replace("squeeze", f"squeeze:profile={path}"))
