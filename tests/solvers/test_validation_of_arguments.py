"""Arguments of a wrong type, shape or range: each is named, with what was wrong and what would be right."""

import math

import numpy as np
import pytest
import torch
from sklearn.exceptions import ConvergenceWarning
from solver_cases import fit, make_program, randn

from convexformer_solvers import (
    Admm,
    Auto,
    DenseMap,
    Exact,
    Fista,
    GatedMap,
    GroupL2,
    GroupNuclear,
    Huber,
    PerTarget,
    Poisson,
    Program,
    RowStochastic,
    SignedMap,
    Softmax,
    Squared,
    TableMap,
    alpha_grid,
    certify,
    get_solver,
    iterate_path,
    solve,
    solve_path,
)

every_follow = pytest.mark.parametrize("follow", [solve, solve_path, iterate_path])


class TestMaps:
    @pytest.mark.parametrize("data", [np.ones((5, 3, 2)), [[1.0, 2.0]], 3.0, None], ids=["array", "list", "3", "None"])
    def test_data_that_are_no_tensor(self, data):
        message = rf"data must be a torch tensor, got {type(data).__name__}; torch.as_tensor\(data\)"
        with pytest.raises(TypeError, match=message):
            DenseMap(data)
        with pytest.raises(TypeError, match=message):
            GatedMap(data, torch.ones(5, 2, dtype=torch.bool))

    @pytest.mark.parametrize("masks", [np.ones((5, 2), bool), [[True]]], ids=["array", "list"])
    def test_masks_that_are_no_tensor(self, masks):
        with pytest.raises(TypeError, match="masks must be a torch tensor, got"):
            GatedMap(randn(5, 3, 2), masks)

    def test_tables_and_symbols_that_are_no_tensors(self):
        masks = torch.ones(3, 1, dtype=torch.bool)
        with pytest.raises(TypeError, match="tables must be a torch tensor, got ndarray"):
            TableMap(np.eye(2)[None], torch.tensor([[0], [1], [1]]), masks)
        with pytest.raises(TypeError, match="symbols must be a torch tensor, got list"):
            TableMap(torch.eye(2)[None], [[0], [1], [1]], masks)

    def test_data_without_axes(self):
        with pytest.raises(ValueError, match="data must have at least two dimensions"):
            GatedMap(torch.zeros(()), torch.ones(5, 2, dtype=torch.bool))


@pytest.mark.parametrize("delta", ["a", True, None, 0.0, math.inf, math.nan])
def test_the_threshold_of_huber(delta):
    with pytest.raises(ValueError, match="delta must be positive and finite, got"):
        Huber(delta)


@pytest.mark.parametrize("largest", ["1", True, None, -1.0, math.nan, 10**400])
def test_the_largest_alpha_of_a_grid(largest):
    with pytest.raises(ValueError, match="alpha_max must be finite and not negative, got"):
        alpha_grid(largest)


def test_a_grid_from_an_integer_that_numpy_does_not_have():
    assert alpha_grid(10**30, 2, 0.1) == alpha_grid(1e30, 2, 0.1)


@every_follow
@pytest.mark.parametrize("device", ["gpu", 1.5, [], "meta"], ids=repr)
def test_a_device_that_is_none(follow, device):
    with pytest.raises(ValueError, match=r"device must be .* such as 'cpu' or 'cuda', got"):
        follow(make_program("squared", "group_l2"), Fista(), device=device)


@pytest.mark.parametrize("name", ["coef", "intercept", "dual_hint"])
def test_parts_of_a_point_to_certify(name):
    program = make_program("squared", "group_l2", intercept=True)
    parts = {"coef": torch.zeros(program.coef_shape, dtype=torch.float64), name: np.zeros(2)}
    with pytest.raises(TypeError, match=f"{name} must be a torch tensor, got ndarray"):
        certify(program, **parts)


