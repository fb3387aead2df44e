"""Figures of explanations: what is drawn where, on which scale, and what cannot be drawn."""

import datetime
from itertools import pairwise

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.colors import to_rgb

from convexformer.plot import plot_patch_map, plot_token_curve, plot_token_text
from convexformer.probes import Explanation

rng = np.random.default_rng(0)
VALUES = np.array([0.2, -0.5, 0.0, 0.3])
BRIGHTNESS = (0.299, 0.587, 0.114)


@pytest.fixture(autouse=True)
def no_display():
    matplotlib.use("Agg")
    yield
    plt.close("all")


def texts(axes):
    return [text.get_text() for text in axes.texts]


def box_color(text):
    return text.get_bbox_patch().get_facecolor()


def boxes(axes):
    """Boxes of the words, in pixels."""
    axes.figure.draw_without_rendering()
    return [text.get_bbox_patch().get_window_extent() for text in axes.texts]


class TestText:
    def test_each_word_is_drawn_on_the_colour_of_its_contribution(self):
        axes = plot_token_text(VALUES, ["a", "b", "c", "d"], title="score 0")
        assert texts(axes) == ["a", "b", "c", "d"]
        assert axes.get_title() == "score 0"
        bar = axes.figure.axes[1]
        assert bar.get_xlim() == (-0.5, 0.5)
        assert bar.get_xlabel() == "contribution to the score"
        scale = plt.get_cmap("RdBu_r")
        for text, value in zip(axes.texts, VALUES, strict=True):
            assert text.get_bbox_patch().get_facecolor() == scale(value + 0.5)

    def test_words_stand_out_from_their_colours(self):
        axes = plot_token_text(np.linspace(-1, 1, 21), ["word"] * 21)
        for text in axes.texts:
            ink, ground = (np.dot(to_rgb(color), BRIGHTNESS) for color in (text.get_color(), box_color(text)))
            assert abs(ink - ground) >= 0.5

    def test_a_word_that_is_wider_than_the_axes_has_no_empty_line_before_it(self):
        long, short = (plot_token_text([0.1, 0.2], [word, "end"]) for word in ("long" * 50, "end"))
        assert long.texts[0].xyann == short.texts[0].xyann
        assert long.texts[1].xyann[1] < short.texts[1].xyann[1]

    def test_zeros_have_a_symmetric_scale(self):
        axes = plot_token_text([0.0, 0.0], ["a", "b"])
        assert axes.figure.axes[1].get_xlim() == (-1.0, 1.0)

    @pytest.mark.parametrize(
        "words", [["run", "##ning", "dogs"], ["Ġrun", "ning", "Ġdogs"], ["\u2581run", "ning", "\u2581dogs"]]
    )
    def test_word_pieces_are_joined(self, words):
        axes = plot_token_text([0.1, 0.2, 0.3], words)
        assert texts(axes) == ["run", "ning", "dogs"]
        run, ning, dogs = boxes(axes)
        assert ning.x0 <= run.x1
        assert dogs.x0 > ning.x1

    def test_nothing_is_read_as_mathematics(self):
        words = ["$", "x_1$", "\\frac", "^", "%", "{", "##", "", "a\nb"]
        axes = plot_token_text(np.ones(9), words)
        assert texts(axes) == ["$", "x_1$", "\\frac", "^", "%", "{", "##", "\u2423", "a\\nb"]
        axes.figure.canvas.draw()

    @pytest.mark.parametrize("given", [False, True])
    def test_many_words_stay_within_the_axes(self, given):
        ax = plt.subplots(1, 2, figsize=(9, 3), layout="constrained")[1][1] if given else None
        axes = plot_token_text(rng.normal(size=120), ["word", "##piece", "and"] * 40, ax=ax)
        drawn = boxes(axes)
        room = axes.get_window_extent()
        assert len({round(box.y0) for box in drawn}) > 5
        for box in drawn:
            assert room.x0 - 1 <= box.x0
            assert box.x1 <= room.x1 + 3
            assert room.y0 - 1 <= box.y0
            assert box.y1 <= room.y1 + 1
        for first, second in pairwise(drawn):
            assert second.x0 > first.x0 or second.y1 <= first.y0 + 1

    def test_subfigures(self):
        part = plt.figure(figsize=(8, 4)).subfigures(1, 2)[0]
        assert len(plot_token_text(VALUES, list("abcd"), ax=part.subplots()).texts) == 4


