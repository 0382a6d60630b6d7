"""Keys and values of a model without a policy, as codecs encode them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers.cache_utils import DynamicCache

from kvpolicy.calibration.corpus import as_windows
from kvpolicy.calibration.listener import check_finite
from kvpolicy.calibration.suitable import check_vectors, check_weights
from kvpolicy.codecs.csr.dictionaries import key_dictionary
from kvpolicy.engine.host import inference_as
from kvpolicy.hf.attention_interface import PREFIX, configs_of
from kvpolicy.hf.cache_names import cache_argument
from kvpolicy.hf.discovery import device_of, find_sites
from kvpolicy.hf.eval_mode import eval_mode
from kvpolicy.hf.forward_checks import check_adapters
from kvpolicy.hf.model_spec import describe
from kvpolicy.hf.rotary_lookup import ropes_of
from kvpolicy.kernels.rotary import Rope
from kvpolicy.text.errors import KVPolicyError


@dataclass(frozen=True, kw_only=True, slots=True)
class Samples:
    """Keys and values of each layer that a policy manages, [H, n, D] fp32 on the CPU, by the index of the layer.

    The n tokens are the same in every layer, for keys and values.

    Attributes:
        unrotated: Keys without the rotary embedding; empty if not requested.
        rotated: Keys as attention sees them; empty if not requested.
        values: Values.
        fisher: Squared gradients of the loss with respect to keys (unrotated ones if they were requested) and values,
            [2, H, n, D]; empty if not requested.
    """

    unrotated: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    rotated: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    values: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    fisher: dict[int, Tensor] = field(default_factory=dict[int, Tensor])

    def parts(self) -> dict[str, dict[int, Tensor]]:
        """Keys and values by their names in a calibration file: `keys.pre`, `keys.post`, `values`."""
        return {
            key_dictionary("unrotated"): self.unrotated,
            key_dictionary("rotated"): self.rotated,
            "values": self.values,
        }


def collect(
    model: nn.Module,
    windows: Sequence[Tensor],
    *,
    tokens: int = 16_384,
    key_spaces: Sequence[str] = ("unrotated", "rotated"),
    fisher: bool = False,
    seed: int = 0,
    progress: bool = False,
) -> Samples:
    """Run windows of tokens through a model, and keep the keys and values of a sample of the tokens.

    Args:
        model: A causal language model without a policy attached.
        windows: Token ids, each [n] or [1, n].
        tokens: About how many tokens are kept in total, sampled equally from all windows. The result takes layers *
            heads * tokens * head_dim numbers for each key space and for the values.
        key_spaces: The key spaces to return: `unrotated`, `rotated` or both.
        fisher: Whether to return squared gradients too; each window then takes the memory of a training step.
        seed: Seed of the sample.
        progress: Whether to show a progress bar.

    Raises:
        KVPolicyTypeError: If the windows are not token ids.
        KVPolicyError: If the model is not supported, has a policy attached, has latent attention, has values of another
            size than keys for `fisher`, or produces numbers that are not finite.

    Examples:
        >>> import kvpolicy
        >>> collect(kvpolicy.tiny()[0], [torch.arange(3, 40)], tokens=20).unrotated[0].shape
        torch.Size([4, 20, 32])
    """
    reader = _Reader(model, key_spaces, fisher)
    windows = _with_tokens(windows)
    kept: dict[str, dict[int, list[Tensor]]] = {}
    with eval_mode(model):
        for ids, sample in sampled(windows, tokens_per_window(windows, tokens), seed, "collect", progress):
            # The same tokens in all layers and parts, so that each weight of `fisher` belongs to its key or value.
            for part, vectors in reader.run(ids).items():
                for layer, x in vectors.items():
                    chosen = x.index_select(-2, sample.to(x.device)).float().cpu()
                    kept.setdefault(part, {}).setdefault(layer, []).append(chosen)
    return Samples(**_joined(kept))


def fisher_information(
    model: nn.Module, windows: Sequence[Tensor], *, progress: bool = False
) -> dict[int, tuple[float, float]]:
    """The Fisher information of the keys and of the values of each layer: their mean squared gradient.

    It is that of the loss, summed over the tokens of a window, with respect to each number of every token. Each window
    takes one backward pass, and the memory of a training step.

    Args:
        model: A causal language model without a policy attached.
        windows: Token ids, each [n] or [1, n].
        progress: Whether to show a progress bar.

    Returns:
        The mean over tokens, heads and channels of keys, and that of values, by the index of the layer.

    Raises:
        KVPolicyTypeError: If the windows are not token ids.
        KVPolicyError: If the model is not supported, has a policy attached, or has values of another size than keys, or
            a gradient is not finite.

    Examples:
        >>> import kvpolicy
        >>> found = fisher_information(kvpolicy.tiny()[0], [torch.arange(3, 40)])
        >>> len(found), found[0][1] > found[0][0] > 0
        (8, True)
    """
    reader = _Reader(model, ("rotated",), fisher=True)
    sums: dict[int, Tensor] = {}
    windows = _with_tokens(windows)
    with eval_mode(model):
        for ids in tqdm(windows, desc="fisher", disable=not progress):
            for layer, squares in reader.run(ids)["fisher"].items():
                # The loss is a mean over tokens.
                own = squares.sum((1, 2, 3), dtype=torch.float64).cpu() * len(ids) ** 2 / squares[0, :, 0].numel()
                check_finite("collected numbers", f"gradients of layer {layer}", own)
                sums[layer] = sums[layer] + own if layer in sums else own
    tokens = sum(map(len, windows))
    return {layer: (float(own[0]) / tokens, float(own[1]) / tokens) for layer, own in sums.items()}


def _with_tokens(windows: Sequence[Tensor]) -> list[Tensor]:
    windows = as_windows(windows)
    if not windows:
        raise KVPolicyError("The windows must contain tokens to calibrate on, got none; try a longer text.")
    return windows


def tokens_per_window(windows: Sequence[Tensor], tokens: int) -> list[int]:
    """The number of tokens to keep of each window, for about `tokens` in total.

    >>> tokens_per_window([torch.arange(9), torch.arange(3)], 9)
    [5, 3]
    """
    return [min(len(ids), -(-tokens // len(windows))) for ids in windows]


def sampled(
    windows: Sequence[Tensor], counts: Sequence[int], seed: int, what: str, progress: bool
) -> Iterator[tuple[Tensor, Tensor]]:
    """Windows, each with the indices of as many of its tokens as `counts` says, drawn at random and ascending."""
    generator = torch.Generator().manual_seed(seed)
    for ids, count in zip(tqdm(windows, desc=what, disable=not progress), counts, strict=True):
        yield ids, torch.randperm(len(ids), generator=generator, device="cpu")[:count].sort().values


def _joined(kept: dict[str, dict[int, list[Tensor]]]) -> dict[str, dict[int, Tensor]]:
    joined = {part: {layer: torch.cat(xs, -2) for layer, xs in vectors.items()} for part, vectors in kept.items()}
    for part, vectors in joined.items():
        for layer, x in vectors.items():
            check_finite("collected numbers", f"{part} of layer {layer}", x)
    return joined


def _trace(_: nn.Module, args: Any, out: Tensor) -> Tensor:
    """Let gradients be computed with respect to what follows."""
    return out if out.requires_grad else out.detach().requires_grad_()


class _Reader:
    """Runs a model and reads keys and values from its cache."""

    def __init__(self, model: nn.Module, key_spaces: Sequence[str], fisher: bool) -> None:
        if any((config._attn_implementation or "").startswith(PREFIX) for config in configs_of(model)):
            raise KVPolicyError(
                "The model must have no policy during calibration, got one with a policy attached; try detaching it."
            )
        check_weights(model)
        check_adapters(model)
        self.model = model
        self.key_spaces = key_spaces
        self.fisher = fisher
        shape = describe(model.config)
        check_vectors(shape.shape, squares=fisher)
        self.sites = find_sites(model)
        self.layers = shape.evictable
        self.heads = shape.heads
        managed = [site for site in self.sites.layers if site.layer_idx in self.layers]
        self.ropes: dict[int, Rope] = {}
        if "unrotated" in key_spaces:
            self.ropes = ropes_of(self.sites.decoder, managed)

    def run(self, ids: Tensor) -> dict[str, dict[int, Tensor]]:
        """Keys and values of every token of a window [n], by the field of `Samples` and the layer, each [H, n, D]."""
        config: Any = self.model.config
        cache: Any = DynamicCache(config=config)
        ids = ids[None].to(device_of(self.sites.decoder))
        gradients = self._gradients(ids, cache) if self.fisher else {}
        if not self.fisher:
            with torch.no_grad():
                self.sites.decoder(input_ids=ids, **cache_argument(self.sites.decoder, cache), use_cache=True)
        # Copies of a head are equal, so the first one stands for all. Their gradients differ, and are summed instead.
        keys = {layer: self._by_head(cache.layers[layer].keys.detach())[:, :, 0] for layer in self.layers}
        values = {layer: self._by_head(cache.layers[layer].values.detach())[0, :, 0] for layer in self.layers}
        parts = {"values": values}
        if "rotated" in self.key_spaces:
            parts["rotated"] = {layer: x[0] for layer, x in keys.items()}
        if "unrotated" in self.key_spaces:
            parts["unrotated"] = {layer: self._unrotate(layer, x)[0] for layer, x in keys.items()}
        if self.fisher:
            parts["fisher"] = {layer: torch.cat(both).square() for layer, both in gradients.items()}
        return parts

    def _by_head(self, x: Tensor) -> Tensor:
        """The copies of each KV head, [1, H, copies, n, D]: grouped Falcon's stock cache has one per query head."""
        return x.unflatten(1, (self.heads, -1))

    def _unrotate(self, layer: int, keys: Tensor) -> Tensor:
        with torch.no_grad():
            return self.ropes[layer].unrotate(keys, torch.arange(keys.shape[2], device=keys.device)[None, None])

    def _gradients(self, ids: Tensor, cache: Any) -> dict[int, tuple[Tensor, Tensor]]:
        """Gradients of the loss with respect to keys and values."""
        # Of the embeddings, so that all keys and values have one, whichever weights are frozen.
        traced = self.model.get_input_embeddings().register_forward_hook(_trace)  # pyright: ignore[reportCallIssue]
        with inference_as(is_inference=False), torch.enable_grad(), ExitStack() as hooks:
            hooks.callback(traced.remove)
            ids = ids.clone()
            loss = self.model(input_ids=ids, labels=ids, **cache_argument(self.model, cache), use_cache=True).loss
            # `DynamicCache` hands attention the very tensors that it holds, so that the loss depends on them.
            tensors = [t for layer in self.layers for t in (cache.layers[layer].keys, cache.layers[layer].values)]
            # A codec stores one vector for all copies of a head, so their gradients add up.
            gradients = [self._by_head(g.float()).sum(2) for g in torch.autograd.grad(loss, tensors)]
        of_keys = dict(zip(self.layers, gradients[::2], strict=True))
        of_values = dict(zip(self.layers, gradients[1::2], strict=True))
        # The gradient with respect to an unrotated key is the gradient with respect to the rotated one, unrotated,
        # because the inverse of a rotation is its transpose. Where the embedding also scales (YaRN), it is that by the
        # square of the scale: a constant of the layer, which changes no weighted mean.
        if self.ropes:
            of_keys = {layer: self._unrotate(layer, g) for layer, g in of_keys.items()}
        return {layer: (of_keys[layer], of_values[layer]) for layer in self.layers}