class TestStart:
    @every_follow
    @pytest.mark.parametrize("start", [3, (randn(3, 2, 2),), "abc", torch.zeros(2), (1, 2, 3)], ids=str)
    def test_that_is_no_pair(self, follow, start):
        with pytest.raises(TypeError, match=r"start must be a pair of tensors, coefficients and intercept, got"):
            follow(make_program(), Fista(), start=start)

    def test_that_is_a_result_is_told_how(self):
        program = make_program()
        result = fit(program)
        with pytest.raises(TypeError, match=r"got SolverResult; .* is \(result\.coef, result\.intercept\)"):
            solve(program, Fista(), start=result)

    @pytest.mark.parametrize("wrong", [np.nan, np.inf])
    @pytest.mark.parametrize("part", [0, 1])
    def test_that_is_not_finite(self, wrong, part):
        start = [torch.zeros(3, 2, 2).double(), torch.zeros(2).double()]
        start[part].view(-1)[0] = wrong
        with pytest.raises(ValueError, match="start must be finite"):
            solve(make_program(intercept=True), Fista(), start=start)

    def test_of_complex_numbers(self):
        start = torch.zeros(3, 2, 2, dtype=torch.complex128), torch.zeros(2)
        with pytest.raises(ValueError, match=r"start must hold real numbers, got torch\.complex128"):
            solve(make_program(intercept=True), Fista(), start=start)

    def test_that_is_not_finite_in_single_precision(self):
        start = torch.full((3, 2, 2), 1e200, dtype=torch.float64), torch.zeros(2).double()
        with pytest.raises(ValueError, match="start must be finite in the precision of the solve"):
            solve(make_program(), Fista(), start=start, dtype=torch.float32)


class TestPenaltiesOfSequences:
    y = randn(20, 4, seed=1)
    tokens = DenseMap(randn(20, 3, 2))

    @pytest.mark.parametrize("n_targets", [0, -1, 2.0, True, "2", None])
    def test_number_of_targets(self, n_targets):
        for make in (RowStochastic, lambda n: PerTarget(GroupL2(), n)):
            with pytest.raises(ValueError, match="n_targets must be a positive integer, got"):
                make(n_targets)

    @pytest.mark.parametrize("penalty", ["group_l2", None, GroupL2])
    def test_penalty_of_a_target(self, penalty):
        with pytest.raises(TypeError, match="penalty must be a Penalty"):
            PerTarget(penalty, 2)

    @pytest.mark.parametrize("solver", [Fista(), Auto(), Exact()], ids=lambda solver: solver.name)
    def test_number_of_outputs(self, solver):
        message = "n_targets must divide the number of outputs, got n_targets=3 and 4 outputs"
        for linear_map, penalty in (
            (self.tokens, PerTarget(GroupL2(), 3)),
            (self.tokens, PerTarget(GroupNuclear(), 3)),
            (SignedMap(self.tokens), RowStochastic(3)),
        ):
            program = Program(linear_map, self.y, Squared(), penalty, 0.1)
            with pytest.raises(ValueError, match=message):
                solve(program, solver)
            with pytest.raises(ValueError, match=message):
                _ = program.alpha_max

    @pytest.mark.parametrize("solver", [Fista(), Auto(), Exact()], ids=lambda solver: solver.name)
    @pytest.mark.parametrize("data", [(20, 3, 2), (20, 2, 2), (20, 3, 2, 2)], ids=str)
    def test_row_stochastic_without_a_signed_map(self, solver, data):
        program = Program(DenseMap(randn(*data)), self.y, Squared(), RowStochastic(2), 0.1)
        with pytest.raises(ValueError, match=r"RowStochastic needs .* SignedMap, got \(\d, 2, "):
            solve(program, solver)
        with pytest.raises(ValueError, match=r"SignedMap, got"):
            _ = program.alpha_max


