"""Centers for a model: where the queries of each query head lie before the rotary embedding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from kvpolicy.calibration.corpus import as_windows, text_sha256
from kvpolicy.calibration.listener import Listener, Sums, check_finite, listening
from kvpolicy.hf.identity import identity
from kvpolicy.protocols import Needs, Seen, State, View
from kvpolicy.selectors.center_files import CENTER_FILES, CenterFile, Centers
from kvpolicy.text.errors import KVPolicyError

MIN_TOKENS = 128
"""The minimum number of tokens: a mean of fewer queries says little about other text."""


def calibrate_triattention(
    model: nn.Module,
    windows: Sequence[Tensor],
    out: str | Path,
    *,
    name: str | None = None,
    progress: bool = False,
    force: bool = False,
) -> CenterFile:
    """Find the mean queries of a model, and write them to a file that `triattention:file=FILE` reads.

    Args:
        model: A causal language model without a policy attached.
        windows: Token ids, each [n] or [1, n]; see `token_windows`. Text with the chat template that the model is
            served with fits best.
        out: The file.
        name: Name of the model in the file.
        progress: Whether to show a progress bar.
        force: Whether to replace a file that holds something else: another model, or text.

    Returns:
        The content of the file.

    Raises:
        KVPolicyTypeError: If the windows are not token ids.
        KVPolicyError: If the model is not supported, has a policy attached, or produces numbers that are not finite;
            the text is too short; or `out` holds something else.

    Examples:
        >>> import tempfile, kvpolicy
        >>> model, _ = kvpolicy.tiny()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     content = calibrate_triattention(model, [torch.arange(3, 140)], f"{folder}/centers.safetensors")
        >>> len(content.centers), content.centers[0].mean.shape, content.centers[0].lengths.shape
        (8, torch.Size([8, 32]), torch.Size([8, 16]))
    """
    windows = as_windows(windows)
    count = sum(len(ids) for ids in windows)
    if count < MIN_TOKENS:
        raise KVPolicyError(
            f"The tokens to find centers with must be at least {MIN_TOKENS}, got {count}; try a longer text."
        )
    made = {"text_sha256": text_sha256(windows), "windows": len(windows), "tokens": count}
    facts = CenterFile({}, identity(model, name), made)
    CENTER_FILES.check_free(out, facts, force=force)
    content = CenterFile(query_centers(model, windows, progress=progress), facts.model, made)
    CENTER_FILES.save(out, content)
    return content


def query_centers(model: nn.Module, windows: Sequence[Tensor], *, progress: bool = False) -> dict[int, Centers]:
    """Run windows of tokens through a model, and average the queries of each query head.

    Args:
        model: A causal language model without a policy attached.
        windows: Token ids, each [n] or [1, n].
        progress: Whether to show a progress bar.

    Returns:
        The centers of each layer that a policy manages, on the CPU, by the index of the layer.

    Raises:
        KVPolicyTypeError: If the windows are not token ids.
        KVPolicyError: If the model is not supported, has a policy attached, or produces numbers that are not finite.

    Examples:
        >>> import kvpolicy
        >>> query_centers(kvpolicy.tiny()[0], [torch.arange(3, 40)])[0].mean.shape
        torch.Size([8, 32])

    Source:
        TriAttention (arXiv:2604.04921), and the calibration of its authors' code: the mean of the queries as complex
        numbers, and of their absolute values, for each frequency. Differences: all tokens of all windows count.
    """
    tap = _Tap()
    with listening(model, tap) as run:
        for ids in tqdm(as_windows(windows), desc="centers", disable=not progress):
            run(ids)
    found = {layer: Centers(*sums.means()) for layer, sums in sorted(tap.found.items())}
    for layer, centers in found.items():
        check_finite("the queries", layer, *centers)
    return {layer: Centers(*(t.float() for t in centers)) for layer, centers in found.items()}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Tap(Listener):
    """A selector that adds up the queries of prompts, and keeps the newest token.

    Attributes:
        found: The sums of each layer so far.
    """

    found: dict[int, Sums] = field(default_factory=dict[int, Sums])

    @property
    def needs(self) -> Needs:
        """The first moment of the queries without their rotation, and queries as attention takes them."""
        return Needs(forward=True, query_moments=0, rotation=True)

    def observe(self, state: State, seen: Seen, view: View) -> State:
        assert seen.forward is not None and seen.forward.queries is not None
        assert seen.moments is not None and seen.pair_lengths is not None
        queries = seen.forward.queries[0]  # [Hq, P, D]
        lengths = torch.stack([seen.pair_lengths(head).double().sum(0).cpu() for head in queries])
        total = seen.moments.total[0].flatten(0, 1).double().cpu()
        self.found.setdefault(view.layer_idx, Sums()).add(queries.shape[1], total, lengths)
        return state
