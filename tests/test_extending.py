"""The pages on extending the package: their code runs as printed, within its line budget, and their tables are true."""

import ast
import doctest
import re
import subprocess
import sys
import types
from pathlib import Path

import matplotlib
import pytest

from convexformer import solvers
from convexformer.experiments.grokking import methods
from convexformer.gates import GATE_SOURCES

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs" / "extending"
PAGES = {page.stem: page.read_text(encoding="utf-8") for page in sorted(FOLDER.glob("*.md"))}
INDEX = PAGES.pop("index")
# Lines at most of each block of code without prompts, blank ones not counted: what goes into a file.
BUDGETS = {
    "loss": [20],
    "penalty": [25],
    "solver": [20, 10],
    "gates": [20],
    "experiment": [12],
    "estimator": [35],
}
EACH_PAGE = pytest.mark.parametrize("name", PAGES)


def blocks(page):
    return re.findall(r"```python\n(.*?)```", page, re.DOTALL)


def is_session(block):
    return block.startswith(">>>")


class AlikeChecker(doctest.OutputChecker):
    """The last digits of numbers go by the processor's rounding."""

    NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[+-]?\d+)?")

    def check_output(self, want, got, optionflags):
        pairs = zip(self.NUMBER.findall(want), self.NUMBER.findall(got), strict=False)
        alike = all(float(left) == pytest.approx(float(right), rel=1e-2, abs=2e-5) for left, right in pairs)
        return alike and super().check_output(self.NUMBER.sub("#", want), self.NUMBER.sub("#", got), optionflags)


@pytest.fixture
def page_module(monkeypatch):
    """An importable module for the code of a page; registries are what they were afterwards."""
    matplotlib.use("Agg")
    module = types.ModuleType("page_on_extending")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # pickles look classes up by their module
    monkeypatch.setattr(methods, "METHODS", methods.METHODS)
    registries = (solvers.LOSSES, solvers.PENALTIES, solvers.SOLVERS, GATE_SOURCES)
    before = [dict(registry) for registry in registries]
    yield module
    for registry, entries in zip(registries, before, strict=True):
        registry.clear()
        registry.update(entries)


@EACH_PAGE
def test_code_runs_and_prints_what_the_page_says(name, page_module, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = vars(page_module)
    for block in blocks(PAGES[name]):
        if not is_session(block):
            exec(compile(block, f"{name}.md", "exec"), names)
            continue
        test = doctest.DocTestParser().get_doctest(block, names, f"{name}.md", None, None)
        said = []
        failed = doctest.DocTestRunner(AlikeChecker()).run(test, out=said.append, clear_globs=False).failed
        assert not failed, "".join(said)
        names.update(test.globs)


@EACH_PAGE
def test_code_is_short(name):
    files = [block for block in blocks(PAGES[name]) if not is_session(block)]
    lengths = [len(nonblank(block)) for block in files]
    assert len(lengths) == len(BUDGETS[name])
    assert all(length <= budget for length, budget in zip(lengths, BUDGETS[name], strict=True)), lengths


@EACH_PAGE
def test_text_is_short(name):
    text = re.sub(r"```.*?```", "", PAGES[name], flags=re.DOTALL)
    assert 150 <= len(re.findall(r"\w[^\s|]*", text)) <= 400


@EACH_PAGE
def test_code_keeps_the_rules_of_the_package(name):
    parts = []
    for block in blocks(PAGES[name]):
        examples = doctest.DocTestParser().get_examples(block)
        code = "".join(example.source for example in examples) if is_session(block) else block
        parts.append(ruff("format", source=code))
        if is_session(block):  # has no blank lines
            assert nonblank(parts[-1]) == nonblank(code)
        else:
            assert parts[-1] == code
            ruff("check", "--select", "I", source=code)
    # Values of expressions are printed; imports of sessions are not apart.
    ruff("check", "--ignore", "B015,B018,I001", source="\n".join(parts))


def nonblank(code):
    return [line for line in code.splitlines() if line.strip()]


def ruff(*command, source):
    """What ruff says of code as of an example of the package."""
    pytest.importorskip("ruff")
    call = [sys.executable, "-m", "ruff", *command, "--stdin-filename", "examples/page.py", "-"]
    done = subprocess.run(call, input=source, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# Tables of the index

PACKAGES = (ROOT / "solvers" / "convexformer_solvers", ROOT / "convexformer")
CHECKS = {"Gates", "run_grokking", "check_estimator"} | {name for name in solvers.__all__ if name.startswith("check_")}


def tables(first):
    """Rows of each table of the index with this first heading, as lists of cells."""
    found = re.findall(rf"^\| {first} \|.*\n\|[-|]*\|\n((?:\|.*\n)*)", INDEX, re.MULTILINE)
    return [[row.strip("| ").split(" | ") for row in table.splitlines()] for table in found]


def code(cell):
    return re.findall(r"`([^`]+)`", cell)


def test_every_page_has_its_budget_and_is_in_the_index():
    assert set(PAGES) == set(BUDGETS)
    (tree,) = re.findall(r"```\{toctree\}\n.*?\n\n(.*?)```", INDEX, re.DOTALL)
    assert tree.split() == list(BUDGETS)
    assert [name for name in BUDGETS if f"({name}.md)" not in INDEX] == []


def test_folders_registries_and_checks_of_additions_are_there():
    for package, rows in zip(PACKAGES, tables("addition"), strict=True):
        for addition, file, registry, check, _ in rows:
            assert (package / code(file)[0]).parent.is_dir(), addition
            assert code(check)[0] in CHECKS, addition
            if registry != "none":
                name, holder = code(registry)[:2]
                assert re.search(rf"\b{name}\b", (package / holder).read_text(encoding="utf-8")), addition


def imports(file, package):
    """Parts of a package that a file imports anywhere."""
    parents = file.relative_to(package.parent).parts[:-1]
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        found = []
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = [*parents[: len(parents) - node.level + 1]] if node.level else []
            found = [".".join([*base, *filter(None, [node.module]), alias.name]) for alias in node.names]
        yield from (name.split(".")[1] for name in found if name.startswith(f"{package.name}."))


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_imports_follow_the_table_of_layers(package):
    rows = dict(zip(PACKAGES, tables("folder or file"), strict=True))[package]
    layer = {name: place for place, (names, _) in enumerate(rows) for name in code(names)}
    files = [file for file in package.rglob("*.py") if file.relative_to(package).parts[0].removesuffix(".py") in layer]
    wrong = []
    for file in files:
        here = file.relative_to(package).parts[0].removesuffix(".py")
        wrong += [(file.name, name) for name in imports(file, package) if layer.get(name, -1) > layer[here]]
    assert not wrong
    folders = {path.parent.name for path in package.glob("*/__init__.py")}
    assert folders <= set(layer)
