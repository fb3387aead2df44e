"""Figures of solutions: what stays readable where there is much to draw."""

from itertools import pairwise

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch

from convexformer.plot import plot_attention_map, plot_convergence, plot_patch_map, plot_token_norms, plot_token_text

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
