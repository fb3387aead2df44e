"""What solvers need of a program, and that they say so before they begin."""

from __future__ import annotations

import dataclasses

import pytest
from solver_cases import make_program

from convexformer_solvers import (
    LOSSES,
    PENALTIES,
    SOLVERS,
    Admm,
    Penalty,
    get_loss,
    get_penalty,
    get_solver,
    iterate_path,
    solve,
)
from convexformer_solvers.algorithms.block_descent import BlockDescent
from convexformer_solvers.algorithms.proximal_dual import ProximalDual
from convexformer_solvers.algorithms.semismooth_newton import SemismoothNewton
from convexformer_solvers.algorithms.smoothing_newton import SmoothingNewton
from convexformer_solvers.algorithms.stage import Stage
from convexformer_solvers.algorithms.working_set import WorkingSet


def stage(algorithm):
    return Stage(algorithm, "part of another solver")


@pytest.mark.parametrize("c", [1, 2])
@pytest.mark.parametrize("penalty", ["group_l2", "nuclear"])
@pytest.mark.parametrize("loss", sorted(LOSSES))
@pytest.mark.parametrize("name", sorted(set(SOLVERS) - {"exact"}))
def test_a_program_is_solved_or_refused_with_what_it_lacks(name, loss, penalty, c):
    program = make_program(loss, penalty, n=30, blocks=4, d=2, c=2 if loss == "softmax" else c, ratio=0.3)
    # With one output the nuclear norm is the group-l2 one, which is what solvers are given.
    program = dataclasses.replace(program, penalty=program.penalty.for_outputs(program.y.shape[1]))
    solver = get_solver(name)
    unmet = solver.unmet_requirement(program)
    if unmet is None:
        assert solve(program, solver, tol=1e-3, max_iter=5000).certificate.relative_gap <= 1e-3
    else:
        with pytest.raises(TypeError) as raised:
            solve(program, solver)
        assert str(raised.value) == f"solver {name!r} needs {unmet}"


@pytest.mark.parametrize("inner", [Admm(), BlockDescent(), SemismoothNewton()])
def test_working_sets_need_what_the_algorithm_of_the_set_needs(inner):
    for loss in ("poisson", "squared", "huber"):
        for penalty in ("group_l2", "nuclear"):
            program = make_program(loss, penalty, n=20)
            assert WorkingSet(stage(inner)).unmet_requirement(program) == inner.unmet_requirement(program)


def test_proximal_steps_need_what_the_solver_of_the_steps_needs():
    solver = ProximalDual(stage(SemismoothNewton()))
    assert solver.unmet_requirement(make_program("huber", n=20)) is None
    wanted = "the group-l2 penalty and a separable loss, not GroupNuclear() and Huber(delta=1.35)"
    assert solver.unmet_requirement(make_program("huber", "nuclear", n=20)) == wanted


def test_a_path_says_so_when_it_is_asked_for():
    with pytest.raises(TypeError, match="'admm' needs a loss with finite smoothness"):
        iterate_path(make_program("poisson", n=20), Admm())


def test_optional_methods_are_those_that_are_not_of_the_base_class():
    assert get_loss("huber").defines("widened")
    assert not get_loss("squared").defines("widened")
    assert all(get_loss(name).defines("conjugate") for name in LOSSES)
    assert all(get_penalty(name).defines("smoothed_value") for name in PENALTIES)
    assert not get_loss("squared").defines("no_such_method")
    program = make_program("squared", n=20)
    assert "['widened'] of Squared()" in ProximalDual(stage(Admm())).unmet_requirement(program)

    class Rough(type(program.penalty)):
        smoothed_value = Penalty.smoothed_value

    program = make_program("squared", n=20, penalty=Rough())
    assert "['smoothed_value'] of" in SmoothingNewton().unmet_requirement(program)
