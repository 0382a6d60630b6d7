"""How a kept token is stored, scalar by scalar: the slow version of each codec stands in the file of its name.

A file has `codec`, which takes the parameters of a codec and what was calibrated for each layer, and returns its
traits, its layout and a coder for each stage of each KV head. `SMALL` is a spec with numbers that fit tiny models.
"""

from __future__ import annotations

from ..coding import Codec, Config
from ..versions import version
from ._common import Books as Books
from ._common import Calibration as Calibration
from ._common import Lone as Lone


def no_book(layer: int) -> Calibration:
    """Of codecs that are not calibrated."""
    return {}


def make(name: str, config: Config, calibration: Books = no_book) -> Codec | None:
    """A codec by its name; None for `plain`, which codes nothing.

    Args:
        name: A registered name.
        config: All its parameters.
        calibration: What was calibrated for each layer.
    """
    return version("codec", name).codec(config, calibration)
