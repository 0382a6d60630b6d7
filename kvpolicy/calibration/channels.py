"""Calibrate the channels of Double Sparsity for a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from kvpolicy.calibration.corpus import as_windows, text_sha256
from kvpolicy.codecs import _files
from kvpolicy.hf.attach import attach
from kvpolicy.hf.cache import PolicyCache
from kvpolicy.hf.cache_names import cache_argument
from kvpolicy.hf.eval_mode import eval_mode
from kvpolicy.hf.identity import identity
from kvpolicy.policy import Policy
from kvpolicy.protocols import ReaderTraits
from kvpolicy.readers._common import TokenReader
from kvpolicy.readers.labels import METHOD
from kvpolicy.text.errors import KVPolicyError

MIN_TOKENS = 128
"""The minimum number of tokens: means over fewer say little about other text."""


def calibrate_channels(
    model: nn.Module,
    windows: Sequence[Tensor],
    out: str | Path,
    *,
    name: str | None = None,
    progress: bool = False,
    force: bool = False,
) -> dict[str, Any]:
    """Measure how salient each key channel of a model is, and write it to a folder for `labels:calibration=DIR`.

    The salience of a channel is its mean absolute query times its mean absolute key, for each KV head, over the query
    heads of the KV head and the tokens of a window; then the mean over windows, each by its tokens. A folder fits any
    number of channels.

    Args:
        model: A causal language model without a policy attached.
        windows: Token ids, each [n] or [1, n]; see `token_windows`.
        out: The folder.
        name: Name of the model in the calibration.
        progress: Whether to show a progress bar.
        force: Whether to replace a finished calibration of another model or text.

    Returns:
        The metadata that were written with the tensors.

    Raises:
        KVPolicyTypeError: If the windows are not token ids.
        KVPolicyError: If the model is not supported or has a policy attached, the text is too short, or `out` holds
            another calibration.

    Examples:
        >>> import tempfile, kvpolicy
        >>> model, _ = kvpolicy.tiny()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     facts = calibrate_channels(model, [torch.arange(3, 140)], folder)
        ...     reader = kvpolicy.DoubleSparsity(channels=4, calibration=folder)
        ...     facts["tokens"], reader.load_salience(0).shape
        (137, torch.Size([4, 32]))

    Source: Double Sparsity (Yang et al., 2024, arXiv:2408.07092), Section 3.2, and its authors' code, commit b0575e6.
    Differences: the authors choose by the mean absolute query, key or product of a channel; here it is the product of
    the means of query and key, as where the first prompt decides. They store the channels, and we their salience.
    """
    windows = as_windows(windows)
    tokens = sum(len(ids) for ids in windows)
    if tokens < MIN_TOKENS:
        raise KVPolicyError(
            f"The tokens to measure channels with must be at least {MIN_TOKENS}, got {tokens}; try a longer text, or "
            "more windows of it."
        )
    facts = identity(model, name)
    meta = {
        "model": facts,
        "head_dim": facts["head_dim"],
        "text_sha256": text_sha256(windows),
        "tokens": tokens,
    }
    _files.folder_of(METHOD).check_free(out, _files.CalibrationFile(meta, {}), force=force)
    _files.save(out, METHOD, meta, _measured(model, windows, tokens, progress))
    return meta


def _measured(model: nn.Module, windows: Sequence[Tensor], tokens: int, progress: bool) -> dict[str, Tensor]:
    """The salience of each layer, [H, D] fp32, by its name in the file."""
    found: dict[str, Tensor] = {}
    device = next(model.parameters()).device
    with eval_mode(model), torch.no_grad(), attach(model, Policy(reader=_Recorder())):
        for ids in tqdm(windows, desc="channels", disable=not progress):
            cache = PolicyCache(model)
            _: Any = model(ids[None].to(device), **cache_argument(model, cache))
            for layer in cache.policy_layers:
                reads: Any = layer.store.tensors.reads
                part = reads.index.salience[0].double().cpu() * (len(ids) / tokens)
                key = f"salience.{layer.layer_idx}"
                found[key] = found[key] + part if key in found else part
    for key, salience in found.items():
        if not bool(salience.isfinite().all()):
            raise KVPolicyError(
                f"All measured numbers must be finite, got inf or NaN in {key}; try loading the model in bf16 or fp32."
            )
    return {key: salience.float() for key, salience in found.items()}


class _Record(NamedTuple):
    """The salience of the channels in the first prompt, [B, H, D] fp32."""

    salience: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class _Recorder(TokenReader):
    """Reads everything, and keeps the salience that a reader may ask for."""

    read = 1.0

    @property
    def traits(self) -> ReaderTraits:
        return ReaderTraits(salience=True)

    def alloc(
        self, batch: int, heads: int, entries: int, head_dim: int, dtype: torch.dtype, device: torch.device | str
    ) -> _Record:
        return _Record(torch.zeros(batch, heads, head_dim, device=device, dtype=torch.float32))

    def fit(self, index: _Record, salience: Tensor, rows: Tensor) -> None:
        index.salience.copy_(salience)

    def score(self, index: _Record, queries: Tensor, products: Callable[[Tensor], Tensor]) -> Tensor:
        return products(queries)
