"""Solvers by name, what they ask of losses and penalties, and solvers that are not there."""

import cvxpy as cp
import pytest
from solver_cases import PENALTY_NAMES, fit, make_program

from convexformer_solvers import (
    SOLVERS,
    Exact,
    Fista,
    GroupL2,
    Loss,
    Penalty,
    Point,
    SolverUnavailableError,
    Squared,
    certify,
    get_solver,
    solve,
)
from convexformer_solvers.points import completed


class WithoutExpression(Squared):
    expression = Loss.expression


class NormWithoutExpression(GroupL2):
    expression = Penalty.expression


class TestRequirements:
    def test_missing_method_of_the_loss_is_named(self):
        with pytest.raises(TypeError, match=r"'exact' needs .*'expression'.*WithoutExpression"):
            solve(make_program(WithoutExpression()), Exact())

    def test_missing_method_of_the_penalty_is_named(self):
        with pytest.raises(TypeError, match=r"'exact' needs .*'expression'.*NormWithoutExpression"):
            solve(make_program("squared", NormWithoutExpression()), Exact())

    def test_other_solvers_do_not_ask_for_it(self):
        program = make_program(WithoutExpression(), NormWithoutExpression())
        assert fit(program).certificate.relative_gap <= 1e-9


class TestNames:
    @pytest.mark.parametrize("name", sorted(SOLVERS))
    def test_registered(self, name):
        solver = get_solver(name)
        assert solver.name == name
        assert get_solver(solver) is solver

    @pytest.mark.parametrize("name", ["clarabel", "CLARABEL", "scs", "Mosek", "gurobi"])
    def test_of_cvxpy(self, name):
        solver = get_solver(name)
        assert isinstance(solver, Exact)
        assert solver.cvxpy_solver == name.upper()

    @pytest.mark.parametrize("wrong", ["newton", "", None, 3, Fista])
    def test_unknown_lists_the_choices(self, wrong):
        with pytest.raises(ValueError, match="solver must be one of") as caught:
            get_solver(wrong)
        assert all(name in str(caught.value) for name in SOLVERS)

    def test_options_reach_cvxpy(self):
        assert repr(Exact("scs", eps=1e-3)) == "Exact('SCS', eps=0.001)"
        with pytest.raises(RuntimeError, match="CLARABEL"):
            solve(make_program(), Exact(max_iter=1))


@pytest.mark.parametrize("name", sorted(SOLVERS))
def test_a_start_may_leave_its_intercept_to_be_found(name):
    program, solver = make_program("squared", intercept=True), get_solver(name)
    state = solver.step(program, solver.init(program, Point(program.y.new_zeros(program.coef_shape))))
    coef, intercept, *_ = completed(program, solver.point(program, state))
    assert certify(program, coef, intercept).primal < program.null_value


def test_a_class_is_an_entry_of_the_registry(monkeypatch):
    class Mine(Fista):
        name = "mine"

    monkeypatch.setitem(SOLVERS, "mine", Mine)
    assert isinstance(get_solver("mine"), Mine)


class TestUnavailable:
    """What users read when a solver cannot run, whatever is installed where the tests run."""

    def test_not_installed(self, monkeypatch):
        monkeypatch.setattr(cp, "installed_solvers", lambda: ["CLARABEL", "SCS"])
        with pytest.raises(SolverUnavailableError, match=r"'GUROBI' is not installed .*CLARABEL.*SCS"):
            solve(make_program(), get_solver("gurobi"))

    def test_mosek_not_installed(self, monkeypatch):
        monkeypatch.setattr(cp, "installed_solvers", lambda: ["CLARABEL"])
        with pytest.raises(SolverUnavailableError, match=r"pip install 'convexformer\[mosek\]'"):
            solve(make_program(), get_solver("mosek"))

    def test_no_licence(self, monkeypatch):
        def refuse(self, *args, **options):
            raise cp.SolverError("License cannot be located.")

        monkeypatch.setattr(cp, "installed_solvers", lambda: ["MOSEK"])
        monkeypatch.setattr(cp.Problem, "solve", refuse)
        with pytest.raises(SolverUnavailableError, match=r"found no licence.*MOSEKLM_LICENSE_FILE.*solver='exact'"):
            solve(make_program(), get_solver("mosek"))

    def test_failure_of_the_solver_is_a_runtime_error(self, monkeypatch):
        def fail(self, *args, **options):
            raise cp.SolverError("numerical problems")

        monkeypatch.setattr(cp.Problem, "solve", fail)
        with pytest.raises(RuntimeError, match="numerical problems") as caught:
            solve(make_program(), Exact())
        assert not isinstance(caught.value, SolverUnavailableError)

    @pytest.mark.parametrize("penalty", PENALTY_NAMES)
    def test_mosek_agrees_with_clarabel(self, penalty):
        program = make_program("logistic", penalty, gated=True, intercept=True, weighted=True)
        try:
            mosek = solve(program, get_solver("mosek"), tol=1e-6).certificate
        except SolverUnavailableError as reason:
            pytest.skip(str(reason))
        assert mosek.primal == pytest.approx(solve(program, Exact(), tol=1e-6).certificate.primal, rel=1e-6)
