"""The policies of the record: a star over the registry, and other options of single methods."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from torch import Tensor

from kvpolicy import Policy
from kvpolicy.registry import kinds, names
from tests.golden import access
from tests.reference.versions import small

_OTHERS = {
    "csr": "csr:s=4:online=2:residual_length=1:block_size=4:dictionary=FOLDER/csr",
    "gear": "gear:bits=4:group_size=4:rank=2:residual_length=4",
    "staircase": "staircase:eight=4:four=4:group_size=4:residual_length=2",
}
"""Methods that the record has with other options than the conformance tests, or in words that older trees know."""

_SPECS = {name: small(kind, name) for kind in kinds() for name in names(kind)} | _OTHERS
"""Methods with options that fit tiny models; FOLDER stands for the folder of calibrations."""

_GROUPING = ("minicache",)
"""Codecs that are not combined with `h2o`, since they store a part of several layers once."""

_SNAPKV, _CSR, _KVQUANT, _GEAR = (_SPECS[name] for name in ("snapkv", "csr", "kvquant", "gear"))

OPTIONS = {
    "full+kivi": f"full+{_SPECS['kivi']}@1.0",
    "h2o grows": "h2o:decode=grow@0.5",
    "snapkv grows+kivi": f"{_SNAPKV}:decode=grow+{_SPECS['kivi']}@0.5",
    "tova grows+mikv": f"tova:decode=grow+{_SPECS['mikv']}@0.5",
    "streaming grows+csr": f"streaming:sinks=2:decode=grow+{_CSR}@0.5",
    "h2o at a small share": "h2o:recent=0.2@0.1",
    "kvcrush/h2o at tokens": "kvcrush/h2o@15",
    "h2o+tokenwise at bytes": f"h2o+{_SPECS['tokenwise']}@24KiB",
    "pyramid+tova+turboquant at bytes": f"pyramid:beta=4+tova+{_SPECS['turboquant']}@30KiB",
    "squeeze+kvcrush/h2o+kivi": f"squeeze+kvcrush/h2o+{_SPECS['kivi']}@0.5",
    "squeeze+probe+zipcache": f"squeeze+{_SPECS['probe']}+{_SPECS['zipcache']}@0.6",
    "squeeze by profile+tova+staircase": f"squeeze:profile=FOLDER/profile.json+tova+{_SPECS['staircase']}@0.5",
    "pyramid+window+kvquant": f"pyramid:beta=4+window+{_KVQUANT}@0.5",
    "snapkv by maximum+rotate": f"{_SNAPKV}:pool=max+{_SPECS['rotate']}@0.5",
    "kvcrush mean best": f"kvcrush:anchor=mean:pick=best:buckets=distance/{_SNAPKV}@0.5",
    "kvcrush pages": f"kvcrush:anchor=alternate:page=3:split=0.5/{_SNAPKV}@0.5",
    "kvcrush ones random/tova": "kvcrush:anchor=ones:quantile=0.8:pick=random:seed=3/tova@0.5",
    "tova+mikv": f"tova+{_SPECS['mikv']}:bits=4@0.5",
    "h2o+mikv 16 bits": "h2o+mikv:high=0.4:high_bits=16:residual_length=1:block_size=2@0.5",
    "probe+zipcache": f"{_SPECS['probe']}+zipcache:high=0.4:high_bits=8:recode_every=3@0.5",
    "window+kivi 8 bits": "window+kivi:bits=8:group_size=2:residual_length=2@0.5",
    "tova+gear kcvt": f"tova+{_GEAR}:sparse=0.2:backbone=kcvt@0.5",
    "h2o+gear rank 0": "h2o+gear:bits=4:group_size=4:rank=0:residual_length=4@0.5",
    "h2o+tokenwise fp8": f"h2o+{_SPECS['tokenwise']}:bits=fp8:normalize=false@0.5",
    "h2o+bfp exact values": f"h2o+{_SPECS['bfp']}:mantissa=6:exact_values=true@0.5",
    "h2o+turboquant 2 bits": f"h2o+{_SPECS['turboquant']}:bits=2:seed=3@0.5",
    "h2o+kvquant 4 bits": f"h2o+{_KVQUANT}:bits=4:norm=false@0.5",
    "h2o+csr rotated": f"h2o+{_CSR}:sn=1:frame=post:guard=1:coef=fp8:index=packed:solver=omp@0.5",
    "h2o+csr top": f"h2o+{_CSR}:sn=4:top=6:distance=8:solver=refit:guard=2@0.5",
}
"""By label: policies of other options, budgets and combinations."""

SCORERS = {
    "scorer grows": "SCORER grow h2o@0.5",
    "scorer evicts+kivi": f"SCORER evict h2o+{_SPECS['kivi']}@0.5",
    "squeeze+scorer evicts": "SCORER evict squeeze+h2o@0.5",
}
"""By label: policies in whose place of h2o stands a scorer in the form of kvpress, which no text can name."""


class Scorer:
    """Rates tokens by all that a scorer is given."""

    def score(
        self, module: Any, hidden_states: Tensor, keys: Tensor, values: Tensor, attentions: Any, kwargs: dict[str, Any]
    ) -> Tensor:
        attended = attentions.float().sum(2).unflatten(1, (keys.shape[1], -1)).mean(2)
        score = attended * values.float().norm(dim=-1) - keys.float().norm(dim=-1) / 1000
        score[..., -hidden_states.shape[1] :] += hidden_states.float().norm(dim=-1)[:, None] / 100  # the newest tokens
        return score


def star() -> dict[str, str]:
    """By label: each selector with the plain codec, each codec with h2o, each allocator with snapkv."""
    found = {name: f"{_SPECS[name]}@{'1.0' if name == 'full' else '0.5'}" for name in names("selector")}
    for name in names("codec"):
        if name != "plain":
            with_codec = "streaming" if name in _GROUPING else "h2o"
            found[f"{with_codec}+{name}"] = f"{with_codec}+{_SPECS[name]}@0.5"
    found |= {f"{name}+snapkv": f"{_SPECS[name]}+{_SNAPKV}@0.5" for name in names("allocator") if name != "uniform"}
    return found


def parse(spec: str, folder: Path) -> Policy:
    """The policy of a text, in which FOLDER stands for the folder of calibrations."""
    spec = spec.replace("FOLDER", str(folder))
    if not spec.startswith("SCORER "):
        return Policy.parse(spec)
    _, decode, rest = spec.split(" ")
    selector = access.scorer_selector(Scorer(), decode=decode, window=4, attentions=True)
    return dataclasses.replace(Policy.parse(rest), selector=selector)
