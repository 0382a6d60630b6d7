"""Reuse: some layers choose which tokens are read, and the layers behind them read the same."""

from __future__ import annotations

import re
from dataclasses import field
from typing import NamedTuple

import torch
from torch import Tensor

from kvpolicy.protocols import Changed, Index, ModelInfo, Products, Read, Reader, ReaderTraits, SlotAccess
from kvpolicy.readers.all import ReadAll
from kvpolicy.readers.exact import ExactTopK
from kvpolicy.text.errors import KVPolicyError, KVPolicyTypeError
from kvpolicy.text.strategy import AutoInt, least, strategy

_DENSE = 2
"""First layers that read everything by default."""


class ChoosingLayers(NamedTuple):
    """The layers that choose; see `kvpolicy.protocols.Choosers`.

    Attributes:
        first: The first layer that does not read everything.
        every: From there on, every how many layers one chooses.
        layers: The layers that choose, ascending, instead of `every`.
        read_all: Whether a layer that chooses reads every slot itself.

    Examples:
        >>> [ChoosingLayers(1, 2).source(layer_idx) for layer_idx in range(1, 5)]
        [1, 1, 3, 3]
    """

    first: int
    every: int
    layers: tuple[int, ...] = ()
    read_all: bool = True

    def source(self, layer_idx: int) -> int | None:
        """The layer that chooses for a layer."""
        if self.layers:
            return max((chooser for chooser in self.layers if chooser <= layer_idx), default=None)
        return layer_idx - (layer_idx - self.first) % self.every


