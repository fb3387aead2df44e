"""What every example of the gallery must do, checked while it runs: names that ``conf.py`` gives sphinx-gallery."""

import re
import warnings
from pathlib import Path

import matplotlib.pyplot as plt
from sphinx.errors import ExtensionError
from sphinx_gallery.scrapers import matplotlib_scraper


def checked_figures(block, block_vars, gallery_conf, **options):
    """Save the figures of a block, which must have labels and curves of more than one point."""
    for number in plt.get_fignums():
        for axes in plt.figure(number).axes:
            assert axes.get_xlabel() or axes.get_ylabel(), "axes without a label"
            assert all(len(line.get_xdata()) > 1 for line in axes.lines), "a curve of one point shows nothing"
    return matplotlib_scraper(block, block_vars, gallery_conf, **options)


def warnings_are_errors(gallery_conf, example):
    """Let warnings of the next example end it; without a display plt.show() has one that is none of its own."""
    warnings.resetwarnings()
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", message="FigureCanvasAgg is non-interactive")


def every_example_draws_and_prints(app, error):
    """End a build of which an example that was run has no figure or no output on its page."""
    options = app.config.sphinx_gallery_conf
    if error is not None or not options["plot_gallery"]:
        return
    for page in sorted(Path(app.srcdir, "gallery").glob("plot_*.rst")):
        text = page.read_text(encoding="utf-8")
        missing = [mark for mark in ("image-sg::", "sphx-glr-script-out") if mark not in text]
        if missing and re.search(options["filename_pattern"], page.as_posix()):
            raise ExtensionError(f"{page.stem} has no figure or no output: no {' and no '.join(missing)} on its page")
