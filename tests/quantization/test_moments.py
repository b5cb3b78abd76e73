"""Moments in units of Adam's update: what a restore gives back, whoever wrote which of the two, and at the edges."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dsq_ckpt
from dsq_ckpt.config.schema import DSQConfig
from dsq_ckpt.quantization.groups import assign
from dsq_ckpt.quantization.moments import (
    LEAST_ROOT,
    OCTAVE_UNITS,
    UpdateFrame,
    multiply_by_octave_units,
    multiply_by_roots,
)
from dsq_ckpt.storage.checkpoint import Checkpoint
from dsq_ckpt.storage.manifest import Manifest
from tests.helpers.adam_moments import error, moments, update

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


def state(seed: int = 0) -> dict:
    return {"state": {"w": moments(seed=seed)}}


def restored(path, like: dict, **options) -> dict[str, torch.Tensor]:
    empty = {"state": {"w": {name: torch.full_like(value, torch.nan) for name, value in like["state"]["w"].items()}}}
    dsq_ckpt.load(empty, path, **options)
    return empty["state"]["w"]


def octaves_between(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """log2 of the ratios of elements that are not zero."""
    nonzero = one > 0
    return other[nonzero].double().log2() - one[nonzero].double().log2()


def test_second_moments_stay_within_an_octave_or_two_and_zeros_are_kept(tmp_path) -> None:
    """Elements of one row differ by 40 octaves here, for which no scale of rows and columns is any help."""
    original = state()
    dsq_ckpt.save(original, tmp_path / "run" / "0")
    v, got = original["state"]["w"]["exp_avg_sq"], restored(tmp_path / "run" / "0", original)["exp_avg_sq"]
    assert octaves_between(v, got).abs().max() < 2
    assert octaves_between(v, got).abs().mean() < 0.3
    assert abs((v[v > 0] / got[v > 0]).sqrt().mean() - 1) < 1e-3  # steps are as long as they would be
    assert torch.equal(got == 0, v == 0)


def test_the_update_is_restored_within_a_part_of_a_cell(tmp_path) -> None:
    """Every element to the same error, whatever its size: by tensor, what Adam does next differs by a quarter."""
    original = state()
    dsq_ckpt.save(original, tmp_path / "run" / "0")
    exact, got = original["state"]["w"], restored(tmp_path / "run" / "0", original)
    assert error(update(exact), update(got)) < 0.25
    octave = exact["exp_avg_sq"].log2().floor()
    for some in (octave < -60, (octave >= -60) & (octave < -30), octave >= -30):
        assert some.sum() > 500
        assert error(update(exact)[some], update(got)[some]) < 0.3
    assert (got["exp_avg"][exact["exp_avg"] == 0] == 0).all()


@pytest.mark.parametrize("bound", [0.11, 0.2, 0.4, 0.8])
@pytest.mark.parametrize("beta1", [0.5, 0.9, 0.99])
def test_the_bound_on_the_error_of_the_update_is_kept_and_reported(tmp_path, bound: float, beta1: float) -> None:
    """The sketch tells it before anything is written; a bit less would break it, and nearly all of it is used."""
    original = state()
    original["state"]["w"]["exp_avg"] *= ((1 - beta1) / (1 + beta1) / 0.0526) ** 0.5  # of the size that such a mean has
    config: dict = {"quantize": {"exp_avg": {"codebook": {"fit": "update", "error": bound}, "refinement_bits": 8}}}
    dsq_ckpt.save(original, tmp_path / "run" / "0", config=config)
    manifest = Manifest.read(tmp_path / "run" / "0")
    told = manifest.groups["exp_avg/linear/update"].update_error
    exact, got = update(original["state"]["w"]), update(restored(tmp_path / "run" / "0", original))
    assert error(exact, got) == pytest.approx(told, rel=0.15) and told <= bound
    config["quantize"]["exp_avg"]["codebook"]["error"] = 0
    told_with = []
    for bits in range(9):
        config["quantize"]["exp_avg"]["refinement_bits"] = bits
        dsq_ckpt.save(original, tmp_path / f"bits-{bits}" / "0", config=config)
        told_with.append(Manifest.read(tmp_path / f"bits-{bits}" / "0").groups["exp_avg/linear/update"].update_error)
    fewest = next(value for value in told_with if value <= bound)
    assert fewest <= told and (told > 0.8 * bound or fewest == told_with[0])


def test_a_bound_that_the_bits_cannot_keep_is_reported(tmp_path) -> None:
    """Once for a run, though the error differs from save to save."""
    said = r"next update in 'exp_avg/linear/update' by \d+%, more than the 25%.*refinement_bits, which is 1"
    for run in ("run", "another"):
        with pytest.warns(UserWarning, match=said) as caught:
            for seed in range(3):
                few = {"quantize": {"exp_avg": {"refinement_bits": 1}}}
                dsq_ckpt.save(state(seed), tmp_path / run / str(seed), config=few)
        assert len([warning for warning in caught if "next update in" in str(warning.message)]) == 1


def test_quantization_by_size_alone_loses_such_moments(tmp_path) -> None:
    """The reason for it all: a cell of one width for the whole tensor loses most elements' updates."""
    original = state()
    by_size = {"quantize": {
        "exp_avg": {"codebook": {"fit": "kmeans", "bins": 2}, "refinement_bits": 3},
        "exp_avg_sq": {"codebook": {"fit": "kmeans", "bins": 4, "domain": "log"}, "refinement_bits": 1},
    }}
    dsq_ckpt.save(original, tmp_path / "run" / "0", config=by_size)
    assert error(update(original["state"]["w"]), update(restored(tmp_path / "run" / "0", original))) > 0.5


