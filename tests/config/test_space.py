"""The configuration cube: points, what they set, and what is closest to a configuration."""

import math

import pytest

from dsq_ckpt.config.schema import DSQConfig
from dsq_ckpt.search import Axis, Space, Variant

WEIGHTS, EMBEDDING = "quantize.weights.codebook.bins", "quantize.groups.embedding.codebook.bins"
BINS = Axis("bins", (WEIGHTS, EMBEDDING), (4, 6, 8, 12, 16, 32))
PROTECT = Axis("protect", ("quantize.weights.codebook.protect",), (0.0005, 0.005, 0.01))
FIXED = Axis("refinement", ("quantize.weights.refinement_bits",), (4,))
MAGNITUDE = Variant("magnitude", {"quantize.weights.codebook.sigma": 0.2})
FREQUENCY = Variant("frequency", {"quantize.weights.codebook.sigma": 1.0})
SPACE = Space((BINS, PROTECT, FIXED), (MAGNITUDE, FREQUENCY))


def test_points_are_those_contained_from_aggressive_to_conservative():
    points = list(SPACE.points())
    assert SPACE.shape == (6, 3, 1)
    assert len(set(points)) == len(points) == 18
    assert points == sorted(points)
    assert points[0] == (0, 0, 0) and points[-1] == SPACE.most_conservative == (5, 2, 0)
    assert all(point in SPACE for point in points)


@pytest.mark.parametrize("point", [(6, 0, 0), (0, 0, 1), (-1, 0, 0), (0, 0), (0, 0, 0, 0), (0.5, 0, 0), [0, 0], None])
def test_invalid_points_are_refused(point):
    assert point not in SPACE
    with pytest.raises(ValueError, match="is no point of a space of shape"):
        SPACE.values(point, MAGNITUDE)
    with pytest.raises(ValueError, match="is no point of a space of shape"):
        SPACE.describe(point, MAGNITUDE)


def test_values_by_key_and_by_name():
    assert SPACE.values((2, 1, 0), FREQUENCY) == {
        WEIGHTS: 8,
        EMBEDDING: 8,
        "quantize.weights.codebook.protect": 0.005,
        "quantize.weights.refinement_bits": 4,
        "quantize.weights.codebook.sigma": 1.0,
    }
    named = {"variant": "frequency", "bins": 8, "protect": 0.005, "refinement": 4}
    assert SPACE.describe((2, 1, 0), FREQUENCY) == named


def test_a_configuration_takes_the_values():
    space = Space((Axis("step", ("quantize.weights.codebook.step",), (1.0, 0.5)),))
    config = DSQConfig().with_values(**space.values((0,), space.variants[0]))
    assert config.quantize.weights.codebook.step == 1.0


@pytest.mark.parametrize("variant", SPACE.variants)
def test_nearest_inverts_values(variant):
    for point in SPACE.points():
        assert SPACE.nearest(SPACE.values(point, variant)) == point


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, SPACE.most_conservative),
        ({"some.other.key": 4}, SPACE.most_conservative),
        ({WEIGHTS: 9}, (2, 2, 0)),
        ({WEIGHTS: 7}, (2, 2, 0)),  # 6 and 8 are as close: the more conservative
        ({WEIGHTS: 1000, "quantize.weights.codebook.protect": 0}, (5, 0, 0)),
        ({WEIGHTS: -math.inf}, (5, 2, 0)),  # equally far from all
        ({WEIGHTS: math.nan}, (5, 2, 0)),
        ({WEIGHTS: "many"}, (5, 2, 0)),
        # Two keys of one axis that differ: least total difference, 10 for anything between; of those the last.
        ({WEIGHTS: 6, EMBEDDING: 16}, (4, 2, 0)),
        ({WEIGHTS: 6, EMBEDDING: 6}, (1, 2, 0)),
    ],
)
def test_nearest(values, expected):
    assert SPACE.nearest(values) == expected


def test_nearest_of_words_is_by_equality():
    space = Space((Axis("method", ("method",), ("quantize", "bf16", "exact")),))
    assert space.nearest({"method": "bf16"}) == (1,)
    assert space.nearest({"method": "zfp"}) == (2,)
    assert space.nearest({"method": None}) == (2,)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Axis("bins", ("a",), ()), "axis 'bins' has no values"),
        (lambda: Axis("bins", (), (1,)), "axis 'bins' sets no configuration key"),
        (lambda: Axis("bins", ("a", "a"), (1,)), "axis 'bins': configuration key 'a' is given twice"),
        (lambda: Space(()), "at least one axis"),
        (lambda: Space((BINS,), ()), "at least one variant"),
        (lambda: Space((BINS, Axis("bins", ("a",), (1,)))), "axis 'bins' is given twice"),
        (lambda: Space((Axis("variant", ("a",), (1,)),)), "axis 'variant' is given twice"),
        (lambda: Space((BINS,), (MAGNITUDE, Variant("magnitude"))), "variant 'magnitude' is given twice"),
        (lambda: Space((BINS, Axis("other", (EMBEDDING,), (1,)))), f"key '{EMBEDDING}' is given twice"),
        (lambda: Space((BINS,), (Variant("v", {WEIGHTS: 1}),)), f"variant 'v': configuration key '{WEIGHTS}'"),
    ],
)
def test_errors(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_spaces_are_values():
    assert Space((BINS,)) == Space((BINS,))
    assert hash(SPACE) == hash(Space((BINS, PROTECT, FIXED), (MAGNITUDE, FREQUENCY)))
