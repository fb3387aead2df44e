"""Figures of solutions: what stays readable where there is much to draw."""

from itertools import pairwise

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from matplotlib.colors import to_rgb

from convexformer import ConvexAttentionRegressor, ConvexProbeRegressor
from convexformer.plot import (
    new_figure,
    plot_attention_map,
    plot_convergence,
    plot_patch_map,
    plot_path,
    plot_token_norms,
    plot_token_text,
    save_figure,
)
from convexformer.preprocessing import MeanPooling, TokenGates

rng = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def no_display():
    matplotlib.use("Agg")
    yield
    plt.close("all")


@pytest.mark.parametrize(("side", "n_written"), [(8, 64), (24, 0)])
def test_numbers_and_ticks_of_patches_do_not_cover_each_other(side, n_written):
    axes = plot_token_norms(rng.uniform(size=side**2), shape=(side, side))
    axes.figure.draw_without_rendering()
    assert len(axes.texts) == n_written
    ticks = [label.get_window_extent() for label in axes.get_xticklabels() if label.get_text()]
    written = [text.get_window_extent() for text in axes.texts[:side]]
    for row in (ticks, written):
        assert all(left.x1 < right.x0 for left, right in pairwise(row))


def test_numbers_are_written_in_their_patches_and_stand_out():
    norms = np.arange(6.0)
    axes = plot_token_norms(norms, shape=(2, 3))
    assert [text.get_position() for text in axes.texts] == [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1)]
    (image,) = axes.images
    for text, color in zip(axes.texts, image.to_rgba(norms), strict=True):
        assert abs(np.dot(np.subtract(to_rgb(text.get_color()), color[:3]), (0.299, 0.587, 0.114))) > 0.4
    assert not plot_token_norms(np.ones(40), shape=(2, 20)).texts


def test_maps_begin_at_the_first_position():
    (image,) = plot_attention_map(rng.uniform(size=(2, 3)), first=1).images
    assert image.get_extent() == [0.5, 3.5, 2.5, 0.5]


@pytest.mark.parametrize("shape", [(1, 300), (300, 2), (3, 4)])
def test_maps_are_wide_enough_to_be_seen(shape):
    axes = plot_attention_map(rng.uniform(size=shape))
    axes.figure.draw_without_rendering()
    box = axes.get_window_extent()
    assert 1 / 3 < box.width / box.height < 3


@pytest.mark.parametrize("labels", [[f"method {k}" for k in range(40)], ["x" * 300]])
def test_a_large_legend_leaves_room_for_the_curves(labels):
    axes = plot_convergence({label: ([0.1, 0.2], [3.0, 2.5]) for label in labels}, bound=1.0)
    axes.figure.draw_without_rendering()
    assert axes.get_window_extent().width > 0.5 * axes.figure.bbox.width


@pytest.mark.parametrize("objective", [[1.0, np.inf], [np.nan, 1.0, np.inf]])
def test_the_only_finite_point_of_a_run_that_diverged_is_seen(objective):
    axes = plot_convergence({"Adam": (np.arange(1.0, 1 + len(objective)), objective)}, bound=0.25)
    (line,) = axes.lines
    assert (line.get_ydata().tolist(), line.get_marker()) == ([0.75], "o")


def test_curves_of_a_family_share_a_colour_and_points_at_the_bound_or_at_once_have_logarithms():
    curves = {name: ([0.0, 1.0], [2.0, 0.25]) for name in ("Adam: 0.1", "Adam: 0.01", "ours")}
    axes = plot_convergence(curves, bound=0.25)
    one, same, other = (line.get_color() for line in axes.lines)
    assert one == same != other
    for line in axes.lines:
        assert np.isfinite(np.log(line.get_xydata())).all()


def test_a_curve_without_a_finite_point_is_refused():
    with pytest.raises(ValueError, match="at least one finite"):
        plot_convergence({"Adam": ([1.0, np.nan], [np.inf, 1.0])}, bound=0.25)