class TestSolvers:
    @pytest.mark.parametrize("name", [3, None, Exact])
    def test_exact(self, name):
        with pytest.raises(ValueError, match="cvxpy_solver must be the name of a solver of cvxpy"):
            Exact(name)

    @pytest.mark.parametrize("power_steps", [2.5, 0, -1, "6", True, None])
    def test_fista(self, power_steps):
        with pytest.raises(ValueError, match="power_steps must be a positive integer"):
            Fista(power_steps=power_steps)

    @pytest.mark.parametrize("dtype", [3, "double", torch.int32, None])
    def test_admm(self, dtype):
        with pytest.raises(ValueError, match="dtype must be 'float32' or 'float64', as a name or a type, got"):
            Admm(dtype=dtype)

    def test_admm_takes_names_of_precisions(self):
        program = make_program()
        for name in ("float32", "float64"):
            assert solve(program, Admm(dtype=name)).certificate.relative_gap <= 1e-4


class TestRange:
    """Data whose squares leave float32: a true certificate, or an error that says what to do, but none of torch's."""

    @pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
    @pytest.mark.parametrize("name", ["auto", "fista"])
    @pytest.mark.parametrize("penalty", [GroupL2(), GroupNuclear()], ids=repr)
    @pytest.mark.parametrize("loss", [Softmax(), Poisson()], ids=repr)
    @pytest.mark.parametrize("ratio", [0.1, None])
    def test_of_large_features(self, loss, penalty, name, ratio):
        y = torch.nn.functional.one_hot(torch.arange(20) % 4, 4).float()
        data = (1e20 * randn(20, 3, 2)).float()
        program = Program(DenseMap(data), y, loss, penalty, 0.1, fit_intercept=True)
        program = program.with_alpha(0.1 if ratio is None else ratio * program.alpha_max)
        certificate = solve(program, get_solver(name), max_iter=300).certificate
        assert certificate.primal <= program.null_value * (1 + 1e-6)
        assert certificate.dual <= certificate.primal

    def test_an_intercept_of_predictions_out_of_range_lets_the_step_search_go_on(self):
        # As without an intercept: steps that lead out of the range are cut, and the best constant model stays.
        y = torch.nn.functional.one_hot(torch.arange(20) % 4, 4).float()
        program = Program(DenseMap((1e20 * randn(20, 3, 2)).float()), y, Softmax(), GroupL2(), 0.1, fit_intercept=True)
        with pytest.warns(ConvergenceWarning):
            assert solve(program, Fista(), max_iter=20).certificate.primal <= program.null_value * (1 + 1e-6)

    def test_factorisations_that_fail_are_told_in_terms_of_the_data(self):
        class Factorises(Fista):
            def step(self, program, state):
                torch.linalg.cholesky(torch.full((2, 2), torch.nan))

        for follow in (solve, solve_path):
            with pytest.raises(ValueError, match=r"solver 'fista' failed in torch\.float64 .*scale the features"):
                follow(make_program(), Factorises())

    @pytest.mark.parametrize("loss", ["huber", "logistic", "poisson"])
    def test_curvatures_out_of_range_are_told_in_terms_of_the_data(self, loss):
        program = make_program(loss, c=1)
        wide = DenseMap(program.map.data * torch.tensor([1e160, 1.0], dtype=torch.float64))
        program = Program(wide, program.y, program.loss, program.penalty, 1e159)
        with pytest.raises(ValueError, match=r"solver 'semismooth_newton' failed .*scale the features"):
            solve(program, get_solver("semismooth_newton"))

    @pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
    def test_a_stage_whose_curvature_is_out_of_range_is_left_out(self):
        program = make_program("poisson", c=1)
        wide = DenseMap(program.map.data * torch.tensor([1e160, 1.0], dtype=torch.float64))
        program = Program(wide, program.y, program.loss, program.penalty, 1e159)
        certificate = solve(program, Auto()).certificate
        assert certificate.dual <= certificate.primal <= program.null_value * (1 + 1e-12)
