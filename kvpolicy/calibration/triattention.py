"""Centers for a model: where the queries of each query head lie before the rotary embedding."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from kvpolicy.calibration.corpus import as_windows
from kvpolicy.calibration.listener import Sums, check_finite, listening
from kvpolicy.calibration.suitable import check_unrotated
from kvpolicy.protocols import View
from kvpolicy.selectors.center_files import Centers
from kvpolicy.statistics import ModuleCall, Moments, Results, Rotation


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
    check_unrotated(model, "mean queries without it", "try the selector qfilters")
    sums: dict[int, Sums] = {}

    def look(seen: Results, view: View) -> None:
        queries = seen[ModuleCall].queries
        moments = seen[Moments].moments
        assert queries is not None and moments is not None
        queries = queries[0]  # [Hq, P, D]
        lengths = torch.stack([seen[Rotation].pair_lengths(head).double().sum(0).cpu() for head in queries])
        total = moments.total[0].flatten(0, 1).double().cpu()
        sums.setdefault(view.layer_idx, Sums()).add(queries.shape[1], total, lengths)

    # The first moment of the queries without their rotation, and queries as attention takes them.
    with listening(model, (ModuleCall(), Moments(0), Rotation()), look) as run:
        for ids in tqdm(as_windows(windows), desc="centers", disable=not progress):
            run(ids)
    found = {layer: Centers(*own.means()) for layer, own in sorted(sums.items())}
    for layer, centers in found.items():
        check_finite("collected numbers", f"the queries of layer {layer}", *centers)
    return {layer: Centers(*(t.float() for t in centers)) for layer, centers in found.items()}