def test_second_moments_cost_little_given_their_parents(tmp_path) -> None:
    original = state()
    dsq_ckpt.save(original, tmp_path / "run" / "0")
    original["state"]["w"]["exp_avg_sq"] *= 1.05
    dsq_ckpt.save(original, tmp_path / "run" / "1")
    keyframe, delta = (Manifest.read(tmp_path / "run" / name).kinds["exp_avg_sq"].base for name in "01")
    assert delta < keyframe / 4
    v, got = original["state"]["w"]["exp_avg_sq"], restored(tmp_path / "run" / "1", original)["exp_avg_sq"]
    assert octaves_between(v, got).abs().max() < 2


def test_octaves_that_the_parent_did_not_have_are_coded(tmp_path) -> None:
    original = state()
    dsq_ckpt.save(original, tmp_path / "run" / "0")
    v = original["state"]["w"]["exp_avg_sq"]
    v[0] = 2.0**100
    v[1] = 2.0**-120
    v[2] = 1e-40  # subnormal: no octave
    dsq_ckpt.save(original, tmp_path / "run" / "1")
    got = restored(tmp_path / "run" / "1", original)
    assert octaves_between(v[:2], got["exp_avg_sq"][:2]).abs().max() < 2
    assert (got["exp_avg_sq"][2] == 0).all()
    large = original["state"]["w"]["exp_avg"][2].abs() > 1e-17
    assert error(original["state"]["w"]["exp_avg"][2][large], got["exp_avg"][2][large]) < 0.01


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes(tmp_path, dtype) -> None:
    original = {"state": {"w": {k: (v * 2.0**12).to(dtype) for k, v in moments().items()}}}
    dsq_ckpt.save(original, tmp_path / "run" / "0")
    got = restored(tmp_path / "run" / "0", original)
    exact = original["state"]["w"]
    assert got["exp_avg"].dtype == dtype
    fine = exact["exp_avg_sq"].double() > 2.0**-14  # float16 has no exponent below
    one, other = (update({k: v.double() for k, v in part.items()})[fine] for part in (exact, got))
    assert error(one, other) < 0.25


def test_a_first_moment_alone_is_stored_by_its_size(tmp_path) -> None:
    """Lion has no second moment; nothing could measure the first."""
    m = moments()["exp_avg"]
    original = {"state": {"w": {"exp_avg": m}}}
    dsq_ckpt.save(original, tmp_path / "run" / "0")
    with Checkpoint(tmp_path / "run" / "0") as checkpoint:
        assert "root" not in checkpoint.read_record(checkpoint.find_record("state.w.exp_avg", (0, 0)))
    empty = {"state": {"w": {"exp_avg": torch.zeros_like(m)}}}
    dsq_ckpt.load(empty, tmp_path / "run" / "0")
    assert error(m, empty["state"]["w"]["exp_avg"]) < 0.5


