"""Figures of solutions and of explanations; needs the extra ``plot``."""

from .common import new_figure, require_matplotlib, save_figure
from .explanations import plot_patch_map, plot_token_curve, plot_token_text
from .solutions import plot_attention_map, plot_convergence, plot_path, plot_token_norms

__all__ = [
    "new_figure",
    "plot_attention_map",
    "plot_convergence",
    "plot_patch_map",
    "plot_path",
    "plot_token_curve",
    "plot_token_norms",
    "plot_token_text",
    "require_matplotlib",
    "save_figure",
]
