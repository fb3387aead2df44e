"""What pyproject.toml and constraints.txt say of the packages that are needed."""

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = SETTINGS["project"]
OWN = ("convexformer", "convexformer_solvers")
NAMES = {"sklearn": "scikit-learn"}  # of distributions that are not called as their module is


def names(requirements):
    return {re.match(r"[\w-]+", requirement)[0] for requirement in requirements} - set(OWN)


def imported_on_loading(path):
    """First parts of the modules that the statements of a module import, without those of its functions."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module.partition(".")[0]


def test_what_modules_import_when_they_load_is_a_dependency():
    files = [*(ROOT / "convexformer").rglob("*.py"), *(ROOT / "solvers").rglob("*.py")]
    modules = {module for path in files for module in imported_on_loading(path)} - set(OWN) - sys.stdlib_module_names
    assert {NAMES.get(module, module) for module in modules} <= names(PROJECT["dependencies"])


@pytest.mark.parametrize("extra", [None, *sorted(set(PROJECT["optional-dependencies"]) - {"bench"})])
def test_constraints_hold_a_version_of_each_package_that_is_asked_for(extra):
    asked = PROJECT["dependencies"] if extra is None else PROJECT["optional-dependencies"][extra]
    pinned = {line.partition("==")[0].lower() for line in (ROOT / "constraints.txt").read_text().splitlines()}
    assert {name.lower() for name in names(asked)} <= pinned


def test_the_least_python_is_that_of_the_type_checks_and_of_the_pages():
    least = PROJECT["requires-python"].removeprefix(">=")
    assert least == SETTINGS["tool"]["mypy"]["python_version"]
    for page in ("README.md", "docs/install.md"):
        assert f"needs Python {least} or newer" in (ROOT / page).read_text()
