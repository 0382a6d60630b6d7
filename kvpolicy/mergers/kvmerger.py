"""KVMerger: evicted tokens of a run of similar neighbors go to the best kept token of the run, weighted by distance."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpolicy.kernels.slot_writes import gather_slots
from kvpolicy.mergers.common import Nearest, Tile, tiles, unit
from kvpolicy.protocols import Candidates, Merged, Merger, MergerTraits, State
from kvpolicy.text.strategy import between, strategy


@strategy
class KVMerger(Merger):
    """Merge evicted tokens into a kept token of the same run of similar neighbors, by a Gaussian of their distance.

    Tokens that follow each other are in one run as long as the keys of each two neighbors are similar. The pivot of a
    run is its kept token of highest priority. Its key and its value become the weighted mean of its own, with weight 1,
    and of those of the run's evicted tokens, whose weights fall with the distance of their keys from the pivot's. Other
    kept tokens stay, evicted tokens of a run without a kept one are dropped, and so are those evicted in decoding.

    Args:
        least: The smallest cosine between the keys of two neighbors in one run, in [-1, 1].

    Raises:
        KVPolicyError: If `least` is outside [-1, 1].

    Examples:
        >>> from kvpolicy import Policy
        >>> str(Policy.parse("h2o+kvmerger@0.2"))
        'h2o+kvmerger@0.2'

    Source:
        KVMerger (arXiv:2407.08454), from a port by others; no code of its authors is known. Not verified against the
        paper: the default of `least`, the scan for runs, and the weights of values. Differences:

        - the selector decides which tokens are kept, and how many (the paper keeps one token of each run, heavy hitters
          and recent tokens, so that the threshold decides how many);
        - a run may have several kept tokens or none;
        - kept tokens are part of runs (the paper's heavy hitters and recent tokens are in none, and take nothing in);
        - the pivot has the highest priority of the selector, which is the accumulated attention for `h2o`;
        - the width of the Gaussian is the mean distance of the evicted tokens from the pivot, over the root of 2 (the
          paper's depends on the weights themselves, which depend on it);
        - values have no factor of the size of the run, on which sources disagree;
        - ties go to the earlier position;
        - tokens that are evicted in decoding are dropped, and tokens that are coded are never pivots.

        As in the paper, rotated keys are averaged.
    """

    least: float = between(-1, 1, 0.75)

    @property
    def traits(self) -> MergerTraits:
        """It acts at the end of a prompt only, and asks for priorities."""
        return MergerTraits(when="prompt", ranked=True)

    def merge_prompt(self, state: State, candidates: Candidates) -> Merged:
        """Merge the evicted tokens of a prompt into the pivots of their runs."""
        keys = candidates.at_targets(candidates.keys)
        values = candidates.at_targets(candidates.values)
        pivots = self._pivots(candidates)
        # Twice over the tiles, since the width depends on all tokens of a run.
        far = torch.zeros_like(candidates.targets, dtype=torch.float32)[..., None]
        number = torch.zeros_like(far)
        for tile in tiles(candidates, pivots):
            tile.add_to(far, _distance(tile, keys))
            tile.add_to(number, _goes(tile))
        # Twice the square of the width: of the mean distance over the root of 2.
        width = (far / number.clamp_min(1)).square()
        total = torch.zeros_like(far)
        mixed_keys = torch.zeros_like(keys.float())
        mixed_values = torch.zeros_like(values.float())
        for tile in tiles(candidates, pivots):
            squares = _distance(tile, keys).square()
            over = width.gather(2, tile.nearest.target[..., None])
            # Keys that all equal the pivot's have a width of 0.
            weight = torch.where(over > 0, squares / over.clamp_min(torch.finfo(over.dtype).tiny), 0).neg().exp()
            weight = weight * _goes(tile)
            tile.add_to(total, weight)
            tile.add_to(mixed_keys, tile.keys * weight)
            tile.add_to(mixed_values, tile.values * weight)
        changed = (number > 0) & candidates.is_target[..., None]

        def mean(own: Tensor, mixed: Tensor) -> Tensor:
            return torch.where(changed, ((own.float() + mixed) / (1 + total)).to(own.dtype), own)

        return Merged(values=mean(values, mixed_values), keys=mean(keys, mixed_keys))

    def _pivots(self, candidates: Candidates) -> Nearest:
        """The pivot of the run of each token as an index of a target, [B, H, N]; a cosine of -inf where it has none."""
        assert candidates.priority is not None
        order = candidates.positions.argsort(dim=-1, stable=True)
        there = candidates.positions.gather(-1, order) >= 0
        keys = unit(candidates.keys).gather(2, order[..., None].expand_as(candidates.keys))
        # Padding stands before the tokens, and its numbers may be anything: it is no part of a run.
        similar = ((keys[:, :, 1:] * keys[:, :, :-1]).sum(-1) >= self.least) & there[..., :-1]
        run = torch.nn.functional.pad((~similar).long().cumsum(-1), (1, 0))
        place = torch.arange(candidates.targets.shape[-1], device=order.device).expand_as(candidates.targets)
        # Entries that are no target repeat one.
        place = torch.where(candidates.is_target, place, -1)
        target = torch.full_like(order, -1).scatter_reduce(-1, candidates.targets, place, "amax").gather(-1, order)
        worth = candidates.priority.gather(-1, order).masked_fill(target < 0, -torch.inf)
        best = torch.full_like(worth, -torch.inf).scatter_reduce(-1, run, worth, "amax").gather(-1, run)
        none = candidates.targets.shape[-1]
        first = torch.where((target >= 0) & (worth == best), target, none)
        # Targets are in order of position, so that the smallest index is the earliest.
        pivot = torch.full_like(first, none).scatter_reduce(-1, run, first, "amin").gather(-1, run)
        pivot = pivot.gather(-1, order.argsort(dim=-1))
        return Nearest(pivot.clamp_max(none - 1), torch.where(pivot < none, 0.0, -torch.inf))


def _goes(tile: Tile) -> Tensor:
    """1 for tokens that are evicted and have a pivot, else 0, [B, H, n, 1] fp32."""
    return ((tile.weights > 0) & (tile.nearest.cosine > -torch.inf)).float()[..., None]


def _distance(tile: Tile, keys: Tensor) -> Tensor:
    """The distance of each token's key from that of its pivot, 0 where it has none, [B, H, n, 1] fp32."""
    own = gather_slots(keys, tile.nearest.target).float()
    return (tile.keys - own).norm(dim=-1, keepdim=True).masked_fill(_goes(tile) == 0, 0)