@strategy
class Reuse(Reader):
    """Let some layers choose which tokens are read, and let the layers behind them read the same tokens.

    Neighboring layers attend to much the same tokens. A few layers choose as the base reader does, and have its index.
    Each of the others reads what the last choosing layer before it chose: it scores nothing, and has no index.

    Tokens are passed on by position, for each KV head. A layer reads those that it holds, at most as many as the base
    would read of it, and its newest token. So a layer may read fewer where layers keep different tokens; with a
    selector such as `window`, or without one, all layers hold the same.

    Args:
        base: The reader by which layers choose; any that reads a part.
        layers: The layers that choose, ascending, such as `2_13`; the layers before the first one read everything.
            `auto`: every `every`-th one, from the first that does not read everything.
        every: With `auto`, how many layers read one choice.
        dense: How many of the model's first layers read everything. `auto`: 2, or more if the base has more; with
            `layers`, all before the first of them.
        full: Whether a layer that chooses reads everything itself; else it reads what it chose.
        host: Whether keys and values lie in host memory, from where a step copies the tokens that it reads, in layers
            that do not look at every key themselves.

    Raises:
        KVPolicyTypeError: If a value is of another type.
        KVPolicyError: If a value is out of range, or the base is no reader of a part.

    Examples:
        >>> Reuse(layers="2_13").traits.source(15), Reuse(every=4).traits.source(15)
        (13, 14)

    Source:
        TidalDecode (Yang et al., ICLR 2025, arXiv:2410.05076), Section 3, and its authors' code, commit d67a1bd; OmniKV
        (Hao et al., ICLR 2025), Section 3, and its authors' code, commit 5c33cb5. Differences:

        - Each KV head has a set of its own, which the same KV head of the layers behind reads. TidalDecode's eager code
          has one per query head and its kernels one per layer; OmniKV has one for all heads of a layer, by the largest
          logit of any query head.
        - How tokens are ranked is the base's affair: `exact` normalizes the weights of each query head over all slots
          first, and takes the largest of a group.
        - Choosing layers are at regular distances by default. TidalDecode names two of 32 (`2_13`, `2_9` for other
          models), OmniKV three that it finds offline (`2_8_18`).
        - OmniKV reads everything in one more layer behind each choosing one, to hide a copy from host memory, and all
          generated tokens; here they compete like those of the prompt.
        - Keys and values lie in host memory only with `host`, and are copied when they are needed, which nothing hides.
    """

    base: Reader = field(default_factory=ExactTopK)
    layers: str = "auto"
    every: int = least(2, 4)
    dense: AutoInt = least(0, "auto")
    full: bool = True
    host: bool = False

    def __post_init__(self) -> None:
        # The base chooses in some layers, and others read its slots: what else it does must not depend on the layer.
        if not isinstance(self.base, Reader):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise KVPolicyTypeError(f"Reuse.base must be a reader, got {self.base!r}; try ExactTopK().")
        if isinstance(self.base, Reuse | ReadAll):
            raise KVPolicyError(
                f"Reuse.base must be a reader that chooses a part in every layer, got {self.base}; try ExactTopK()."
            )
        traits = self.base.traits
        if traits.estimates_rest:
            raise KVPolicyError(
                f"Reuse.base must be a reader without estimates of unread tokens, got {self.base}; try "
                "sparq:correct=false or exact."
            )
        if traits.rebuilds is not None:
            raise KVPolicyError(
                f"Reuse.base must be a reader that reads keys as they are stored, got {self.base}; try quest."
            )
        # Layers that choose: in ascending order, each behind those that read everything.
        if not isinstance(self.layers, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise KVPolicyTypeError(f"Reuse.layers must be auto or layers such as 2_13, got {self.layers!r}; try auto.")
        ascending = sorted(set(self._choosing)) == [*self._choosing]
        if self.layers != "auto" and not (re.fullmatch(r"[0-9]+(_[0-9]+)*", self.layers) and ascending):
            raise KVPolicyError(
                f"Reuse.layers must be auto or ascending layers such as 2_13, got {self.layers!r}; try auto."
            )
        least = max(self.base.traits.dense, 0 if self.dense == "auto" else self.dense)
        if self._choosing and self._choosing[0] < least:
            raise KVPolicyError(
                f"Reuse.layers must begin after the layers that read everything, the first {least}, got "
                f"{self.layers!r}; try a smaller dense."
            )

    @property
    def _choosing(self) -> tuple[int, ...]:
        return tuple(map(int, re.findall("[0-9]+", self.layers)))

    @property
    def traits(self) -> ReaderTraits:
        """The traits of the base, and which layers choose."""
        traits = self.base.traits
        if self._choosing:
            dense = self._choosing[0]
        else:
            dense = max(_DENSE if self.dense == "auto" else self.dense, traits.dense)
        host = self.host or traits.host
        choosers = ChoosingLayers(dense, self.every, self._choosing, self.full)
        return traits._replace(dense=dense, host=host, choosers=choosers)

    def page_size(self, slots: int) -> int:
        return self.base.page_size(slots)

    def count(self, slots: int) -> int:
        return self.base.count(slots)

    def check(self, model: ModelInfo) -> None:
        """Raise KVPolicyError if the base does not fit, or a layer that chooses is not under the policy."""
        self.base.check(model)
        managed = model.indices
        for layer_idx in (*self._choosing, *managed):
            chooser = self.traits.source(layer_idx)
            if chooser is not None and chooser not in managed:
                able = [idx for idx in managed if idx >= self.traits.dense] or [*managed]
                some = "_".join(map(str, sorted({able[0], able[len(able) // 2]})))
                raise KVPolicyError(
                    f"Reuse.layers must name layers that the policy manages, got {self.layers!r}, by which layer "
                    f"{chooser} chooses; the model has {model.layers} such layers; try layers={some}."
                )

    def alloc(
        self, batch: int, heads: int, entries: int, head_dim: int, dtype: torch.dtype, device: torch.device | str
    ) -> Index:
        """The index of the base, in a layer that chooses."""
        return self.base.alloc(batch, heads, entries, head_dim, dtype, device)

    def fit(self, index: Index, salience: Tensor, rows: Tensor) -> None:
        self.base.fit(index, salience, rows)

    def update(self, index: Index, slots: SlotAccess, changed: Changed) -> None:
        self.base.update(index, slots, changed)

    def choose(self, index: Index, slots: SlotAccess, queries: Tensor) -> Read:
        return self.base.choose(index, slots, queries)

    def count_step(self, index: Index, slots: SlotAccess) -> None:
        self.base.count_step(index, slots)

    def refresh(self, index: Index, entries: Tensor, keys: Tensor, occupied: Tensor) -> None:
        self.base.refresh(index, entries, keys, occupied)

    def score(self, index: Index, queries: Tensor, products: Products) -> Tensor:
        return self.base.score(index, queries, products)
