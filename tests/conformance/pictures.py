"""Tiny models of pictures whose positions have several parts (M-RoPE), and prompts with a picture."""

from __future__ import annotations

import functools
from typing import Any

import torch
import transformers
from torch import Tensor, nn

IMAGE = 44
START = 45
END = 46
SIDE = 8
"""Patches along each side of the picture; four of them are one token."""
PICTURE = (SIDE // 2) ** 2

_TEXT: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
}
_VISION: dict[str, Any] = {"depth": 1, "patch_size": 4, "temporal_patch_size": 2, "in_channels": 3}
_SIZES: dict[str, Any] = {"hidden_size": 32, "out_hidden_size": 32, "intermediate_size": 32, "num_heads": 2}
_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2_5_vl": ("Qwen2_5_VL", _SIZES | {"fullatt_block_indexes": [0]}),
    "glm4v": ("Glm4v", _SIZES | {"image_size": 4 * SIDE}),
    "qwen3_vl": ("Qwen3VL", _SIZES | {"deepstack_visual_indexes": []}),
}
NAMES = [*_MODELS]


@functools.cache
def build(name: str) -> Any:
    """A model, in eval mode, whose attention tells positions apart; one and the same for every call."""
    prefix, vision = _MODELS[name]
    tokens = {"image_token_id": IMAGE, "image_start_token_id": START, "image_end_token_id": END}
    tokens |= {"vision_start_token_id": START, "vision_end_token_id": END, "video_token_id": 47}
    text = _TEXT | ({"head_dim": 8} if name == "qwen3_vl" else {})
    make: Any = getattr(transformers, f"{prefix}Config")
    torch.manual_seed(0)
    model = getattr(transformers, f"{prefix}ForConditionalGeneration")(
        make(text_config=text, vision_config=_VISION | vision, **tokens)
    ).eval()
    _sharpen(model)
    return model


def _sharpen(model: nn.Module) -> None:
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.copy_(torch.randn_like(weight) / weight[0].numel() ** 0.5)
            if "q_proj" in name:
                weight.mul_(3)


def prompt(rows: int = 1, *, before: int = 5, after: int = 6, seed: int = 1) -> dict[str, Any]:
    """Arguments of a forward: a text with one picture in each row."""
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(3, 40, (rows, before + after), generator=generator)
    image = torch.tensor([START, *[IMAGE] * PICTURE, END]).expand(rows, -1)
    ids = torch.cat([text[:, :before], image, text[:, before:]], 1)
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": (ids == IMAGE).int(),
        "pixel_values": torch.randn(rows * SIDE**2, 3 * 2 * 4**2, generator=generator),
        "image_grid_thw": torch.tensor([[1, SIDE, SIDE]] * rows),
    }


def words(count: int, rows: int = 1, seed: int = 2) -> Tensor:
    """Ids of a text, [rows, count]."""
    return torch.randint(3, 40, (rows, count), generator=torch.Generator().manual_seed(seed))