class TestPatches:
    def test_the_map_holds_the_contributions(self):
        values = rng.normal(size=6)
        axes = plot_patch_map(values, (2, 3))
        (image,) = axes.images
        np.testing.assert_array_equal(image.get_array(), values.reshape(2, 3))
        assert image.get_clim() == (-abs(values).max(), abs(values).max())

    def test_the_image_lies_behind_in_the_same_place(self):
        picture, shown = plot_patch_map(VALUES, (2, 2), image=np.eye(8)).images
        assert picture.get_extent() == shown.get_extent() == [-0.5, 1.5, 1.5, -0.5]
        np.testing.assert_array_equal(picture.get_array(), np.eye(8))
        np.testing.assert_allclose(shown.get_alpha(), 0.8 * np.array([[0.4, 1.0], [0.0, 0.6]]))

    @pytest.mark.parametrize("image", [np.eye(8), np.full((8, 8), 3.0)])
    def test_the_image_is_pale(self, image):
        picture = plot_patch_map(VALUES, (2, 2), image=image).images[0]
        shades = picture.norm(image)
        assert shades.min() >= 0.5
        assert (shades.max() > shades.min()) == (np.ptp(image) > 0)

    def test_all_zero(self):
        axes = plot_patch_map(np.zeros(4), (2, 2), image=np.zeros((4, 4)))
        assert axes.images[1].get_clim() == (-1.0, 1.0)
        axes.figure.canvas.draw()


class TestCurve:
    def test_contributions_over_time(self):
        axes = plot_token_curve(VALUES, times=[1, 3, 5, 9])
        np.testing.assert_array_equal(axes.lines[0].get_xydata(), np.column_stack([[1, 3, 5, 9], VALUES]))
        assert axes.get_ylim()[0] == -axes.get_ylim()[1]
        assert axes.get_ylim()[1] > abs(VALUES).max()
        assert axes.figure.axes == [axes]

    def test_what_adds_is_filled_in_red_and_what_takes_in_blue(self):
        red, blue = plot_token_curve(VALUES).collections
        for filled, sign, name in ((red, 1, "red"), (blue, -1, "blue")):
            np.testing.assert_array_equal(filled.get_facecolor()[0, :3], to_rgb(f"tab:{name}"))
            heights = sign * np.concatenate([path.vertices[:, 1] for path in filled.get_paths()])
            assert heights.min() == pytest.approx(0, abs=1e-12)
            assert heights.max() == (sign * VALUES).max()

    def test_times_may_be_dates_of_python(self):
        days = [datetime.date(2020, 1, 1), *(datetime.datetime(2020, 1, day, 6) for day in (2, 4, 7))]
        axes, wanted = plot_token_curve(VALUES, times=days), np.array(days, dtype="datetime64[us]")
        np.testing.assert_array_equal(axes.lines[0].get_xdata(), wanted)
        axes.figure.canvas.draw()

    @pytest.mark.parametrize(("steps", "at"), [(4, [2, 4, 6, 8]), (10, np.arange(10))])
    def test_the_series_lies_behind_on_its_own_axis(self, steps, at):
        axes = plot_token_curve(VALUES, series=rng.normal(size=(steps, 2)), times=[2, 4, 6, 8])
        behind = axes.figure.axes[1]
        assert len(behind.lines) == 2
        np.testing.assert_array_equal(behind.lines[0].get_xdata(), at)
        assert axes.get_zorder() > behind.get_zorder()

    def test_one_token_is_seen(self):
        axes = plot_token_curve([0.5], series=[2.0])
        assert axes.lines[0].get_marker() == "."
        assert axes.figure.axes[1].lines[0].get_marker() == "o"


