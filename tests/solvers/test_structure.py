"""How the solver layer is built: what imports what, how deep calls go, how large folders are."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from pathlib import Path

import pytest
from solver_cases import randn

import convexformer_solvers
from convexformer_solvers import SOLVERS, Admm, Auto, DenseMap, Program, get_loss, get_penalty, get_solver, solve
from convexformer_solvers.algorithms.working_set import WorkingSet
from convexformer_solvers.auto import AutoConfig, plan

PACKAGE = "convexformer_solvers"
ROOT = Path(convexformer_solvers.__file__).parent

# From what imports nothing to what may import all; folders and files directly in the package.
LAYERS = (
    ("validation", "memory", "rates", "rounding", "draws"),
    ("losses", "penalties", "linear_maps"),
    ("program",),
    ("points", "certificate", "result"),
    ("distributed",),
    ("linalg",),
    ("reductions",),
    ("algorithms",),
    ("solve", "certificate_schedule", "path", "checks", "io"),
    ("auto",),
    ("registry",),
    ("__init__",),
)
LAYER_OF = {name: place for place, names in enumerate(LAYERS) for name in names}
# Configs under other names, and defaults with which what a number stands for does not take place.
CONFIGS, OFF = ("Patience", "Center", "SinglePrecision", "GramMetrics"), ("0", "0.0")
FILES = sorted(ROOT.rglob("*.py"))
NAMES = [str(file.relative_to(ROOT)) for file in FILES]


def part_of(file):
    """Folder of a file, or its own name directly in the package."""
    return file.relative_to(ROOT).parts[0].removesuffix(".py")


def imported(file):
    """Full names of all modules, or of what is in them, that a file imports anywhere."""
    package = [PACKAGE, *file.relative_to(ROOT).parts[:-1]]
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)


def parts_imported(file):
    """Folders and files directly in the package that a file imports; its ``__init__`` where it imports the package."""
    for name in imported(file):
        first, *rest = name.split(".")
        if first == PACKAGE:
            yield rest[0] if rest and rest[0] in LAYER_OF else "__init__"


@pytest.mark.parametrize("file", FILES, ids=NAMES)
def test_imports_run_one_way(file):
    here = part_of(file)
    later = {part for part in parts_imported(file) if LAYER_OF[part] > LAYER_OF[here]}
    assert not later, f"{file.relative_to(ROOT)} imports {sorted(later)}, which come after {here}"


def test_every_part_has_its_layer():
    assert {part_of(file) for file in FILES} == set(LAYER_OF)


@pytest.mark.parametrize("file", FILES, ids=NAMES)
def test_nothing_imports_what_is_built_on_it(file):
    assert not [name for name in imported(file) if name.split(".")[0] == "convexformer"]


def test_no_module_is_loaded_by_name():
    def loads(file):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
            if name in ("import_module", "__import__"):
                return True
        return False

    assert [name for file, name in zip(FILES, NAMES, strict=True) if loads(file)] == []


def test_the_reader_of_imports_sees_all_kinds(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    file = tmp_path / "linalg" / "some.py"
    file.parent.mkdir()
    file.write_text(
        "import convexformer_solvers.auto.plan\n"
        "from . import cholesky\n"
        "from .. import solve\n"
        "def f():\n"
        "    from ..path import solve_path\n"
        "    from convexformer_solvers import Auto\n"
    )
    assert list(imported(file)) == [
        "convexformer_solvers.auto.plan",
        "convexformer_solvers.linalg.cholesky",
        "convexformer_solvers.solve",
        "convexformer_solvers.path.solve_path",
        "convexformer_solvers.Auto",
    ]
    assert list(parts_imported(file)) == ["auto", "linalg", "solve", "path", "__init__"]


def frames_between(outer, inner):
    """Frames of the package strictly between the outermost call of a function and where another is called."""
    frames = [(frame.frame.f_globals.get("__name__", ""), frame.frame.f_code) for frame in inspect.stack(0)]
    codes = [code for _, code in frames]
    within = frames[codes.index(inner) + 1 : len(codes) - 1 - codes[::-1].index(outer)]
    return [f"{name}.{code.co_name}" for name, code in within if name.split(".")[0] == PACKAGE]


@pytest.mark.usefixtures("steady_rates")
def test_few_calls_lead_from_solve_to_a_step_of_a_working_set(monkeypatch):
    data = randn(600, 160, 4)
    y = data[:, :2].sum(1)[:, :3] + randn(600, 3, seed=1)
    program = Program(DenseMap(data), y, get_loss("squared"), get_penalty("group_l2"), 1.0, fit_intercept=True)
    program = program.with_alpha(0.2 * program.alpha_max)
    # Not nearly independent, in the eyes of this plan.
    config = AutoConfig(costly_gram=1.0, independent=0.0, gradient_steps=0.0)
    first = plan(program, config=config)[0]
    assert isinstance(first.algorithm, WorkingSet)
    assert isinstance(first.algorithm.inner.algorithm, Admm)
    found, step = [], Admm.step

    def watched(self, program, state):
        found.append(frames_between(solve.__code__, watched.__code__))
        return step(self, program, state)

    monkeypatch.setattr(Admm, "step", watched)
    assert solve(program, Auto(config), tol=1e-4).certificate.relative_gap <= 1e-4
    assert any(f"{WorkingSet.__module__}.step" in names for names in found)
    longest = max(found, key=len)
    assert len(longest) <= 6, " -> ".join(reversed(longest))


@pytest.mark.parametrize("name", sorted(set(SOLVERS) - {"auto"}))  # which is a plan of the others
def test_modules_of_solvers_begin_with_a_reference(name):
    module = inspect.getmodule(type(get_solver(name)))
    assert re.search(r"\(.* \d{4}\b.*\)", module.__doc__.splitlines()[0])


@pytest.mark.parametrize("folder", sorted({file.parent for file in FILES}), ids=lambda folder: folder.name)
def test_no_folder_holds_more_than_fifteen_files(folder):
    files = sorted(file.name for file in folder.glob("*.py"))
    assert len(files) <= 15, files


def numbers_in(node):
    """Whether numbers, and not only True or False, are part of an expression."""
    found = [part.value for part in ast.walk(node) if isinstance(part, ast.Constant)]
    return any(isinstance(value, (int, float)) and not isinstance(value, bool) for value in found)


def test_numbers_stand_in_configs_and_bounds_on_rounding_in_one_place():
    constants = []
    for file in FILES:
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and numbers_in(node.value):
                constants.append(f"{file.relative_to(ROOT)}: {ast.unparse(node.targets[0])}")
    # The format of a file, a side below which nothing is worth a decision, and seconds that no processor needs.
    others = ["io/checkpoint.py: _FORMAT", "linalg/ridge.py: SMALL_SIDE", "rates.py: WARM_UP"]
    of_rounding = [f"rounding.py: {name}" for name in ("DIFFERENCE", "SUM", "CANCELLED", "SINGLE")]
    assert sorted(constants) == sorted(others + of_rounding)


# What came with data that are read in passes and with ranks; everything else has sixty numbers at most.
OF_PASSES = ("few_passes", "distributed")
OF_PASSES_ELSEWHERE = ("chunk", "gram_copies")


def test_configs_hold_at_most_sixty_numbers_and_describe_each():
    numbers, of_passes = 0, 0
    for file in FILES:
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and (node.name.endswith("Config") or node.name in CONFIGS):
                fields = [part for part in node.body if isinstance(part, ast.AnnAssign) and part.value is not None]
                tuned = [
                    part.target.id for part in fields if numbers_in(part.value) and ast.unparse(part.value) not in OFF
                ]
                text = ast.get_docstring(node)
                assert all(name in text for name in tuned), node.name
                new = [name for name in tuned if file.parent.name in OF_PASSES or name in OF_PASSES_ELSEWHERE]
                numbers, of_passes = numbers + len(tuned) - len(new), of_passes + len(new)
    assert 40 < numbers <= 60
    assert of_passes <= 12


# What stands in formulas, rounding and limits of loops in functions of algorithms and of the plan, by file.
IN_FORMULAS = {
    "algorithms/admm/iteration.py": {1e-5, 1e-6},  # rounding of gaps and of moves
    "algorithms/admm/rho.py": {0.01},  # sizes that are rounding
    "algorithms/block_descent.py": {1e-12, 1e-3, 3, 50},  # rounding, accuracy and limit of inner steps; sweeps
    "algorithms/column_generation.py": {8, 12},  # rounding
    "algorithms/few_passes/low_rank.py": {0.1},  # accuracy of Newton directions
    "algorithms/few_passes/metric_gradient.py": {4},  # rounding of an objective
    "algorithms/fista.py": {1e-4, 1e4, 4, 6},  # rounding; Nesterov's formula; power steps
    "algorithms/polish.py": {1e-10, 3, 32},  # rounding; most of a gap
    "algorithms/proximal_dual.py": {0.9, 3},  # hardly less of a gap; the first share
    "auto/cost.py": {3},  # operations of a Cholesky factor
    "auto/plan.py": {3, 8},  # the first look, as a share, and arrays of a pass; rounding
}


def literals_in_functions(file):
    """Numbers in the functions of a file, but for 0, 1, 2, their halves and the like."""
    for function in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        for part in ast.walk(function) if isinstance(function, (ast.FunctionDef, ast.Lambda)) else ():
            value = part.value if isinstance(part, ast.Constant) else True
            if isinstance(value, (int, float)) and not isinstance(value, bool) and value not in (0, 0.5, 1, 2):
                yield value


def test_algorithms_and_the_plan_go_by_the_numbers_of_configs():
    found = {name: set(literals_in_functions(file)) for file, name in zip(FILES, NAMES, strict=True)}
    folders = str(Path("auto", "")), str(Path("algorithms", ""))
    found = {Path(name).as_posix(): numbers for name, numbers in found.items() if name.startswith(folders) and numbers}
    assert found == IN_FORMULAS
