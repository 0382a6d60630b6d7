"""A decode step of a layer that was attended to, and what its selector is to see of it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvpolicy.engine.layer_spec import LayerSpec
from kvpolicy.kernels.mixed_values import read_values
from kvpolicy.protocols import NewToken, View
from kvpolicy.statistics.query_moments import plain_queries


class Step(NamedTuple):
    """A token of each row that has its slot.

    Attributes:
        token: The token as the selector sees it; None if it does not look at vectors.
        valid: Which rows have a token, [B, 1] bool; None if all have.
        view: The slots.
        weights: Attention of the token, [B, H, G, S] fp32; None if the selector does not look at it.
    """

    token: NewToken | None
    valid: Tensor | None
    view: View
    weights: Tensor | None

    def beside(self, weights: Tensor | None) -> Step:
        """The same with the weights [B, H, G', S] of a layer that reads the same keys; its queries are not taken.

        A selector may hold queries of each query head of the layer.
        """
        both = None if self.weights is None or weights is None else torch.cat([self.weights, weights], 2)
        return self._replace(weights=both)


def new_token(
    spec: LayerSpec, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, scores: Tensor | None
) -> NewToken | None:
    """The token of a decode step, as far as the selector looks at it.

    Args:
        spec: The parts of the layer.
        q: Its queries, [B, Hq, 1, D].
        k: Its key, [B, H, 1, D].
        v: Its value, [B, H, 1, D].
        positions: Its position, [B, 1] int32.
        scores: Its scores by the input of the layer, [B, H, 1] fp32; None if the selector does not ask for them.
    """
    if not spec.step_vectors and scores is None:
        return None
    queries = q.detach()
    plain = plain_queries(queries, positions, spec.rope) if spec.step_moments else None
    taken, unrotated = (None if t is None else t.squeeze(2).unflatten(1, (k.shape[1], -1)) for t in (queries, plain))
    return NewToken(k.detach(), read_values(k, v, spec.latent).detach(), taken, unrotated, scores)
