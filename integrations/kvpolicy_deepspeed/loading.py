"""Loading a model divided over ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from kvpolicy.parallel.sharding import FAMILIES
from kvpolicy_deepspeed import checks
from kvpolicy_deepspeed.checkpoint import Checkpoint, of_tensors
from kvpolicy_deepspeed.launch import World, meet, world

Backend = Literal["deepspeed", "hf"]


def load(path_or_model: Any, *, backend: Backend = "deepspeed", dtype: Any = None, policy: Any = None) -> Any:
    """Load one rank's part of a model, ready for `kvpolicy.attach`; call it on every rank.

    The ranks are those that `torchrun` or `deepspeed` started; one rank loads the whole model. No rank ever holds more
    of a checkpoint than its own part and one file. Where there are fewer KV heads than ranks, each is held by several.

    Args:
        path_or_model: A folder with safetensors, a name on the hub, or (with DeepSpeed) a model in memory, which is
            divided in place.
        backend: `"deepspeed"` (AutoTP) or `"hf"` (transformers' own tensor parallelism).
        dtype: Of the weights; the checkpoint's by default.
        policy: A policy, or its words, that is to be attached later. It is only checked, before any weight is read:
            attach it yourself.

    Returns:
        A `transformers.PreTrainedModel` in evaluation mode whose logits, on every rank, are the whole model's.

    Raises:
        KVPolicyError: Where the model cannot be divided so, or the policy does not fit it.
        ImportError: Where DeepSpeed is asked for and not installed.
        KVPolicyStateError: Where there is no launcher; it gives the command to use.
    """
    place = world()
    checks.check_backend(backend, path_or_model)
    config = path_or_model.config if isinstance(path_or_model, nn.Module) else _config(path_or_model)
    checks.check_policy(config, policy)
    dtype = checks.check_dtype(dtype, backend)
    if place.size > 1:
        from kvpolicy.hf.heads import check_shardable

        check_shardable(config, backend, place.size)
    place = meet()
    if isinstance(path_or_model, nn.Module):
        model = _divide_model(path_or_model, dtype, place)
    elif place.size == 1:
        model = _whole(path_or_model, config, dtype, place)
    else:
        model = (_by_deepspeed if backend == "deepspeed" else _by_transformers)(path_or_model, config, dtype, place)
    return model.eval()


def _config(path: Any) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(str(path))


def _whole(path: Any, config: Any, dtype: Any, place: World) -> Any:
    from transformers import AutoModelForCausalLM

    files = Checkpoint.find(str(path))
    model: Any = AutoModelForCausalLM.from_pretrained(files.folder, config=config, dtype=dtype or "auto")
    return model.to(place.device)


def _by_deepspeed(path: Any, config: Any, dtype: Any, place: World) -> Any:
    from transformers import GenerationConfig

    from kvpolicy.hf.heads import heads_of
    from kvpolicy_deepspeed.autotp import divide
    from kvpolicy_deepspeed.filling import fill

    files = Checkpoint.find(str(path))
    dtype = checks.check_dtype(dtype or getattr(config, "dtype", None) or files.dtype(), "deepspeed")
    model = _empty(config, dtype)
    family, heads = FAMILIES[config.model_type], heads_of(config, place.rank, place.size)
    weights = _sample(model, files, dtype)
    slots = divide(model, family, heads, dtype, place)
    fill(model, family, slots, files.pieces(), place)
    if (files.folder / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(files.folder)
    return _share(model, heads.replicas, weights)


def _by_transformers(path: Any, config: Any, dtype: Any, place: World) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.distributed.configuration_utils import DistributedConfig

    files = Checkpoint.find(str(path))
    model = AutoModelForCausalLM.from_pretrained(
        files.folder, config=config, dtype="auto", distributed_config=DistributedConfig(tp_size=place.size)
    )
    if dtype is not None and dtype != model.dtype:  # while loading, a layer's experts would be there in both
        _replace(model, lambda parameter: parameter.to(dtype))
        model.config.dtype = dtype
    return _share(model, 1, _sample(model, files, model.dtype))


def _replace(model: nn.Module, change: Callable[[nn.Parameter], Tensor]) -> None:
    """Change a model's parameters one by one, so that one at a time is there twice; what is tied stays tied."""
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            owners.setdefault(id(parameter), []).append((module, name))
    for places in owners.values():
        new = nn.Parameter(change(getattr(*places[0])), requires_grad=False)
        for module, name in places:
            setattr(module, name, new)


def _divide_model(model: Any, dtype: Any, place: World) -> Any:
    from kvpolicy.hf.discovery import find_sites, sample_weights
    from kvpolicy.hf.heads import heads_of
    from kvpolicy_deepspeed.autotp import divide
    from kvpolicy_deepspeed.filling import fill

    dtype = checks.check_dtype(dtype or model.dtype, "deepspeed")
    if place.size == 1:
        return model.to(place.device, dtype)
    weights = sample_weights(find_sites(model).layers[0])
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
    _replace(model, lambda parameter: parameter.to("meta"))
    family, heads = FAMILIES[model.config.model_type], heads_of(model.config, place.rank, place.size)
    slots = divide(model, family, heads, dtype, place)
    fill(model, family, slots, of_tensors(tensors), place)
    return _share(model, heads.replicas, weights)


def _empty(config: Any, dtype: torch.dtype) -> Any:
    """A model whose parameters are on the meta device, and whose buffers are not."""
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    with init_empty_weights(include_buffers=False):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def _sample(model: nn.Module, files: Checkpoint, dtype: torch.dtype) -> Tensor | None:
    """A few numbers of the whole first attention matrix, as `kvpolicy.hf.discovery.sample_weights` takes them."""
    from kvpolicy.hf.discovery import Site, find_sites, sample_weights

    site = find_sites(model).layers[0]
    first = next(parameter for parameter in site.attention.parameters() if parameter.dim() == 2)
    name = next(name for name, parameter in model.named_parameters() if parameter is first)
    for key, piece in files.pieces():
        if name == key or name.endswith(f".{key}"):
            whole = nn.ParameterList([nn.Parameter(piece.take().to(dtype), requires_grad=False)])
            return sample_weights(Site(site.layer_idx, site.block, whole))
    return None


def _share(model: Any, replicas: int, weights: Tensor | None) -> Any:
    from kvpolicy.parallel.runtime import share

    share(model, dist.group.WORLD, replicas=replicas, weights=weights)
    return model
