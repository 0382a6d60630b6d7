"""DoubleSparsity: read the tokens whose keys have the largest product with the query in a few channels."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from kvpolicy.codecs import _files
from kvpolicy.kernels.in_memory import in_memory
from kvpolicy.kernels.products import thin_products
from kvpolicy.kernels.slot_writes import write_slots
from kvpolicy.protocols import ALL_HEADS, ModelInfo, ReaderTraits
from kvpolicy.readers.common import Amount, TokenReader, amount
from kvpolicy.text.errors import KVPolicyError
from kvpolicy.text.strategy import AutoInt, least, strategy, where

METHOD = "channels"
"""The method of a calibration folder that this reader takes."""

_MOST = 16
"""Channels of a label by default, at most."""


class Labels(NamedTuple):
    """The labels of one layer.

    Attributes:
        channels: The channels that each head's labels have, ascending, [B, H, r] int16.
        labels: These channels of each key, [B, H, X, r] in the dtype of the keys.
    """

    channels: Tensor
    labels: Tensor


def _is_folder(calibration: object) -> bool:
    return calibration is None or (isinstance(calibration, str) and calibration != "")


@strategy
class DoubleSparsity(TokenReader):
    """Read the tokens whose keys have the largest product with the query in a few channels.

    A few channels of a key carry most of its products. The index holds these channels of every key, its label. A step
    multiplies the same channels of the query with the labels, and reads the tokens with the largest results. Single
    tokens are chosen, so the order of the slots does not matter: this reader suits caches that evict.

    Args:
        read: How many tokens each KV head reads in a step (int), or the fraction of the layer's slots (float).
        channels: Channels of a label; `auto`: 16, or all of a smaller head dimension.
        dense: How many of the model's first layers read everything.
        recent: The newest tokens that are always read; the newest one and the first kept one always are.
        calibration: Folder of a calibration, which `kvpolicy calibrate channels` writes, and which says how salient
            each channel is. None: the first prompt says so.
        host: Whether keys and values lie in host memory, from where a step copies the tokens that it reads. Labels, and
            everything of the layers that read everything, stay on the device.

    Raises:
        KVPolicyTypeError: If a value is of another type.
        KVPolicyError: If a value is out of range.

    Examples:
        >>> DoubleSparsity(read=0.05).count(1000)
        50

    Source:
        Double Sparsity (Yang et al., 2024, arXiv:2408.07092), Section 3, and its authors' code, commit b0575e6.
        Differences:

        - Without a calibration, the channels of a row are chosen from its own first prompt, and not offline. They are
          those with the largest mean absolute query times mean absolute key, the mean over all pairs of a query and a
          key of the absolute product in the channel, over the query heads of a KV head too. Of equally salient channels
          the first ones are chosen.
        - A calibration has these means over windows of text, each by its tokens; the authors choose by queries, keys or
          their products, and we by the products. It has the salience of every channel and fits any `channels`; that of
          the authors has an order.
        - Labels have the dtype of the keys; the authors quantize label and query to 4 bits, which they simulate in 16.
        - There is one set of tokens per KV head: a token is as needed as the query head says that weights it most,
          after a softmax over the tokens. The authors' code has no grouped queries.
        - The newest token and the first kept one are always read. Ties go to the earlier position.
        - The prompt is attended to in full; the authors' evaluation masks it too.
    """

    read: Amount = amount(256)
    channels: AutoInt = least(1, "auto")
    dense: int = least(0, 2)
    recent: int = least(1, 1)
    calibration: str | None = where(_is_folder, "a folder or None", None)
    host: bool = False

    @property
    def traits(self) -> ReaderTraits:
        """The channels are chosen from the prompt, or from a calibration."""
        return ReaderTraits(dense=self.dense, recent=self.recent, salience=self, host=self.host)

    @property
    def is_calibrated(self) -> bool:
        """Whether there is a calibration."""
        return self.calibration is not None

    def check(self, model: ModelInfo) -> None:
        """Raise KVPolicyError if a key has fewer channels than a label, or the calibration is of another model."""
        if self.channels != "auto" and self.channels > model.head_dim:
            raise KVPolicyError(
                f"DoubleSparsity.channels must be at most the head dimension of {model.head_dim}, got {self.channels}; "
                f"try {min(_MOST, model.head_dim)}."
            )
        if self.calibration is None:
            return
        _files.check_model(_files.load(self.calibration, METHOD), self.calibration, model)
        for layer_idx in model.indices:
            shape = self.load_salience(layer_idx).shape
            if shape != (model.heads, model.head_dim):
                raise KVPolicyError(
                    f"The calibration {self.calibration!r} must be for {model.heads} KV heads of dimension "
                    f"{model.head_dim}, as the model has, got {list(shape)} in layer {layer_idx}; try kvpolicy "
                    f"calibrate {METHOD} on this model."
                )

    def load_salience(self, layer_idx: int, heads: slice = ALL_HEADS) -> Tensor:
        """The calibrated salience of the channels of a layer; see `Salience`."""
        folder = str(self.calibration)
        found = _files.load(folder, METHOD).tensors.get(f"salience.{layer_idx}")
        if found is None:
            raise KVPolicyError(
                f"The calibration {folder!r} must contain the salience of layer {layer_idx}, got none; try kvpolicy "
                f"calibrate {METHOD} on this model."
            )
        return found.float()[heads]

    def alloc(
        self, batch: int, heads: int, entries: int, head_dim: int, dtype: torch.dtype, device: torch.device | str
    ) -> Labels:
        """Labels of zero, of the first channels."""
        width = min(_MOST, head_dim) if self.channels == "auto" else self.channels
        first = torch.tensor([*range(width)], dtype=torch.int16, device=device)
        return Labels(
            channels=first.expand(batch, heads, -1).contiguous(),
            labels=torch.zeros(batch, heads, entries, width, dtype=dtype, device=device),
        )

    def fit(self, index: Labels, salience: Tensor, rows: Tensor) -> None:
        """Choose the channels of the largest salience; see `Reader.fit`."""
        order = salience.argsort(dim=-1, descending=True, stable=True)
        best = order[..., : index.channels.shape[-1]].sort(dim=-1).values.to(torch.int16)
        index.channels.copy_(torch.where(rows[:, None, None], best, index.channels))

    def refresh(self, index: Labels, entries: Tensor, keys: Tensor, occupied: Tensor) -> None:
        """Take the channels of the labels from some keys; see `Reader.refresh`."""
        keys = keys.squeeze(3).masked_fill(~occupied, 0)  # a page is one slot
        channels = index.channels.long()[:, :, None].expand(-1, -1, keys.shape[2], -1)
        write_slots(index.labels, entries, keys.gather(-1, channels).to(index.labels.dtype))

    def score(self, index: Labels, queries: Tensor, products: Callable[[Tensor], Tensor]) -> Tensor:
        """The products in the channels of the labels, [B, H, G, X] fp32."""
        channels = index.channels.long()[:, :, None].expand(-1, -1, queries.shape[2], -1)
        return thin_products(in_memory(queries.gather(-1, channels)), index.labels)
