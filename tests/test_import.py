"""What importing and fitting load, checked in fresh interpreters."""

import json
import types
from collections import Counter
from pathlib import Path

import pytest

import convexformer

HEAVY = ("cvxpy", "matplotlib", "transformers", "torch", "sklearn", "scipy")


def loaded(run_python, code):
    report = f"import json, sys\n{code}\nprint(json.dumps([m for m in {HEAVY!r} if m in sys.modules]))"
    return json.loads(run_python(report).splitlines()[-1])


def test_import_loads_nothing_heavy(run_python):
    assert loaded(run_python, "import convexformer") == []


def test_the_command_line_describes_itself_without_loading_anything_heavy(run_python):
    code = """
from convexformer import cli
cli.build_parser().parse_args(["reproduce", "grokking", "--small"])
try:
    cli.main(["--version"])
except SystemExit:
    pass
"""
    assert loaded(run_python, code) == []


def test_a_fit_with_the_default_solver_loads_torch_but_neither_cvxpy_nor_matplotlib_nor_transformers(run_python):
    code = """
import numpy as np, convexformer
X = np.random.default_rng(0).normal(size=(20, 3, 2))
for model in (
    convexformer.ConvexAttentionRegressor(alpha=0.1),
    convexformer.ConvexAttentionRegressor(alpha=0.1, activation="gated_relu", n_gates=4, random_state=0),
    convexformer.ConvexAttentionRegressorCV(alphas=2, cv=2),
):
    model.fit(X, X[:, 0, 0]).predict(X)
model.heads_.to_torch()
"""
    assert loaded(run_python, code) == ["torch", "sklearn", "scipy"]


def test_all_public_names_load():
    assert set(convexformer.__all__) <= set(dir(convexformer))
    for name in convexformer.__all__:
        assert getattr(convexformer, name) is not None


def test_all_parts_load_by_attribute():
    folder = Path(convexformer.__file__).parent
    names = {path.stem for path in folder.glob("*.py")} | {path.parent.name for path in folder.glob("*/__init__.py")}
    for name in sorted(name for name in names if not name.startswith("_") and name not in ("cli", "demo", "tables")):
        assert isinstance(getattr(convexformer, name), types.ModuleType)


def test_public_solver_names_are_those_of_the_solver_layer():
    import convexformer_solvers

    assert convexformer.solvers.__all__ == convexformer_solvers.__all__
    for name in convexformer_solvers.__all__:
        assert getattr(convexformer.solvers, name) is getattr(convexformer_solvers, name)


def test_submodules_load_by_attribute():
    assert isinstance(convexformer.heads, types.ModuleType)
    assert convexformer.heads.attention.Heads is convexformer.Heads


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"convexformer.*nonsense"):
        convexformer.nonsense  # noqa: B018


def test_no_folder_of_the_package_holds_more_than_fifteen_files():
    folder = Path(convexformer.__file__).parent
    counts = Counter(file.parent.relative_to(folder).as_posix() for file in folder.rglob("*.py"))
    assert max(counts.values()) <= 15, counts.most_common(3)
