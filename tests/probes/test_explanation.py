"""Which score an explanation shows, and of which sample."""

import numpy as np
import pytest
import torch

from convexformer.probes import Explanation

FIRST, LAST = np.array([1.0, -0.5]), np.array([0.5, 2.0, 1.0])


@pytest.mark.parametrize("classes", [None, np.array(["no", "yes"])])
def test_one_score_is_that_of_the_last_class(classes):
    explanation = Explanation([FIRST, LAST], 0.25, classes)
    name = 0 if classes is None else "yes"
    for output in (None, name):
        np.testing.assert_array_equal(explanation.of(0, output), FIRST)
    if classes is not None:
        np.testing.assert_array_equal(explanation.of(0, "no"), -FIRST)
    with pytest.raises(ValueError, match=r"output must be one of \[.*\], got 1"):
        explanation.of(0, 1)


def test_several_outputs_go_by_position_and_the_largest_score_counts_the_baseline():
    contributions = np.array([[1.0, 0.0], [0.0, 0.5], [0.0, 0.0]])
    explanation = Explanation([contributions], np.array([0.0, 2.0]))
    for output in (None, 1):
        np.testing.assert_array_equal(explanation.of(0, output), contributions[:, 1])
    np.testing.assert_array_equal(explanation.of(0, 0), contributions[:, 0])
    with pytest.raises(ValueError, match=r"output must be one of \[0, 1\], got 2"):
        explanation.of(0, 2)


def test_samples_go_by_position_from_either_end():
    explanation = Explanation([FIRST, LAST], 0.25)
    for sample, found in ((0, FIRST), (-2, FIRST), (1, LAST), (-1, LAST)):
        np.testing.assert_array_equal(explanation.of(sample), found)
    for sample in (2, -3, 0.0, "a"):
        with pytest.raises(IndexError, match=f"sample must be the position of one of the 2 samples, got {sample!r}"):
            explanation.of(sample)


@pytest.mark.parametrize("baseline", [0.25, np.array([0.0, 2.0])])
def test_an_array_is_no_score(baseline):
    contributions = FIRST if np.ndim(baseline) == 0 else np.stack([FIRST, FIRST], axis=1)
    explanation = Explanation([contributions], baseline, np.array([0, 1]))
    for output in (np.arange(2), np.array([1]), torch.arange(2)):
        for draw, *given in (
            (explanation.of,),
            (explanation.plot_series,),  # which takes no times or values
            (explanation.plot_text, ["a", "b"]),
            (explanation.plot_patches, (1, 2)),
        ):
            with pytest.raises(ValueError, match=r"output must be one of \[0, 1\], got (array|tensor)"):
                draw(0, *given, output)