@pytest.mark.parametrize("how", ["exact", "bf16"])
def test_second_moments_that_are_not_coded_by_octave(tmp_path, how) -> None:
    """By exact ones first moments are divided as well, by rounded ones not."""
    tree = state()
    fine = {"codebook": {"fit": "update", "error": 0.02}}
    dsq_ckpt.save(tree, tmp_path / "run" / "0", config={"quantize": {"exp_avg": fine, "exp_avg_sq": {"method": how}}})
    with Checkpoint(tmp_path / "run" / "0") as checkpoint:
        assert ("root" in checkpoint.read_record(checkpoint.find_record("state.w.exp_avg", (0, 0)))) == (how == "exact")
    got = restored(tmp_path / "run" / "0", tree)
    if how == "exact":
        assert torch.equal(got["exp_avg_sq"], tree["state"]["w"]["exp_avg_sq"])
        assert error(update(tree["state"]["w"]), update(got)) < 0.022


@pytest.mark.parametrize("bad", ["exp_avg", "exp_avg_sq"])
def test_a_moment_with_nan_is_exact_and_the_other_one_as_ever(tmp_path, bad) -> None:
    original = state()
    original["state"]["w"][bad][3, 5] = torch.nan
    with pytest.warns(UserWarning, match="NaN or Inf"):
        dsq_ckpt.save(original, tmp_path / "run" / "0")
    got, exact = restored(tmp_path / "run" / "0", original), original["state"]["w"]
    assert torch.equal(got[bad].nan_to_num(7), exact[bad].nan_to_num(7))
    sound = exact["exp_avg_sq"] > 0
    assert error(update(exact)[sound].nan_to_num(0), update(got)[sound].nan_to_num(0)) < 0.25


def test_history_without_refinement_keeps_second_moments_alone(tmp_path) -> None:
    """A first moment of long ago says nothing about today's, and costs next to nothing."""
    original = state()
    dsq_ckpt.save(original, tmp_path / "run" / "0", config={"quantize": {"exp_avg": {"refinement_bits": 0}}})
    got, exact = restored(tmp_path / "run" / "0", original), original["state"]["w"]
    assert octaves_between(exact["exp_avg_sq"], got["exp_avg_sq"]).abs().max() < 2
    assert update(exact).abs().max() < 2 and not got["exp_avg"].any()
    kinds = Manifest.read(tmp_path / "run" / "0").kinds
    assert kinds["exp_avg"].base < 0.1 * kinds["exp_avg_sq"].base


def test_differences_of_first_moments_are_not_measured(tmp_path) -> None:
    """The unit of an element changes from checkpoint to checkpoint: what is added up has none."""
    original = state()
    config = {"delta": {"against": "values"}, "quantize": {"exp_avg_sq": {"method": "exact"}}}
    for name in "012":
        dsq_ckpt.save(original, tmp_path / "run" / name, config=config)
        original["state"]["w"]["exp_avg"] *= 0.9
    with Checkpoint(tmp_path / "run" / "2") as checkpoint:
        record = checkpoint.read_record(checkpoint.find_record("state.w.exp_avg", (0, 0)))
    assert "residual" in record and "root" not in record


def test_groups_of_codes_in_other_units_have_other_names() -> None:
    config = DSQConfig().quantize
    alone = assign("state.w.exp_avg", (64, 96), torch.float32, config)
    measured = assign("state.w.exp_avg", (64, 96), torch.float32, config, None, True)
    assert alone.group != measured.group
    assert (alone.second_moment, measured.second_moment) == (None, "state.w.exp_avg_sq")


@given(st.lists(st.tuples(FLOATS, FLOATS), min_size=1, max_size=50))
def test_roots_there_and_back(pairs: list[tuple[float, float]]) -> None:
    m, v = (np.array(part, np.float32) for part in zip(*pairs, strict=True))
    coded = UpdateFrame("v", torch.from_numpy(v)).coded(torch.from_numpy(m), slice(None)).numpy().copy()
    assert np.isnan(coded[v < 0]).all() and not np.isnan(coded[v >= 0]).any()
    in_units, by_octave = coded.copy(), coded.copy()
    normal = np.isfinite(coded) & (np.abs(m) > 1e-37) & (np.abs(coded) > 1e-37)  # subnormal numbers have fewer bits
    for back, read, place in ((coded, multiply_by_roots, 1), (by_octave, multiply_by_octave_units, 2**0.251)):
        read(back, v)
        assert np.isfinite(back[v >= 0]).all()
        ratio = back[normal].astype(np.float64) / m[normal]
        assert ((ratio > (1 - 3e-7) / place) & (ratio < (1 + 3e-7) * place)).all()
    normal &= v > 1e-37
    np.testing.assert_allclose(in_units[normal], m[normal] / np.sqrt(v[normal].astype(np.float64)), rtol=3e-7)


