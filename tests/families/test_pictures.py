"""Prompts of text and a picture, as the processors of transformers make them: what is held gives the stock logits.

Most whole processors need torchvision, which is not among the packages of the tests; so the text is joined here, and
the picture goes through the image processor that needs Pillow alone. Gemma 3 has its whole processor. Llama 4 is not
here: with a picture, its model does not run in transformers 5.24 itself.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from torch import Tensor

pytest.importorskip("PIL")
pytest.importorskip("transformers.image_processing_backends")

import numpy
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import kvpolicy
from kvpolicy.hf.model_spec import describe
from kvpolicy_eval.families.check import SEEN_FROM, WITHIN
from kvpolicy_eval.families.conversation import generated, written_by_stock, written_under
from kvpolicy_eval.families.differences import difference, until_parted
from kvpolicy_eval.families.entries import IMAGE, Entry
from kvpolicy_eval.families.prompts import Inputs, tokens
from kvpolicy_eval.families.small_config import small_config
from kvpolicy_eval.families.small_model import model_class, sharpen
from tests.conformance.access import kept_positions
from tests.sampling import each_once, product

SIDE = 32
"""Pixels along each side of the picture that a model looks at."""
PICTURE = Image.fromarray(numpy.random.default_rng(0).integers(0, 255, (SIDE, SIDE, 3), dtype=numpy.uint8))


def processor(family: str, name: str, **options: Any) -> Any:
    """An image processor that needs no torchvision."""
    module = import_module(f"transformers.models.{family}.image_processing_pil_{family}")
    return getattr(module, f"{name}ImageProcessorPil")(**options)


def around(picture: list[int], *, before: int = 14, after: int = 10) -> Tensor:
    """Ids of a text with a picture in it, [1, tokens]."""
    return torch.cat([tokens(before, 1), torch.tensor([picture]), tokens(after, 2)], 1)


def qwen(config: Any) -> Inputs:
    """Qwen 2.5 VL, 3 VL and 3.5: positions of several parts, from the grid of the picture."""
    vision = config.vision_config
    image = processor(
        "qwen2_vl",
        "Qwen2VL",
        patch_size=vision.patch_size,
        temporal_patch_size=vision.temporal_patch_size,
        merge_size=vision.spatial_merge_size,
        size={"shortest_edge": SIDE**2, "longest_edge": SIDE**2},
    )(PICTURE, return_tensors="pt")
    places = int(image["image_grid_thw"].prod()) // vision.spatial_merge_size**2
    ids = around([config.vision_start_token_id, *[config.image_token_id] * places, config.vision_end_token_id])
    return {"input_ids": ids, "mm_token_type_ids": (ids == config.image_token_id).int(), **image}


def internvl(config: Any) -> Inputs:
    image = processor("got_ocr2", "GotOcr2", size={"height": SIDE, "width": SIDE})(PICTURE, return_tensors="pt")
    places = int((SIDE // config.vision_config.patch_size[0] * config.downsample_ratio) ** 2)
    return {"input_ids": around([config.image_token_id] * places), "pixel_values": image["pixel_values"]}


def mistral3(config: Any) -> Inputs:
    """Pictures of any size, whose rows end with a token of their own."""
    vision = config.vision_config
    unit = vision.patch_size * config.spatial_merge_size
    image = processor("pixtral", "Pixtral", patch_size=unit, size={"longest_edge": SIDE})(PICTURE, return_tensors="pt")
    height, width = image["image_sizes"][0]
    row = [config.image_token_index] * (int(width) // unit)
    return {"input_ids": around([*row, 98] * (int(height) // unit)), **image}


def smolvlm(config: Any) -> Inputs:
    sizes = {"size": {"longest_edge": SIDE}, "max_image_size": {"longest_edge": SIDE}}
    make = processor("smolvlm", "SmolVLM", **sizes, do_image_splitting=False)
    image = make(PICTURE, return_tensors="pt")
    places = (SIDE // config.vision_config.patch_size // config.scale_factor) ** 2
    return {
        "input_ids": around([98, *[config.image_token_id] * places, 98]),
        "pixel_values": image["pixel_values"],
        "pixel_attention_mask": image["pixel_attention_mask"],
    }


def gemma3(config: Any) -> Inputs:
    """The tokens of a picture see each other, also later ones."""
    names = {"boi_token": config.boi_token_index, "eoi_token": config.eoi_token_index}
    names |= {"image_token": config.image_token_index}
    words = [f"w{word}" for word in range(config.get_text_config().vocab_size)]
    for name, place in names.items():
        words[place] = f"<{name}>"
    whole = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="w3"))
    whole.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=whole, pad_token="w0", extra_special_tokens={name: f"<{name}>" for name in names}
    )
    image = processor("gemma3", "Gemma3", size={"height": SIDE, "width": SIDE})
    process = transformers.Gemma3Processor(image, tokenizer, image_seq_length=config.mm_tokens_per_image)
    text, question = (" ".join(f"w{word}" for word in tokens(count, count)[0].tolist()) for count in (14, 10))
    return dict(process(text=f"{text} <boi_token> {question}", images=PICTURE, return_tensors="pt"))


def gemma4(config: Any) -> Inputs:
    """Pictures of any size, as patches with their places; the prompt is longer than the window."""
    vision = config.vision_config
    unit = {"patch_size": vision.patch_size, "pooling_kernel_size": vision.pooling_kernel_size}
    image = processor("gemma4", "Gemma4", max_soft_tokens=70, **unit)(PICTURE, return_tensors="pt")
    places = int(image["num_soft_tokens_per_image"][0])
    ids = around([config.boi_token_id, *[config.image_token_id] * places, config.eoi_token_id])
    pixels = {"pixel_values": image["pixel_values"], "image_position_ids": image["image_position_ids"]}
    return {"input_ids": ids, "mm_token_type_ids": (ids == config.image_token_id).int(), **pixels}


class Family(NamedTuple):
    """A family of models, and what its prompts are.

    Attributes:
        name: Its name in transformers.
        inputs: Makes the inputs of a prompt, from a config.
        fields: Fields of the config that the rules for small ones do not know.
    """

    name: str
    inputs: Callable[[Any], Inputs]
    fields: dict[str, Any]


def _rope(*sections: int) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [*sections]}


_WINDOWS = ["sliding_attention", "full_attention"] * 2
_GEMMA4: dict[str, Any] = {"layer_types": _WINDOWS, "num_global_key_value_heads": 2}
FAMILIES = {
    "Qwen2.5-VL": Family("qwen2_5_vl", qwen, {"text_config": {"rope_parameters": _rope(4, 2, 2)}}),
    "Qwen3-VL": Family("qwen3_vl", qwen, {}),
    "Qwen3.5": Family("qwen3_5", qwen, {"text_config": {"layer_types": ["linear_attention", "full_attention"] * 2}}),
    "InternVL": Family("internvl", internvl, {}),
    "Mistral 3": Family("mistral3", mistral3, {}),
    "SmolVLM": Family("smolvlm", smolvlm, {}),
    "Gemma 3": Family("gemma3", gemma3, {}),
    "Gemma 4": Family("gemma4", gemma4, {"vision_config": {}, "text_config": _GEMMA4}),
    "Gemma 4 E2B": Family(
        "gemma4", gemma4, {"vision_config": {}, "text_config": {"layer_types": _WINDOWS, "num_kv_shared_layers": 2}}
    ),
}


POLICIES = ["full", "window@0.5", "snapkv@0.5", "uniform/adakv+snapkv@0.4", "squeeze+kvcrush/snapkv@0.5"]


def made(family: Family) -> tuple[Any, Inputs]:
    """A small model of a family in fp64, in which rounding is far from `WITHIN`, and a prompt with a picture."""
    config = small_config(CONFIG_MAPPING[family.name], family.fields)
    torch.manual_seed(0)
    model = sharpen(model_class(Entry(IMAGE, family.name))(config).float().eval()).double()
    inputs = family.inputs(model.config)
    return model, inputs | {"pixel_values": inputs["pixel_values"].double()}


@product("name,policy", [*FAMILIES], POLICIES, sample=each_once([*FAMILIES], POLICIES))
def test_a_prompt_with_a_picture(name: str, policy: str) -> None:
    model, inputs = made(FAMILIES[name])
    stock = generated(model, inputs)
    blank = generated(model, inputs | {"pixel_values": torch.zeros_like(inputs["pixel_values"])})
    assert until_parted(blank, stock) > SEEN_FROM  # it matters what is seen
    written, held = written_under(model, policy, inputs)
    assert until_parted(written, written_by_stock(model, inputs, held)) <= WITHIN
    assert (until_parted(stock, written) > SEEN_FROM) is (policy != "full")


@pytest.mark.parametrize("name", ["Gemma 4", "Gemma 4 E2B"])
def test_a_replay_of_what_layers_are_given_beside_embeddings(name: str) -> None:
    """Of a picture, it cannot be found from the embeddings; of text, it is compared with the whole vocabulary."""
    model, inputs = made(FAMILIES[name])
    stock = generated(model, inputs)
    written, _ = written_under(model, "kvzip@4000", inputs)
    assert until_parted(written, stock) <= WITHIN
    ids = tokens(30, 30)
    found = []
    for one in (model, model.model.language_model):
        with torch.no_grad(), kvpolicy.attach(one, "kvzip@0.5"):
            cache = kvpolicy.PolicyCache(one)
            one(input_ids=ids, cache=cache)
            found.append([kept_positions(layer) for layer in cache.policy_layers])
    assert found[0] == found[1]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_plan_counts_the_embeddings_that_a_replay_needs(name: str) -> None:
    """A model with pictures gives its decoder no ids."""
    model, _ = made(FAMILIES[name])
    ids = tokens(30, 9)
    planned = kvpolicy.plan(model, "kvzip@0.5", batch=2, prompt=31)
    with torch.no_grad(), kvpolicy.attach(model, "kvzip@0.5"):
        cache = kvpolicy.PolicyCache(model, prompt=31)
        model(input_ids=ids.expand(2, -1), cache=cache)
        (held,) = [layer.transcript for layer in cache.policy_layers if layer.transcript is not None]
        before = cache.nbytes
        model(input_ids=ids[:, :1].expand(2, -1), cache=cache)
    given = describe(model.config, torch.float64).given
    assert given > 8 and held.nbytes == 2 * (30 * (given + 1) + 8)
    assert cache.plan is not None and before < cache.plan.peak_nbytes == planned.peak_nbytes


@pytest.mark.parametrize("name", FAMILIES)
def test_wrong_masks_are_refused_before_the_model_makes_others_of_them(name: str) -> None:
    """The decoder of some is given masks of pairs, which do not show what was wrong."""
    model, _ = made(FAMILIES[name])
    ids = tokens(20, 9).expand(2, -1)
    mask = torch.ones(2, 20, dtype=torch.int64)
    mask[1, :5] = 0
    other = mask.clone()
    other[1, 4] = 1
    wrong: list[tuple[Any, int, str]] = [
        (torch.full((2, 16), 0.5), 0, "no other numbers than 0 and 1, got 0.5"),
        (torch.zeros(2, 16), 0, "at least one token, got only padding"),
        (mask[:, :15], 0, "16 columns for all tokens so far.*, got 15"),
        (torch.ones(3, 16), 0, "2-D with 2 row"),
        (mask[:, :19], 16, "20 columns for all tokens so far.*, got 19"),
        (other, 16, "the same earlier tokens that the cache has seen"),
    ]
    if name.startswith("Gemma"):
        wrong.append((mask[:, 16:], 16, "20 columns for all tokens so far where layers have sliding windows"))
        wrong.append((None, 16, "must be given behind a padded prompt"))
    with torch.no_grad(), kvpolicy.attach(model, "full"):
        expected = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, 16:]
        cache = kvpolicy.PolicyCache(model)
        for start, stop in ((0, 16), (16, 20)):
            for given, at, said in wrong:
                if at == start:
                    with pytest.raises(kvpolicy.KVPolicyError, match=said):
                        model(input_ids=ids[:, start:stop], attention_mask=given, cache=cache)
            found = model(input_ids=ids[:, start:stop], attention_mask=mask[:, :stop], cache=cache).logits
    assert difference(found, expected) <= WITHIN


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "Qwen3.5"])
def test_padding_in_later_chunks_is_that_of_the_stock_model(name: str) -> None:
    """Also where the decoder is given masks of new tokens that the model around it has made."""
    model, _ = made(FAMILIES[name])
    ids = tokens(20, 9).expand(2, -1)
    mask = torch.ones(2, 20, dtype=torch.int64)
    mask[1, :12] = 0

    def logits() -> torch.Tensor:
        first = model(input_ids=ids[:, :8], attention_mask=mask[:, :8], use_cache=True)
        second = model(input_ids=ids[:, 8:16], attention_mask=mask[:, :16], cache=first.cache)
        third = model(input_ids=ids[:, 16:17], attention_mask=mask[:, :17], cache=second.cache)
        return torch.cat([second.logits[:, 4:], third.logits], 1)

    with torch.no_grad():
        expected = logits()
        with kvpolicy.attach(model, "full"):
            found = logits()
    assert difference(found, expected) <= WITHIN
