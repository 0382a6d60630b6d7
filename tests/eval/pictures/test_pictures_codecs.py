"""Pictures of codecs show what the codec gives back, are the same each time, and stand in their pages."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from kvpolicy.codecs.rotation import mix
from kvpolicy.codecs.turboquant import TurboQuant, normal_levels
from kvpolicy.distortion import coded_store, distortion
from kvpolicy.registry import names
from kvpolicy_eval.methods.plan import page_of
from kvpolicy_eval.pictures import codecs_grid, codecs_levels, codecs_tiers, tensors
from kvpolicy_eval.pictures.codecs import PICTURES
from kvpolicy_eval.pictures.stored import stored
from kvpolicy_eval.pictures.tensors import HEAD, PROMPT, after, originals, read, relative_error, stage_of

DOCS = Path(__file__).parents[3] / "docs"


def test_every_codec_has_a_picture() -> None:
    assert set(PICTURES) == set(names("codec"))


def test_pages_show_their_pictures() -> None:
    """Of all methods, tests/eval/pictures/test_pictures.py tests that they have one, and its size."""
    for codec in PICTURES:
        page = (DOCS / "methods" / f"{page_of(codec)}.md").read_text(encoding="utf-8")
        assert f"python -m kvpolicy_eval.pictures {codec}`" in page, codec
        assert ElementTree.parse(DOCS / "pictures" / f"{codec}.svg").getroot().tag.endswith("svg"), codec


@pytest.mark.parametrize(("codec", "bits"), [("plain", 16.13), ("gear", 4.38), ("csr", 2.38), ("zipcache", 4.10)])
def test_bars_are_the_bits_of_the_guide(codec: str, bits: float) -> None:
    """The numbers of docs/guide/codecs.md at 4,096 tokens, which another command has printed."""
    assert sum(stored(codec).values()) == pytest.approx(bits, abs=0.005)


def test_parts_of_the_bars() -> None:
    assert stored("gear:sparse=0").get("outliers") is None
    assert stored("gear")["codes"] == pytest.approx(stored("gear:rank=0")["codes"])
    assert stored("csr:nnz=4")["atoms"] == pytest.approx(stored("csr:nnz=8")["atoms"] / 2)
    assert stored("plain").keys() == {"exact tokens", "positions and counters"}


@pytest.mark.parametrize("spec", [codecs_grid.KIVI, codecs_levels.CSR.format(8)])
def test_errors_are_those_of_the_engine(spec: str) -> None:
    """Read slot by slot after a real prompt, they agree with what `distortion` measures of the same tensors."""
    layer = after(spec)
    held = originals()
    keys = held.unrotated if layer.spec.codec.traits.key_space == "unrotated" else held.keys
    got = [read(layer, head) for head in range(keys.shape[0])]
    wanted = distortion(layer.spec.codec, keys[None], held.values[None], layer_idx=tensors.LAYER)
    assert relative_error(torch.stack([k for k, _ in got]), keys) == pytest.approx(wanted.keys, rel=1e-3)
    assert relative_error(torch.stack([v for _, v in got]), held.values) == pytest.approx(wanted.values, rel=1e-3)


def test_tokenwise_draws_what_is_quantized() -> None:
    normal = codecs_grid.normalized_keys()
    coded = stage_of(after(codecs_grid.TOKENWISE.format(4, "true"))) == 1
    assert normal[coded].mean(0).abs().max() < 0.01
    assert (normal[coded].std(0) - 1).abs().max() < 0.01
    errors = codecs_grid.tokenwise_errors()
    assert all(with_it < without for without, with_it in zip(errors[False], errors[True], strict=True))


def test_kivi_and_gear_draw_their_errors() -> None:
    by_channel, by_token = codecs_grid.kivi_errors().values()
    assert by_channel.nanmean().abs() < by_channel.abs().nanmean() / 10  # no bias
    keys = originals().keys[HEAD]
    assert relative_error(by_channel + keys, keys) < relative_error(by_token + keys, keys)
    alone, ranked, whole = (relative_error(error + keys, keys) for error in codecs_grid.gear_errors().values())
    assert alone == pytest.approx(relative_error(by_channel + keys, keys), rel=0.05)  # GEAR's Q is KIVI's
    assert whole < ranked < alone


def test_bfp_draws_half_steps() -> None:
    """No number loses more, but for the largest of a block, which is clipped to less than a step."""
    layer = coded_store(codecs_grid.BLOCKS, originals().keys[None], originals().keys[None])
    got, unsorted = read(layer)
    order = layer.tensors.codes[0].order[0, HEAD, 0].long()
    want = originals().keys[HEAD, codecs_grid.TOKEN]
    size, step, _ = codecs_grid.bfp_blocks()["sorted"]
    assert torch.equal(size, want[order].abs())
    error = (got[codecs_grid.TOKEN][order] - want[order]).abs()
    assert bool((error <= step).all()) and (error <= step / 2 + 1e-6).float().mean() > 0.8
    size, step, _ = codecs_grid.bfp_blocks()["as they are"]
    assert torch.equal(size, want.abs()) and bool(((unsorted[codecs_grid.TOKEN] - want).abs() <= step).all())


def test_kvquant_draws_its_levels() -> None:
    x, levels = codecs_levels.kvquant_normalized()
    assert levels.tolist() == sorted(levels.tolist()) and len(levels) == 8
    rotated, unrotated, center, half = codecs_levels.kvquant_channel()
    inside = [float(((t - center).abs() <= half).float().mean()) for t in (rotated, unrotated)]
    assert inside[0] < 0.8 < 0.95 < inside[1]  # that is why keys are coded unrotated
    assert x.numel() == originals().unrotated.numel()


def test_turboquant_draws_what_it_codes() -> None:
    """What is read back, mixed again, stands on the drawn levels, in units of the stored norm."""
    codec = TurboQuant(bits=codecs_levels.BITS, seed=codecs_levels.SEED)
    held = originals(codecs_levels.UNEVEN_LAYER)
    layer = coded_store(codec, held.keys[None], held.values[None])
    got = read(layer, codecs_levels.UNEVEN_HEAD)[0]
    coded = ~got.isnan().any(-1)
    on = (
        mix(got[coded], codec.seed) / held.keys[codecs_levels.UNEVEN_HEAD][coded].square().mean(-1, keepdim=True).sqrt()
    )
    levels = torch.tensor(normal_levels(codec.bits))
    nearest = levels[(on[..., None] - levels).abs().argmin(-1)]
    torch.testing.assert_close(on, nearest, atol=5e-3, rtol=0)
    drawn = codecs_levels.turboquant_channels()[1][coded]
    assert (drawn - nearest).abs().le((drawn[..., None] - levels).abs().amin(-1) + 5e-3).all()


def test_rotate_draws_every_head() -> None:
    before, mixed = codecs_levels.rotate_peaks()
    assert len(before) == len(mixed) == 32
    at = codecs_levels.UNEVEN_LAYER * originals().keys.shape[0] + codecs_levels.UNEVEN_HEAD
    assert int((before - mixed).argmax()) == at  # the page says that it gains most


def test_csr_draws_its_pairs() -> None:
    """The sum of the drawn pairs is what is read back, and fewer pairs are the first of them."""
    atoms, coefficients = codecs_levels.csr_pairs()
    layer = after(codecs_levels.CSR.format(8))
    calibration = layer.contents.calibrations[0].keys
    assert int(atoms.max()) < len(calibration), "the key has an atom of the prompt: draw another"
    sums = codecs_levels.csr_sums()
    for s in codecs_levels.PAIRS:
        wanted = (coefficients[:s, None] * calibration[atoms[:s]]).sum(0)
        torch.testing.assert_close(sums[s], wanted, atol=1e-2, rtol=0)
    keys, values = codecs_levels.csr_errors()
    assert keys == sorted(keys, reverse=True) and values == sorted(values, reverse=True)


def test_plain_draws_slots() -> None:
    before, later = codecs_tiers.plain_slots()
    steps = codecs_tiers.PLAIN_STEPS
    held = before[before >= 0]
    stayed = later < PROMPT
    assert torch.equal(later[stayed], before[stayed]) and len(held) == len(later) == 96
    assert int(later.max()) == PROMPT + steps - 1


def test_staircase_draws_stages_by_age() -> None:
    for _, where, error in codecs_tiers.staircase_moments():
        assert bool((where.diff() <= 0).all()) and set(where.tolist()) == {0, 1, 2, 3}
        stages = where[:PROMPT]
        means = [float(error[stages == stage].mean()) for stage in (1, 2, 3) if bool((stages == stage).any())]
        assert means == sorted(means) and bool(error[stages == 0].isnan().all())


def test_mikv_draws_who_stays_exact() -> None:
    scores, where = codecs_tiers.mikv_scores()
    newest = torch.arange(PROMPT) >= PROMPT - PROMPT // 2  # h2o's own share of recent tokens
    assert set(where.tolist()) == {0, 1}
    old = ~newest
    assert float(scores[old & (where == 0)].min()) >= float(scores[old & (where == 1)].max())


def test_zipcache_draws_three_moments() -> None:
    (_, prompt), (_, waiting), (_, anew) = codecs_tiers.zipcache_moments()
    assert int((prompt == 0).sum()) == 0 and int((waiting == 0).sum()) == codecs_tiers.ZIPCACHE_STEPS - 1
    assert torch.equal(waiting[:PROMPT], prompt)
    assert int((anew == 0).sum()) <= 1 and int((anew == 1).sum()) == pytest.approx(0.6 * len(anew), abs=25)
    assert not torch.equal(anew[:PROMPT], prompt)
