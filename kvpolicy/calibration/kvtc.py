"""Bases of KVTC: the directions in which keys and values vary most, and how many bits each of them takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kvpolicy.calibration.listener import check_finite, listening
from kvpolicy.calibration.run import Run
from kvpolicy.calibration.samples import sampled, tokens_per_window
from kvpolicy.hf.kvtc.allocation import SIZES, allocate, measure_errors
from kvpolicy.hf.kvtc.bases import SIDES
from kvpolicy.hf.kvtc.transform import principal_components
from kvpolicy.hf.model_spec import describe
from kvpolicy.protocols import View
from kvpolicy.statistics import Results, UnrotatedKeys, Vectors
from kvpolicy.text.errors import KVPolicyError

SINKS = 4
"""The first tokens of a window, which are unlike the others, and which files store as they are."""

HELD_OUT = 4
"""One in as many sampled tokens is not used for components, but for the errors of their codes."""

BITS = 16
"""Bits of a number that a ratio is relative to."""

Vector = dict[str, dict[int, Tensor]]
"""Vectors of each layer by side, [H, n, D] fp32 on the CPU."""


def check_model(model: nn.Module) -> None:
    """Refuse a model whose cache has no keys and values.

    Raises:
        KVPolicyError: If it has latent attention.
    """
    if describe(model.config).shape.latent:
        raise KVPolicyError(
            "A model must hold keys and values for kvtc, got latent attention (MLA), whose vectors are small already; "
            "try compress='zlib'."
        )


def find_kvtc(run: Run, ratios: Sequence[int], layers: int, tokens: int, seed: int) -> tuple[dict[str, Tensor], Any]:
    """The tensors of a file by name, and what it says of them besides; see `calibrate_kvtc`."""
    samples = sample_vectors(run.model, run.windows, tokens, seed, progress=run.progress)
    managed = sorted(samples["values"])
    spans = [managed[start : start + layers] for start in range(0, len(managed), layers)]
    tensors: dict[str, Tensor] = {}
    for span in run.bar(spans, "components"):
        for side in SIDES:
            # All heads of a token in a layer, one behind the other, and then those of the next layer.
            joint = [samples[side][layer].transpose(0, 1).flatten(1) for layer in span]
            tensors |= _named(f"joint{len(span)}.{side}", span[0], plans(torch.cat(joint, -1), ratios))
            for layer, x in zip(span, joint, strict=True):
                if len(span) > 1:
                    tensors |= _named(f"joint1.{side}", layer, plans(x, ratios))
                for head, vectors in enumerate(samples[side][layer]):
                    tensors |= _named(f"heads.{side}.{head}", layer, plans(vectors, ratios))
    return tensors, {"spans": spans}


def _named(name: str, layer: int, parts: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"{name}.{part}.{layer}": tensor for part, tensor in parts.items()}


def plans(x: Tensor, ratios: Sequence[int], sizes: Sequence[int] = SIZES) -> dict[str, Tensor]:
    """The principal components of vectors, and their groups for each ratio.

    Args:
        x: Vectors of sampled tokens, [n, p].
        ratios: 16 bits over the mean bits of a number.
        sizes: How many components a group may have.

    Returns:
        `mean` [p] fp32; `directions` [p, r] fp32, as many as a ratio has bits for; for each ratio, such as `groups16`,
        the size and the bits of each group, [g, 2] int32.
    """
    held_out = torch.arange(len(x), device=x.device) % HELD_OUT == HELD_OUT - 1
    components = principal_components(x[~held_out])
    latents = components.latents(x[held_out])
    choices = measure_errors(latents, sizes)
    energy = latents.square().sum(0)
    found = {ratio: allocate(choices, energy, BITS * x.shape[1] // ratio) for ratio in ratios}
    used = max(sum(group.size for group in groups) for groups in found.values())
    tensors = {"mean": components.mean, "directions": components.directions[:, :used].contiguous()}
    for ratio, groups in found.items():
        tensors[f"groups{ratio}"] = torch.tensor(groups, dtype=torch.int32, device="cpu").view(-1, 2)
    return tensors


def sample_vectors(model: nn.Module, windows: Sequence[Tensor], tokens: int, seed: int, *, progress: bool) -> Vector:
    """Run windows of tokens through a model, and keep unrotated keys and values of a sample of the tokens.

    Args:
        model: A causal language model without a policy attached.
        windows: Token ids, each [n].
        tokens: About how many tokens are kept, equally of all windows; the same ones in all layers.
        seed: Seed of the sample.
        progress: Whether to show a progress bar.

    Raises:
        KVPolicyError: If the model is not supported, has a policy attached, has a rotary embedding that cannot be
            undone, or produces numbers that are not finite.
    """
    kept: dict[str, dict[int, list[Tensor]]] = {side: {} for side in SIDES}
    chosen = torch.empty(0, dtype=torch.int64, device="cpu")

    def look(seen: Results, view: View) -> None:
        for side, x in (("keys", seen[UnrotatedKeys][0]), ("values", seen[Vectors].values[0])):
            kept[side].setdefault(view.layer_idx, []).append(x[:, chosen.to(x.device)].float().cpu())

    bodies = [ids[SINKS:] for ids in windows]
    with listening(model, (Vectors(), UnrotatedKeys()), look) as run:
        draws = sampled(bodies, tokens_per_window(bodies, tokens), seed, "sample", progress)
        for ids, (_, own) in zip(windows, draws, strict=True):
            chosen = own + SINKS
            run(ids)
    found = {side: {layer: torch.cat(xs, 1) for layer, xs in layers.items()} for side, layers in kept.items()}
    for side, layers in found.items():
        for layer, x in layers.items():
            check_finite("collected numbers", f"{side} of layer {layer}", x)
    return found