def test_explanations_draw_one_score():
    explanation = Explanation([rng.normal(size=(4, 2))], np.zeros(2), np.array(["cat", "dog"]))
    own = explanation.contributions[0][:, 1]
    np.testing.assert_array_equal(explanation.plot_series(0, "dog").lines[0].get_ydata(), own)
    np.testing.assert_array_equal(explanation.plot_patches(0, (2, 2), "dog").images[0].get_array().ravel(), own)
    assert len(explanation.plot_text(0, list("abcd"), "dog", title="t").texts) == 4
    for axes in (
        explanation.plot_series(0, title="t"),
        explanation.plot_patches(0, (2, 2), title="t"),
        explanation.plot_text(0, list("abcd"), title="t"),
    ):
        assert axes.get_title() == "t"


@pytest.mark.parametrize(
    ("draw", "kind", "message"),
    [
        (lambda: plot_token_text(VALUES, "abcd"), TypeError, "words must be a sequence of str, .* got one str"),
        (lambda: plot_token_text(VALUES, ["a", "b", "c", 4]), TypeError, "words must hold str, .* got int"),
        (lambda: plot_token_text(VALUES, ["a"]), ValueError, "each of the 4 contributions, got 1; give the tokens"),
        (lambda: plot_token_text(np.ones((2, 2)), ["a"]), ValueError, r"contributions must have shape \(n_tokens,\)"),
        (lambda: plot_token_text([], []), ValueError, r"contributions must have shape \(n_tokens,\), got \(0,\)"),
        (lambda: plot_token_text("a", ["a"]), ValueError, "contributions must be numbers"),
        (lambda: plot_token_text([np.nan], ["a"]), ValueError, "contributions must not be NaN or infinite"),
        (
            lambda: plot_patch_map(VALUES, (2, 3)),
            ValueError,
            r"grid must be the rows .* of 4 patches, got \(2, 3",
        ),
        (lambda: plot_patch_map(VALUES, (2.0, 2.0)), ValueError, r"grid must be the rows .* got \(2\.0, 2\.0"),
        (lambda: plot_patch_map(VALUES, np.eye(99)), ValueError, r"of 4 patches, got array\((?s:.){1,80}; leave out"),
        (lambda: plot_patch_map(VALUES, 4), ValueError, "grid must be the rows and columns of 4 patches, got 4"),
        (lambda: plot_patch_map(VALUES, (2, 2), image=np.ones((4, 4, 3))), ValueError, "image must be grey"),
        (lambda: plot_token_curve(VALUES, times=[1, 2]), ValueError, r"times must have shape \(4,\)"),
        (lambda: plot_token_curve(VALUES, times=[1, 2, 2, 3]), ValueError, "times must increase"),
        (lambda: plot_token_curve(VALUES, series=np.ones(9)), ValueError, "series has 9 steps .* give times="),
        (lambda: plot_token_curve(VALUES, series=1.0), ValueError, "series must have shape"),
        (lambda: plot_token_curve(VALUES, series=np.ones((4, 0))), ValueError, "series must have shape"),
        (lambda: plot_token_curve(VALUES, series="a"), ValueError, "series must be numbers"),
        (lambda: plot_token_curve(VALUES, times=[1, 2, 3, None]), ValueError, "times must be finite numbers or dates"),
        (lambda: plot_token_curve(VALUES, times=list("abcd")), ValueError, "times must be finite numbers or dates"),
        (
            lambda: plot_token_curve(VALUES, times=np.arange(4).astype("timedelta64[h]")),
            ValueError,
            "times must be finite numbers or dates",
        ),
        (
            lambda: plot_token_curve(VALUES, series=np.ones(9), times=np.arange(4).astype("datetime64[D]")),
            ValueError,
            "times must be numbers of steps, not dates",
        ),
        (
            lambda: plot_token_curve(np.ma.masked_equal([1.0, 2.0], 2)),
            ValueError,
            "contributions must have no masked values",
        ),
        (lambda: plot_patch_map(VALUES, (2, 2), image=[[np.inf]]), ValueError, "image must not be NaN or infinite"),
        (lambda: plot_patch_map(VALUES, (2, 2), image="a"), ValueError, "image must be numbers"),
    ],
)
def test_errors_name_what_cannot_be_drawn(draw, kind, message):
    with pytest.raises(kind, match=message):
        draw()
    assert plt.get_fignums() == []