def test_figures_are_closed_once_they_are_on_disk(tmp_path):
    figure, _ = new_figure(1, 1, figsize=(2.0, 2.0))
    assert plt.fignum_exists(figure.number)
    save_figure(figure, tmp_path / "figure.png")
    assert not plt.fignum_exists(figure.number)


def test_only_a_figure_is_saved(tmp_path):
    axes = plot_token_norms([1.0])
    with pytest.raises(TypeError, match=r"figure must be a matplotlib figure, as axes\.figure, got Axes"):
        save_figure(axes, tmp_path / "figure.png")


def test_bars_of_a_solution_that_reads_nothing_begin_at_zero():
    axes = plot_token_norms(np.zeros(3))
    low, high = axes.get_ylim()
    assert low == 0 < high


def test_signs_without_a_letter_are_written_as_python_does():
    axes = plot_token_text([0.1, 0.2], ["a\tb", "\x00"])
    assert [text.get_text() for text in axes.texts] == ["a\\tb", "\\x00"]
    axes.figure.canvas.draw()


def test_tensors_with_gradients_are_drawn():
    values = torch.rand(4, requires_grad=True)
    np.testing.assert_array_equal(plot_patch_map(values, (2, 2)).images[0].get_array().ravel(), values.detach())
    assert [bar.get_height() for bar in plot_token_norms(values).patches] == values.tolist()


# Paths

X = rng.normal(size=(60, 5, 3))
Y = X[:, 2, 0] - 0.5 * X[:, 4, 1]


def test_lines_of_a_path_are_the_norms_of_its_coefficients():
    path = ConvexAttentionRegressor().path(X, Y, n_alphas=6)
    axes = plot_path(path, alpha=0.05)
    *lines, chosen = axes.lines
    np.testing.assert_array_equal([line.get_xdata() for line in lines], [path.alphas] * 5)
    np.testing.assert_allclose(np.transpose([line.get_ydata() for line in lines]), np.linalg.norm(path.coefs, axis=2))
    assert list(chosen.get_xdata()) == [0.05, 0.05]
    left, right = axes.get_xlim()
    assert (left > right, axes.get_xscale()) == (True, "log")
    names = [text.get_text() for text in axes.get_legend().texts]
    assert (names[:2], names[-1]) == (["token 2", "token 4"], "alpha = 0.05")
    assert plot_path(path, ax=axes) is axes  # the axis still runs to the right
    assert axes.get_xlim()[0] > axes.get_xlim()[1]


def test_many_weightings_have_the_largest_named_beside_the_lines():
    path = ConvexProbeRegressor(dictionary=[MeanPooling(), TokenGates(160)], random_state=0).path(X, abs(Y), n_alphas=6)
    axes = plot_path(path)
    assert len(axes.lines) == 161
    axes.figure.draw_without_rendering()
    most = path.weighting_norms.max(0)
    named = [f"weighting {j}" for j in np.argsort(-most)[:9]]
    assert [text.get_text() for text in axes.get_legend().texts] == named
    colors = [line.get_color() for line in axes.get_legend().get_lines()]
    assert len({*colors, "0.8"}) == 10
    assert colors == [axes.lines[int(name.split()[1])].get_color() for name in named]
    assert axes.get_legend().get_window_extent().x0 >= axes.get_window_extent().x1
    assert axes.get_window_extent().width > 0.5 * axes.figure.bbox.width


def test_a_path_of_one_alpha_or_without_a_token_in_use_is_drawn():
    model = ConvexAttentionRegressor()
    (line, *_) = plot_path(model.path(X, Y, alphas=[0.1])).lines
    assert line.get_marker() == "o"
    axes = plot_path(model.path(X, Y, alphas=[1e3, 1e4]))
    assert axes.get_legend() is None
    assert axes.get_ylim()[0] == 0 < axes.get_ylim()[1]
    with pytest.raises(TypeError, match=r"path must be what path\(X, y\) of an estimator returns, got ndarray"):
        plot_path(np.ones((3, 3)))
    for alpha in (0.0, np.inf, "0.1"):
        with pytest.raises(ValueError, match=rf"alpha must be a positive finite number, got '?{alpha}"):
            plot_path(model.path(X, Y, alphas=[0.1]), alpha=alpha)
