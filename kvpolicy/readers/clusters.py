"""The clusters of a layer, by which a reader chooses entries."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvpolicy.protocols import Ranks


class ClusterTokens(NamedTuple):
    """The clusters of the entries of a layer, and the tokens in them.

    Attributes:
        assigned: Cluster of each entry, [B, H, X] int64.
        tokens: Tokens that each entry stands for, [B, H, X] fp32; 0 for an empty one.
        total: Tokens of each cluster, [B, H, C] fp32.
    """

    assigned: Tensor
    tokens: Tensor
    total: Tensor

    @classmethod
    def counted(cls, assigned: Tensor, log_tokens: Tensor, clusters: int) -> ClusterTokens:
        """Count the tokens of clusters.

        Args:
            assigned: Cluster of each entry, [B, H, X] int64.
            log_tokens: Logarithm of the tokens that each entry holds, [B, H, X] fp32; -inf for an empty one.
            clusters: C.
        """
        tokens = log_tokens.exp()
        return cls(assigned, tokens, _by_cluster(tokens, assigned, clusters))

    def unread(self, entries: Tensor, read: Tensor) -> Tensor:
        """Tokens of each cluster that are not among entries [B, H, k] that are `read` [B, H, k], [B, H, C] fp32."""
        left = self.tokens.scatter(-1, entries, self.tokens.gather(-1, entries).masked_fill(read, 0))
        return _by_cluster(left, self.assigned, self.total.shape[-1])


def _by_cluster(tokens: Tensor, assigned: Tensor, clusters: int) -> Tensor:
    """Add up [B, H, X] by cluster, [B, H, C]."""
    return tokens.new_zeros(*tokens.shape[:2], clusters).scatter_add(-1, assigned, tokens)


def need_in_clusters(score: Tensor, clusters: ClusterTokens, ranks: Ranks) -> Tensor:
    """How much each entry is needed: its attention weight if its key were the center of its cluster.

    It is the weight for the query head that weights it most.

    Args:
        score: Scores of the clusters, scaled and capped, [B, H, G, C] fp32.
        clusters: The clusters and their tokens.
        ranks: The ranks that hold the other query heads of these KV heads.

    Returns:
        The logarithm of the weight, [B, H, X] fp32; undefined for empty entries.
    """
    normalizer = (score + clusters.total.log()[:, :, None]).logsumexp(-1, keepdim=True)
    need = ranks.largest((score - normalizer).amax(2))
    need = need.gather(-1, clusters.assigned) + clusters.tokens.log()
    # A head without a token yields NaN, whose bits may rank above entries that are always read.
    return torch.where(need == need, need, 0.0).clamp_min(torch.finfo(need.dtype).min)
