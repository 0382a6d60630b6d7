"""The structured initialization, which makes retrieval learnable in minutes; training then changes all weights.

Head h of layer 0 attends to the token h + 1 positions back and writes it to
one of eight 16-dimensional subspaces. Three retrieval layers match the token
j back of the query with the token j + gap back of the key, and copy the value.
The gap depends on the layer's task: in `tiger=4821` queried by `?tiger=`, a
digit is one token further from its key than in the question, in
`#tiger = 4821` two. The other layers start near the identity.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvpolicy_eval.train.net import Net
from kvpolicy_lm_eval.data.words import CATEGORIES

GAPS = {1: 1, 3: 2, 5: 1}
"""Gap of each retrieval layer; see `phases.FOCUS` for their tasks."""

_SUBSPACE = 16
_NEAR = 1.55  # scale of the heads that attend to a fixed distance
_MATCH = 1.7  # scale of the heads that match tokens
_SINK = 0.5  # scale of a retrieval head's attention to BOS, which wins if nothing matches
_COPY = 0.15  # scale of the copied values


@torch.no_grad()
def structure(net: Net, words: list[int], bos: int, seed: int = 0) -> None:
    """Overwrite the random initialization of `net` with the structured one.

    Args:
        net: A randomly initialized net.
        words: Token ids of the prompt words, ordered by category.
        bos: Token id of BOS, which gets a separate channel so that heads can use it as a sink.
        seed: Seed of the random subspaces.
    """
    generator = torch.Generator().manual_seed(seed + 1)
    hidden = net.shape.hidden_size
    basis = torch.linalg.qr(torch.randn(hidden, hidden, generator=generator))[0]
    _embed(net, words, bos, generator)
    _look_back(net, basis)
    for layer, gap in GAPS.items():
        _match(net, layer, gap, basis)
    for layer in (2, 4, 6, 7):
        net.output[layer] *= 0.3 if layer < 6 else 0.1
    net.down.mul_(0.3)
    net.down[6:].mul_(0.1)


def _embed(net: Net, words: list[int], bos: int, generator: torch.Generator) -> None:
    shared = torch.randn(len(CATEGORIES), 1, net.shape.hidden_size, generator=generator) * 0.08
    ids = torch.tensor(words).view(len(CATEGORIES), -1)
    net.embedding[ids] = 0.85 * (net.embedding[ids] + shared)
    net.embedding[:, 0] = 0.3  # a constant channel lets queries and keys depend on positions alone
    net.embedding[:, 1] = 0
    net.embedding[bos, 1] = 1.5


def _look_back(net: Net, basis: Tensor) -> None:
    s = net.shape
    half = s.head_dim // 2
    rates = 1 / s.rope_theta ** (torch.arange(half).float() / half)
    query = net.query[0].view(s.num_heads, s.head_dim, -1).mul_(0.3)
    key = net.key[0].view(s.num_kv_heads, s.head_dim, -1).mul_(0.3)
    output = net.output[0].view(-1, s.num_heads, s.head_dim)
    value = net.value[0].div_(0.7).view(s.num_kv_heads, s.head_dim, -1)
    value[:, :_SUBSPACE] = value[:1, :_SUBSPACE].clone()  # a shared projection makes the subspaces comparable
    output.zero_()
    fast = torch.arange(3)
    for head in range(s.num_heads):
        back = head + 1
        for row in (fast, fast + half):
            query[head, row] = 0
            key[head // s.group, row] = 0
        query[head, fast, 0] = _NEAR * torch.cos(rates[fast] * back)
        query[head, fast + half, 0] = -_NEAR * torch.sin(rates[fast] * back)
        key[head // s.group, fast, 0] = _NEAR
        output[:, head, :_SUBSPACE] = 0.2 * basis[:, _SUBSPACE * head : _SUBSPACE * (head + 1)]


def _match(net: Net, layer: int, gap: int, basis: Tensor) -> None:
    s = net.shape
    half = s.head_dim // 2
    slow = torch.cat([torch.arange(half // 2, half), torch.arange(half + half // 2, s.head_dim)])
    query = net.query[layer].view(s.num_heads, s.head_dim, -1).mul_(0.3)
    key = net.key[layer].view(s.num_kv_heads, s.head_dim, -1).mul_(0.3)
    subspaces = basis.split(_SUBSPACE, 1)  # subspace i holds the token i + 1 positions back
    for head in range(s.num_heads):
        j = head // s.group
        query[head, slow] = _MATCH * subspaces[j].T
        key[j, slow] = _MATCH * subspaces[j + gap].T
        for rows, channel in ((query[head], 0), (key[j], 1)):
            rows[half - 1] = 0  # the slowest pair rotates so little that distance does not matter
            rows[half - 1, channel] = _SINK
    values = net.value[layer].view(s.num_kv_heads, 1, s.head_dim, -1).expand(-1, s.group, -1, -1)
    net.output[layer] = _COPY * values.reshape(s.num_heads * s.head_dim, -1).T / 0.7