def test_units_are_roots_of_octaves() -> None:
    exponents = np.arange(255)
    np.testing.assert_allclose(OCTAVE_UNITS[:255].astype(np.float64) ** 2, 2.0 ** (exponents - 126.5), rtol=2e-7)
    assert OCTAVE_UNITS[0] == LEAST_ROOT


def test_differences_are_not_taken_to_values_in_units(tmp_path) -> None:
    """A run whose configuration goes over to differences: what a unit was taken out of is no base for them."""
    original = state()
    dsq_ckpt.save(original, tmp_path / "run" / "0")
    for name in "12":
        config = {"delta": {"against": "values"}, "quantize": {"exp_avg_sq": {"method": "exact"}}}
        dsq_ckpt.save(original, tmp_path / "run" / name, config=config)
        got = restored(tmp_path / "run" / name, original)
        assert error(original["state"]["w"]["exp_avg"], got["exp_avg"]) < 0.3


@pytest.mark.parametrize("square", [
    torch.ones(64, 1), torch.tensor(1.0), torch.ones(96, 64), torch.ones(64, 96, dtype=torch.uint8),
    torch.ones(64, 96).to(torch.float8_e4m3fn),
])
def test_state_of_another_shape_or_without_numbers_measures_nothing(tmp_path, square) -> None:
    """NovoGrad keeps one second moment for a layer, factored optimizers one for a row."""
    original = {"state": {"w": {"exp_avg": moments()["exp_avg"], "exp_avg_sq": square}}}
    dsq_ckpt.save(original, tmp_path / "run" / "0")
    got = {"state": {"w": {name: torch.zeros_like(value) for name, value in original["state"]["w"].items()}}}
    dsq_ckpt.load(got, tmp_path / "run" / "0")
    assert error(original["state"]["w"]["exp_avg"], got["state"]["w"]["exp_avg"]) < 0.5


def test_negative_second_moments_are_kept(tmp_path) -> None:
    original = state()
    original["state"]["w"]["exp_avg_sq"][0] = -1.9 * 2.0**-10
    with pytest.warns(UserWarning, match=r"NaN or Inf: state.w.exp_avg_sq \(of exp_avg_sq, negative values"):
        dsq_ckpt.save(original, tmp_path / "run" / "0")
    got, exact = restored(tmp_path / "run" / "0", original), original["state"]["w"]
    assert torch.equal(got["exp_avg_sq"], exact["exp_avg_sq"])
    assert error(exact["exp_avg"][0], got["exp_avg"][0]) < 0.5 or not exact["exp_avg"][0].any()


def test_moments_that_share_memory_with_others(tmp_path) -> None:
    """What is coded of a second moment is not what is coded of a weight of the same memory."""
    part = moments()
    shared = torch.zeros(64, 96)
    original = {
        "model": {"squares": part["exp_avg_sq"]}, "state": {"w": part, "z": {"exp_avg": shared, "exp_avg_sq": shared}},
    }
    dsq_ckpt.save(original, tmp_path / "run" / "0")
    got = {
        "state": {name: {key: torch.full_like(value, torch.nan) for key, value in of.items()}
                  for name, of in original["state"].items()},
    }
    dsq_ckpt.load(got, tmp_path / "run" / "0")
    assert error(update(part), update(got["state"]["w"])) < 0.25
    assert not got["state"]["z"]["exp_avg"].any() and not got["state"]["z"]["exp_avg_sq"].any()


@pytest.mark.parametrize("name, fit", [
    ("weights", "octaves"), ("momentum", "update"), ("exp_avg", "octaves"), ("exp_avg_sq", "update"),
])
def test_codebooks_of_moments_are_for_these_alone(name, fit) -> None:
    with pytest.raises(dsq_ckpt.ConfigError, match=f"{name}: fit '{fit}' is for exp_avg"):
        DSQConfig.create({"quantize": {name: {"codebook": {"fit": fit}}}})


