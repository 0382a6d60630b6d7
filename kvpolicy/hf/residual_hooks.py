"""Hooks that see the residual stream: how much a layer's attention changes it, and which tokens are largest in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from kvpolicy.hf.cache import PolicyCache
from kvpolicy.hf.discovery import Site


def measure(site: Site, running: Callable[[], PolicyCache | None]) -> list[Callable[[], None]]:
    """Let the running cache observe a layer; returns how to undo it.

    The stream is seen where a norm after attention takes it in, if the block has one that cannot be mistaken; else
    what attention adds is put together from its output.
    """
    scale = residual_scale(site)
    norm = next_norm(site)

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        cache = running()
        if cache is not None and cache.forward.wants_cosines:
            cache.forward.residuals[site.layer_idx] = args[0] if args else kwargs["hidden_states"]

    def observe(added: Callable[[Tensor], Tensor]) -> None:
        cache = running()
        residual = None if cache is None else _take_residual(cache, site.layer_idx)
        if cache is not None and residual is not None:
            cache.observe(site.layer_idx, residual, added(residual))

    def behind(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        # In fp32, where the difference of two bf16 numbers is not rounded to bf16 again.
        observe(lambda residual: args[0].float() - residual.float())

    def after(_: nn.Module, args: Any, output: Any) -> None:
        observe(lambda _: (output[0] if isinstance(output, tuple) else output) * scale)

    seen = (
        attention_output(site).register_forward_hook(after) if norm is None else norm.register_forward_pre_hook(behind)
    )
    return [stream_input(site).register_forward_pre_hook(before, with_kwargs=True).remove, seen.remove]


def find_massive(site: Site, running: Callable[[], PolicyCache | None]) -> Callable[[], None]:
    """Let the running cache find the tokens with a layer's largest activations; returns how to undo it."""

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        cache = running()
        if cache is not None and cache.forward.wants_massive:
            cache.note_massive(site.layer_idx, active_stream(site, args[0] if args else kwargs["hidden_states"]))

    return site.block.register_forward_pre_hook(before, with_kwargs=True).remove


def _take_residual(cache: PolicyCache, layer_idx: int) -> Tensor | None:
    """The input of a layer that is being measured, [B, P, hidden], or that of its tile; None if none is."""
    residuals = cache.forward.residuals
    tile = cache.tile
    # Popped, so that the inputs of measured layers do not pile up during a forward.
    residual = residuals.pop(layer_idx, None) if tile is None or tile.is_last else residuals.get(layer_idx)
    if tile is None or residual is None or residual.shape[1] != tile.columns:
        return residual  # a norm inside the layer has seen one tile
    return tile.cut(residual)


def stream_input(site: Site) -> nn.Module:
    """The module whose input is the residual stream: the block, or its first norm where it takes several (Gemma-3n)."""
    return site.block.get_submodule("input_layernorm") if hasattr(site.block, "altup") else site.block


def active_stream(site: Site, hidden: Tensor) -> Tensor:
    """The hidden states [B, P, hidden] of a block's input; of several streams, the one that is active (Gemma-3n)."""
    config: Any = getattr(site.block, "config", None)
    return hidden if hidden.dim() == 3 else hidden[config.altup_active_idx]


def next_norm(site: Site) -> nn.Module | None:
    """The norm of the residual stream after attention, if its name in the block is unambiguous."""
    names = ("pre_feedforward_layernorm", "pre_mlp_layernorm")  # Gemma-2 and later, AFMoE
    return next((getattr(site.block, name) for name in names if hasattr(site.block, name)), None)


def attention_output(site: Site) -> nn.Module:
    """The module whose output is added to the residual stream: the attention, or a norm or projection behind it."""
    for name in ("post_self_attn_layernorm", "post_norm1", "post_operator_norm"):  # GLM-4, HyperCLOVAX, LFM3
        if hasattr(site.block, name):
            return site.block.get_submodule(name)
    if getattr(site.block, "norm_after", "Swin" in type(site.block).__name__):  # Molmo-2, Chameleon
        return site.block.get_submodule("input_layernorm")
    behind = getattr(site.block, "post_attention_layernorm", None)
    if behind is not None and not hasattr(site.block, "input_layernorm"):  # Olmo-2, Exaone-4
        return behind
    return _outer_projection(site) or site.attention


def _outer_projection(site: Site) -> nn.Module | None:
    """The projection of attention's output, where it stands in a module around the attention (BERT and its kin)."""
    around = next((module for module in site.block.modules() if site.attention in module.children()), site.block)
    return None if around is site.block else getattr(getattr(around, "output", None), "dense", None)


def residual_scale(site: Site) -> float:
    """Factor of attention's output where it is added to the residual stream."""
    scale: Any = getattr(site.block, "residual_multiplier", getattr(site.block, "residual_scale", 1.0))
    return float(scale) * float(getattr(site.block, "attn_out_multiplier", 1.0))  # Falcon-H1 scales attention alone
