"""Calibration: what parts of a policy need to know of a model, learned from its keys, values and queries."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvpolicy.calibration.corpus import read_texts as read_texts
    from kvpolicy.calibration.corpus import token_windows as token_windows
    from kvpolicy.calibration.csr import Dictionaries as Dictionaries
    from kvpolicy.calibration.csr import estimate_csr as estimate_csr
    from kvpolicy.calibration.dictionary import Training as Training
    from kvpolicy.calibration.echoes import EchoScores as EchoScores
    from kvpolicy.calibration.echoes import echo_scores as echo_scores
    from kvpolicy.calibration.echoes import ranked_scores as ranked_scores
    from kvpolicy.calibration.for_files import calibrate_kvtc as calibrate_kvtc
    from kvpolicy.calibration.functions import calibrate_channels as calibrate_channels
    from kvpolicy.calibration.functions import calibrate_csr as calibrate_csr
    from kvpolicy.calibration.functions import calibrate_echoes as calibrate_echoes
    from kvpolicy.calibration.functions import calibrate_gate as calibrate_gate
    from kvpolicy.calibration.functions import calibrate_heads as calibrate_heads
    from kvpolicy.calibration.functions import calibrate_kvquant as calibrate_kvquant
    from kvpolicy.calibration.functions import calibrate_lowrank as calibrate_lowrank
    from kvpolicy.calibration.functions import calibrate_oscar as calibrate_oscar
    from kvpolicy.calibration.functions import calibrate_qfilters as calibrate_qfilters
    from kvpolicy.calibration.functions import calibrate_triattention as calibrate_triattention
    from kvpolicy.calibration.heads import head_scores as head_scores
    from kvpolicy.calibration.kvquant import fit_kvquant as fit_kvquant
    from kvpolicy.calibration.oscar import rotation_of as rotation_of
    from kvpolicy.calibration.qfilters import query_filters as query_filters
    from kvpolicy.calibration.samples import Samples as Samples
    from kvpolicy.calibration.samples import collect as collect
    from kvpolicy.calibration.triattention import query_centers as query_centers
    from kvpolicy.hf.identity import identity as identity
    from kvpolicy.hf.identity import model_info as model_info

_LAZY = {
    "corpus": ("read_texts", "token_windows"),
    "csr": ("Dictionaries", "estimate_csr"),
    "dictionary": ("Training",),
    "functions": tuple(
        f"calibrate_{part}"
        for part in (
            *("channels", "csr", "echoes", "gate", "heads", "kvquant", "lowrank", "oscar", "qfilters", "triattention"),
        )
    ),
    "for_files": ("calibrate_kvtc",),
    "echoes": ("EchoScores", "echo_scores", "ranked_scores"),
    "heads": ("head_scores",),
    "kvquant": ("fit_kvquant",),
    "oscar": ("rotation_of",),
    "qfilters": ("query_filters",),
    "samples": ("Samples", "collect"),
    "triattention": ("query_centers",),
    "identity": ("identity", "model_info"),
}
"""The names of each module, which is imported on first use, so that options can be read without PyTorch."""


if not TYPE_CHECKING:  # a type checker would accept every misspelled name
    __all__ = sorted(name for names in _LAZY.values() for name in names)

    def __getattr__(name: str) -> Any:
        import importlib

        for module, names in _LAZY.items():
            if name in names:
                room = "hf" if module == "identity" else "calibration"
                return getattr(importlib.import_module(f"kvpolicy.{room}.{module}"), name)
        raise AttributeError(f"module 'kvpolicy.calibration' has no attribute {name!r}")