def test_first_moments_too_large_for_their_units_are_not_called_infinite(tmp_path, recwarn):
    """Each is stored exactly, with a warning that says why; and an error for NaN is none for these."""
    own = moments()
    own["exp_avg"][0, 0], own["exp_avg_sq"][0, 0] = 1e25, 1e-36
    dsq_ckpt.save({"state": {"w": own}}, tmp_path / "a", config={"quantize": {"nonfinite": "error"}})
    [message] = [str(warning.message) for warning in recwarn if "stored exactly" in str(warning.message)]
    assert ": state.w.exp_avg;" in message and "units of Adam's update" in message and "Inf" not in message
    assert torch.equal(restored(tmp_path / "a", {"state": {"w": own}})["exp_avg"], own["exp_avg"])
    own["exp_avg"][1, 1] = float("nan")
    with pytest.warns(UserWarning, match="hold NaN or Inf: state.w.exp_avg;"):
        dsq_ckpt.save({"state": {"w": own}}, tmp_path / "b")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_first_moments_over_second_moments_of_zero_are_kept(tmp_path, dtype) -> None:
    """As after an underflow in float16: the update there is the largest of all."""
    tree = {"state": {"w": {name: value.to(dtype) for name, value in moments().items()}}}
    tree["state"]["w"] = {"exp_avg": torch.randn(64, 96).to(dtype) * 1e-3, "exp_avg_sq": torch.rand(64, 96).to(dtype)}
    tree["state"]["w"]["exp_avg_sq"][::2] = 0
    dsq_ckpt.save(tree, tmp_path / "run" / "0")
    got = restored(tmp_path / "run" / "0", tree)
    assert error(tree["state"]["w"]["exp_avg"][::2].double(), got["exp_avg"][::2].double()) < 0.005
    assert not got["exp_avg_sq"][::2].any()


@pytest.mark.parametrize("size", [1e-60, 1e300])
@pytest.mark.parametrize("name", ["w.weight", "state.w.exp_avg", "state.w.exp_avg_sq"])
@pytest.mark.parametrize("shape", [(64, 96), (30,)])
def test_float64_beyond_float32_is_stored_exactly(tmp_path, recwarn, size: float, name: str, shape) -> None:
    value = torch.rand(shape, dtype=torch.float64) * size
    if name == "w.weight":
        value[0] *= -1
    other = torch.rand(shape, dtype=torch.float64)
    original = {name: value, "state.w.exp_avg_sq" if name.endswith("avg") else "other": other}
    dsq_ckpt.save(original, tmp_path / "0")
    got = {key: torch.zeros_like(tensor) for key, tensor in original.items()}
    dsq_ckpt.load(got, tmp_path / "0")
    assert torch.equal(got[name], value)
    messages = [str(warning.message) for warning in recwarn]
    assert len(shape) == 1 or any(name in text and "float32" in text for text in messages), messages


def test_tensors_of_subnormal_numbers_are_stored_exactly(tmp_path, recwarn) -> None:
    """All would be zeros; where there are normal numbers beside them, these decide what is small."""
    names = ["w.weight", "state.u.exp_avg", "state.w.exp_avg_sq", "state.w.momentum_buffer"]
    original = {name: torch.rand(64, 96) * 1e-40 for name in names}
    original |= {f"other.{name}": torch.rand(64, 96) for name in names} | {"zeros.weight": torch.zeros(64, 96)}
    original["mixed.weight"] = torch.cat([torch.rand(32, 96), torch.rand(32, 96) * 1e-40])
    for name, value in original.items():
        value[0] *= -1 if name.endswith("weight") else 1
    warnings.simplefilter("always")  # else a line says it once
    for number in range(2):
        dsq_ckpt.save(original, tmp_path / "run" / str(number))
        got = {key: torch.ones_like(tensor) for key, tensor in original.items()}
        dsq_ckpt.load(got, tmp_path / "run" / str(number))
        assert all(torch.equal(got[name], original[name]) for name in names)
        assert not got["zeros.weight"].any() and not torch.equal(got["mixed.weight"], original["mixed.weight"])
        [message] = [str(warning.message) for warning in recwarn if "stored exactly" in str(warning.message)]
        assert all(name in message for name in names) and "4 tensor(s)" in message
        recwarn.clear()


def test_the_error_of_fixed_bits_is_told_along_a_chain_too(tmp_path) -> None:
    """Small updates lie far below the cells; the window of the next sketch has to resolve them all the same."""
    config = {"quantize": {"exp_avg": {"codebook": {"fit": "update", "error": 0}, "refinement_bits": 8}}}
    for name in "01":
        original = state()
        original["state"]["w"]["exp_avg"] *= 0.2
        dsq_ckpt.save(original, tmp_path / "run" / name, config=config)
    told = Manifest.read(tmp_path / "run" / "1").groups["exp_avg/linear/update"].update_error
    exact, got = update(original["state"]["w"]), update(restored(tmp_path / "run" / "1", original))
    assert error(exact, got) == pytest.approx(told, rel=0.15)
