"""The plan of the default solver: a decision list whose result is data."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math

import pytest
import torch
from solver_cases import LOSS_NAMES, PENALTY_NAMES, accepts, make_program, randn

from convexformer_solvers import (
    Admm,
    Auto,
    DenseMap,
    Fista,
    Huber,
    Poisson,
    Program,
    RowStochastic,
    SignedMap,
    Solver,
    Status,
    get_loss,
    get_penalty,
    solve,
)
from convexformer_solvers.algorithms.block_descent import BlockDescent
from convexformer_solvers.algorithms.constant import Constant
from convexformer_solvers.algorithms.few_passes import MetricGradient
from convexformer_solvers.algorithms.fista import GreedyFista
from convexformer_solvers.algorithms.proximal_dual import ProximalDual
from convexformer_solvers.algorithms.semismooth_newton import SemismoothNewton
from convexformer_solvers.algorithms.smoothing_newton import SmoothingNewton
from convexformer_solvers.algorithms.working_set import WorkingSet
from convexformer_solvers.auto import AutoConfig, plan
from convexformer_solvers.auto.cost import admm_work, gradient_steps_of_admm
from convexformer_solvers.linear_maps import base
from convexformer_solvers.linear_maps.derived import DerivedMap
from convexformer_solvers.points import null_point
from convexformer_solvers.rates import Rates
from convexformer_solvers.reductions.precision import SinglePrecision

pytestmark = pytest.mark.usefixtures("steady_rates")

# Neither working sets nor Newton steps on smoothed objectives nor single precision, unless a test asks for one.
PLAIN = AutoConfig(
    costly_gram=math.inf, block_calls=math.inf, newton_share=math.inf, least_single=2**60, long_tails=math.inf
)


class OnDisk(DerivedMap):
    """Another map as if its data were on a disk."""

    in_memory = False
    matvec = property(lambda self: self.base.matvec)
    rmatvec = property(lambda self: self.base.rmatvec)
    rows = property(lambda self: self.base.rows)


def correlated_program(loss="squared", penalty="group_l2", c=1, n=120, blocks=150, d=4, ratio=0.1):
    """Tokens that have most of their variance in common."""
    data = math.sqrt(0.1) * randn(n, blocks, d) + math.sqrt(0.9) * randn(n, 1, d, seed=1)
    loss = get_loss(loss)
    y = loss.example_target(n, c, torch.Generator().manual_seed(2))
    program = Program(DenseMap(data), y, loss, get_penalty(penalty), 1.0, fit_intercept=True)
    return program.with_alpha(ratio * program.alpha_max)


def independent_program(loss="squared", c=1, ratio=0.3, n=120, blocks=150, d=4):
    loss = get_loss(loss)
    y = loss.example_target(n, c, torch.Generator().manual_seed(2))
    program = Program(DenseMap(randn(n, blocks, d)), y, loss, get_penalty("group_l2"), 1.0, fit_intercept=True)
    return program.with_alpha(ratio * program.alpha_max)


def every_program():
    for loss, penalty, c in itertools.product(LOSS_NAMES, PENALTY_NAMES, (1, 3)):
        if accepts(get_loss(loss), c):
            program = make_program(loss, penalty, n=40, blocks=6, d=2, c=c, intercept=True)
            yield dataclasses.replace(program, penalty=program.penalty.for_outputs(c))
    yield correlated_program()
    yield correlated_program(c=3)
    yield independent_program()
    yield far_targets()
    yield sequence_program()


def far_targets():
    y = 1e3 * randn(60, 1, seed=3)
    program = Program(DenseMap(randn(60, 5, 3)), y, Huber(), get_penalty("group_l2"), 1.0, fit_intercept=True)
    return program.with_alpha(0.1 * program.alpha_max)


def sequence_program():
    tokens = randn(20, 3, 2)
    program = Program(SignedMap(DenseMap(tokens)), randn(20, 4, seed=1), get_loss("squared"), RowStochastic(2), 1.0)
    return program.with_alpha(0.1 * program.alpha_max)


def algorithms(program, config=None, warm=False):
    return [type(stage.algorithm) for stage in plan(program, warm, config)]


def sets_of(program, config):
    """The stages of a plan that are working sets."""
    return [stage for stage in plan(program, config=config) if isinstance(stage.algorithm, WorkingSet)]


def inside(stage):
    """The algorithm of a working set."""
    assert isinstance(stage.algorithm, WorkingSet)
    return type(stage.algorithm.inner.algorithm)


def as_data(part):
    """All that a plan says, with solvers by their kind and settings."""
    if isinstance(part, Solver):
        return type(part), as_data(vars(part))
    if dataclasses.is_dataclass(part):
        return type(part), {field.name: as_data(getattr(part, field.name)) for field in dataclasses.fields(part)}
    if isinstance(part, dict):
        return {name: as_data(value) for name, value in part.items()}
    return tuple(map(as_data, part)) if isinstance(part, (tuple, list)) else part


class TestIsData:
    @pytest.mark.parametrize("warm", [False, True])
    def test_every_stage_says_why_and_applies_and_the_last_has_no_end(self, warm):
        for program in every_program():
            stages = plan(program, warm)
            assert isinstance(stages, tuple)
            for stage in stages:
                assert stage.why.strip()
                assert stage.algorithm.unmet_requirement(program) is None
            assert stages[-1].max_steps == math.inf
            assert type(stages[-1].algorithm) is Fista

    def test_is_frozen(self):
        stage = plan(make_program())[0]
        for part, name in ((stage, "max_steps"), (stage.polish, "wait"), (AutoConfig(), "costly_gram")):
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(part, name, 7)

    @pytest.mark.parametrize("warm", [False, True])
    def test_says_the_same_when_asked_twice(self, warm):
        for program in every_program():
            assert as_data(plan(program, warm)) == as_data(plan(program, warm))

    def test_does_not_depend_on_units(self):
        for program in every_program():
            if program.loss.of_residual and not isinstance(program.loss, Huber) and isinstance(program.map, DenseMap):
                data, y = 2.0**20 * program.map.data, 2.0**-10 * program.y
                other = dataclasses.replace(program, map=DenseMap(data), y=y, alpha=2.0**10 * program.alpha)
                assert as_data(plan(other)) == as_data(plan(program))

    def test_numbers_are_those_of_the_solver(self):
        program = independent_program()
        auto = Auto(dataclasses.replace(PLAIN, steps=7))
        stages = plan(program, config=auto.config)
        assert [stage.max_steps for stage in stages if isinstance(stage.algorithm, Admm)][-1] == 7
        state = auto.init(program, null_point(program))
        assert as_data((state.running.stage, *state.later)) == as_data(stages)


class TestDecisionList:
    """Each point of the list in the docstring of ``plan``."""

    def test_1_the_constant_from_alpha_max_on(self):
        for program in every_program():
            largest = program.with_alpha(program.alpha_max)
            assert algorithms(largest)[0] is Constant
            assert Constant not in algorithms(largest.with_alpha(0.99 * largest.alpha))

    @pytest.mark.parametrize("penalty", PENALTY_NAMES)
    def test_2_unbounded_curvature(self, penalty):
        program = make_program("poisson", penalty, n=40)
        by_output = SemismoothNewton().unmet_requirement(program) is None
        newton = [SemismoothNewton, Fista] if by_output else []
        assert algorithms(program) == [Fista, SmoothingNewton, Fista, *newton]
        assert algorithms(program, PLAIN)[0] is algorithms(program, PLAIN)[-1] is Fista

    def test_2_newton_steps_of_each_output_where_those_of_all_are_too_dear(self):
        program = make_program("poisson", n=40)
        assert algorithms(program, PLAIN) == [Fista, SemismoothNewton, Fista]
        assert algorithms(program, dataclasses.replace(PLAIN, largest_side=5)) == [Fista]

    def test_2_curvatures_without_bound_that_jump(self):
        class Jumping(Poisson):
            smooth_curvature = False

        program, large = make_program("poisson", n=40), dataclasses.replace(PLAIN, least_single=0)
        dependent = dataclasses.replace(program, map=DenseMap(program.map.data + 10 * randn(40, 1, 1)))
        assert algorithms(dependent, large)[0] is MetricGradient
        assert MetricGradient not in algorithms(dependent, PLAIN)
        for smooth in (dependent, dataclasses.replace(program, map=OnDisk(program.map))):
            assert MetricGradient in algorithms(smooth, large)
            assert MetricGradient not in algorithms(dataclasses.replace(smooth, loss=Jumping()), large)

    def test_2_gradient_steps_have_a_share_of_the_time_of_newton_steps(self):
        program = make_program("poisson", n=40)
        dependent = dataclasses.replace(program, map=DenseMap(program.map.data + 10 * randn(40, 1, 1)))

        def gradient_steps(share, program=dependent, **options):
            config = AutoConfig(newton_share=share, steps=10**9, **options)
            return [stage.max_steps for stage in plan(program, config=config) if isinstance(stage.algorithm, Fista)]

        many, twice = gradient_steps(1e5), gradient_steps(2e5)
        assert many[0] > AutoConfig.first_steps < many[1]
        assert twice == [2 * many[0], 2 * many[1], math.inf]
        # Steps in a metric count, and take the place of all where these are few.
        assert gradient_steps(1e5, least_single=0) == [many[0] - AutoConfig.first_steps, *many[1:]]
        assert gradient_steps(0.0) == [AutoConfig.first_steps, AutoConfig.first_steps, math.inf]
        assert gradient_steps(0.0, least_single=0) == [AutoConfig.first_steps, math.inf]

    def test_2_nearly_independent_features_take_no_metric(self):
        program, large = independent_program("poisson", 1), dataclasses.replace(PLAIN, least_single=0)
        assert MetricGradient not in algorithms(program, large)

    def test_3_penalties_that_are_no_sum_over_blocks(self):
        assert algorithms(sequence_program()) == [Fista]

    @pytest.mark.parametrize("loss", ["squared", "logistic", "huber", "softmax"])
    def test_4_nearly_independent_features(self, loss):
        c = 3 if loss == "softmax" else 1
        for warm in (False, True):  # paths, too
            first = plan(independent_program(loss, c), warm)[0]
            assert inside(first) is GreedyFista
            assert isinstance(first.algorithm.inner.algorithm, GreedyFista)
            assert any(isinstance(reduction, SinglePrecision) for reduction in first.reductions)
            assert first.patience is not None
            other = plan(correlated_program(loss, c=c), warm)
            assert not any(isinstance(stage.algorithm, WorkingSet) and inside(stage) is GreedyFista for stage in other)

    def test_4_uneven_features_where_the_regularisation_is_strong(self):
        # Slightly dependent: only as long as few steps are enough.
        program = independent_program()
        uneven = AutoConfig(independent=0.0)
        strong, weak = (program.with_alpha(ratio * program.alpha_max) for ratio in (0.3, 1e-3))
        assert algorithms(strong, uneven)[0] is WorkingSet
        assert inside(plan(strong, config=uneven)[0]) is GreedyFista
        assert all(
            inside(stage) is not Fista for stage in plan(weak, config=uneven) if isinstance(stage.algorithm, WorkingSet)
        )

    def test_4_on_a_working_set_where_there_are_many_more_features_than_samples(self):
        wide, narrow = independent_program(blocks=1200, d=1), independent_program(n=480)
        for program, on_some in ((wide, True), (narrow, False)):
            first = plan(program)[0]
            assert inside(first) is GreedyFista
            n_features = math.prod(program.map.feature_shape)
            assert (first.algorithm.config.columns < n_features) == on_some

    @pytest.mark.parametrize(
        ("c", "penalty", "inner"), [(1, "group_l2", BlockDescent), (3, "group_l2", Admm), (3, "nuclear", Admm)]
    )
    def test_5_a_costly_gram_matrix(self, c, penalty, inner):
        program, costly = correlated_program(penalty=penalty, c=c), AutoConfig(costly_gram=1.0, calls=1)
        for warm in (False, True):
            assert inside(plan(program, warm, costly)[0]) is inner
            assert plan(program, warm, costly)[0].max_steps == math.inf
        assert WorkingSet not in algorithms(program, PLAIN)

    def test_5_a_gram_matrix_in_less_time_than_a_step_leaves_nothing_to_a_working_set(self):
        program = correlated_program(c=3, n=300, blocks=60)
        share = program.map.gram_work() / admm_work(program, AutoConfig(calls=0))
        assert share > 1
        for times, found in ((0.5, True), (2.0, False)):
            per_call = admm_work(program, AutoConfig(calls=1)) - admm_work(program, AutoConfig(calls=0))
            n_calls = math.ceil(times * (program.map.gram_work() - admm_work(program, AutoConfig(calls=0))) / per_call)
            assert (WorkingSet in algorithms(program, AutoConfig(costly_gram=1.0, calls=n_calls))) == found

    @pytest.mark.parametrize("blocks", [3, 40, 150])
    def test_5_block_descent_for_as_long_as_alternating_directions_would_take(self, blocks):
        program, config = correlated_program(n=700, blocks=blocks), AutoConfig()
        assert BlockDescent not in map(inside, sets_of(correlated_program(n=blocks, blocks=150), config))
        first = plan(program, config=config)[0]
        assert inside(first) is BlockDescent
        n_steps = first.algorithm.config.block_steps
        seconds = config.block_calls * program.map.rates.work_of_a_call * n_steps
        gram = program.map.gram_work() + program.map.smaller_side**3 / 3
        assert seconds == pytest.approx(gram + config.usual_steps * admm_work(program, config))
        # Where it is slow it costs no more than that, and others end.
        weak = program.with_alpha(1e-4 * program.alpha_max)
        auto = Auto(config)
        state = auto.init(weak, null_point(weak))
        while isinstance(state.running.stage.algorithm, WorkingSet):
            n_block_steps = state.running.inner.block_steps
            state = auto.step(weak, state)
        assert n_block_steps <= n_steps + blocks
        assert solve(weak, auto, tol=1e-6).status is Status.CONVERGED

    def test_5_steps_in_a_metric_of_low_rank_end_before_a_costly_gram_matrix_is_formed(self):
        few = dataclasses.replace(PLAIN, costly_gram=1.0, gradient_steps=0.1)
        for loss, c in (("logistic", 1), ("huber", 3), ("squared_hinge", 1)):
            program = correlated_program(loss, c=c, n=700)
            for warm in (False, True):
                first = plan(program, warm, few)[0]
                assert isinstance(first.algorithm, MetricGradient)
                assert first.max_steps < math.inf
            other = dataclasses.replace(few, gradient_steps=100.0)  # a weak alpha needs too many of them
            assert MetricGradient not in algorithms(program, other)
            assert MetricGradient not in algorithms(program, PLAIN)
        assert MetricGradient not in algorithms(independent_program("logistic", n=700), few)

    def test_5_steps_in_a_metric_of_low_rank_count_more_than_once_for_other_programs(self):
        def config(program, share):
            """One by which so many times the gradient steps of independent features take as long as a Gram matrix."""
            n_steps = gradient_steps_of_admm(program, PLAIN, PLAIN.calls)
            size = program.null_dual_norms.median() / program.alpha
            return dataclasses.replace(PLAIN, costly_gram=1.0, gradient_steps=n_steps / (share * float(size.sqrt())))

        usual = correlated_program("logistic", n=700)
        assert MetricGradient in algorithms(usual, config(usual, 2.1))
        for program, times in (
            (correlated_program("squared", c=2, n=700), 3),
            (correlated_program("logistic", n=500), 3),  # fewer samples than features
            (correlated_program("softmax", c=3, n=700), 6),
        ):
            assert MetricGradient not in algorithms(program, config(program, 2 * times - 0.1))
            found = algorithms(program, config(program, 2 * times + 0.1))
            assert found.index(MetricGradient) < found.index(Admm)
        # The squared loss has block descent first, which knows that few blocks are active.
        program = correlated_program("squared", n=700)
        found = algorithms(program, dataclasses.replace(config(program, 6.1), block_calls=1.0))
        assert found.index(WorkingSet) < found.index(MetricGradient) < found.index(Admm)

    @pytest.mark.parametrize("loss", ["squared", "logistic", "huber"])
    def test_5_paths(self, loss):
        program = correlated_program(loss)
        assert inside(plan(program, warm=True, config=PLAIN)[0]) is Admm
        assert WorkingSet not in algorithms(program, PLAIN)
        assert WorkingSet not in algorithms(correlated_program("softmax", c=3), PLAIN, warm=True)

    @pytest.mark.parametrize("loss", ["logistic", "softmax"])
    def test_6_a_gram_matrix_too_large_to_factorise(self, loss):
        program = correlated_program(loss, c=3)
        assert algorithms(program, dataclasses.replace(PLAIN, largest_side=119)) == [MetricGradient, Fista]
        assert Admm in algorithms(program, dataclasses.replace(PLAIN, largest_side=120))

    @pytest.mark.parametrize("loss", ["squared", "huber", "logistic", "softmax"])
    def test_6_takes_fewer_steps_than_gradient_steps_alone(self, loss):
        data = randn(400, 45, 3) + 2 * randn(400, 1, 3, seed=1)
        for block in range(1, 45):
            data[:, block] = 0.5 * data[:, block - 1] + data[:, block]
        y = get_loss(loss).example_target(400, 3, torch.Generator().manual_seed(2))
        program = Program(DenseMap(data), y, get_loss(loss), get_penalty("group_l2"), 1.0, fit_intercept=True)
        program, config = program.with_alpha(0.1 * program.alpha_max), dataclasses.replace(PLAIN, largest_side=119)
        steps, gradient_steps = solve(program, Auto(config), tol=1e-6), solve(program, Fista(), tol=1e-6)
        assert 3 * steps.n_iter <= gradient_steps.n_iter
        assert steps.certificate.primal == pytest.approx(gradient_steps.certificate.primal, rel=1e-5)

    def test_6_slightly_dependent_features_take_gradient_steps(self):
        for program, expected in (
            (independent_program(n=300), [Fista]),
            (correlated_program(), [MetricGradient, Fista]),
        ):
            uneven = dataclasses.replace(PLAIN, largest_side=119, independent=0.0, gradient_steps=0.0)
            assert algorithms(program, uneven) == expected

    def test_6_working_sets_are_narrower(self):
        program = correlated_program(n=1200, blocks=400)
        config = AutoConfig(costly_gram=1.0, largest_side=1199, usual_steps=4)
        steps = 2 * config.usual_steps * program.map.product_work(1)
        (widest,) = (
            stage.algorithm.config.largest_width
            for stage in plan(program, config=config)
            if isinstance(stage.algorithm, WorkingSet)
        )
        assert widest == pytest.approx(math.sqrt(steps / 1200))
        assert widest < 1199 / 2

    def test_7_targets_far_out_on_the_linear_parts_of_the_loss(self):
        program = far_targets()
        assert program.tail_length > AutoConfig().long_tails
        assert algorithms(program)[:2] == [SmoothingNewton, ProximalDual]
        assert algorithms(program, AutoConfig(steps=1))[0] is ProximalDual  # Newton steps would take longer
        assert ProximalDual not in algorithms(program, AutoConfig(long_tails=1.01 * program.tail_length))
        near = dataclasses.replace(program, y=1e-3 * program.y)
        assert ProximalDual not in algorithms(near)

    def test_7_proximal_steps_come_first_with_fewer_samples_than_features(self):
        few, config = far_targets().rows(torch.arange(14)), AutoConfig(first_steps=1)  # Newton steps take longer
        assert algorithms(few, config)[:3] == [ProximalDual, SmoothingNewton, ProximalDual]
        assert algorithms(far_targets(), config)[:2] == [SmoothingNewton, ProximalDual]
        assert algorithms(few)[:2] == [SmoothingNewton, ProximalDual]

    def test_8_alternating_directions_in_single_and_then_in_double_precision(self):
        program = correlated_program()
        assert algorithms(program, PLAIN) == [Admm, Fista]
        single, double = plan(program, config=dataclasses.replace(PLAIN, least_single=0))[:2]
        assert (type(single.algorithm), type(double.algorithm)) == (Admm, Admm)
        assert any(isinstance(reduction, SinglePrecision) for reduction in single.reductions)
        assert not any(isinstance(reduction, SinglePrecision) for reduction in double.reductions)
        assert double.carries
        assert not single.carries
        # They share their steps.
        assert single.max_steps == double.max_steps == PLAIN.steps

    def test_9_newton_steps_on_smoothed_objectives_by_what_they_cost(self):
        program, newton = correlated_program("squared_hinge", n=60, blocks=5), SmoothingNewton
        assert newton not in algorithms(program, PLAIN)
        early, late = (plan(program, config=dataclasses.replace(PLAIN, newton_share=share)) for share in (0.01, 10.0))
        assert [type(stage.algorithm) for stage in early] == [type(stage.algorithm) for stage in late]
        assert [type(stage.algorithm) for stage in early] == [Admm, newton, SemismoothNewton, Admm, Fista]
        assert early[0].max_steps == PLAIN.first_steps < late[0].max_steps < PLAIN.steps
        assert newton not in algorithms(program, dataclasses.replace(PLAIN, newton_share=10.0, steps=100))
        assert newton in algorithms(program)
        squared = correlated_program(n=60, blocks=5)
        assert plan(squared, config=dataclasses.replace(PLAIN, newton_share=0.01))[0].max_steps == PLAIN.few_steps

    def test_10_at_greater_length_and_gradient_steps_without_end(self):
        first, last = plan(correlated_program(), config=PLAIN)
        assert first.max_steps == PLAIN.steps
        assert type(last.algorithm) is Fista
        assert last.max_steps == math.inf
        # Gradient steps do not mind outputs that are coupled.
        assert algorithms(correlated_program("softmax", c=3), PLAIN) == [Admm, Fista, Admm, Fista]


def machine(monkeypatch, work_of_a_read, work_of_a_call=2.0**16):
    product = 2.0**35
    rates = Rates(product, product / work_of_a_read, product / work_of_a_call)
    monkeypatch.setattr(base, "machine_rates", lambda dtype=None, device=None: rates)


@functools.cache  # alternating directions ask for no rates
def programs_with_optima():
    programs = [correlated_program(), independent_program(), correlated_program("softmax", c=3)]
    return [(program, solve(program, Admm(), tol=1e-6).certificate.primal) for program in programs]


class TestMachines:
    """What a machine does in a second decides."""

    @pytest.mark.parametrize(("c", "penalty"), [(1, "group_l2"), (3, "group_l2"), (3, "nuclear")])
    def test_one_that_multiplies_matrices_fast_forms_the_gram_matrix_of_all_features(self, monkeypatch, c, penalty):
        program = correlated_program(penalty=penalty, c=c, n=300, blocks=200)
        machine(monkeypatch, work_of_a_read=2.0)
        assert algorithms(program)[0] is WorkingSet
        machine(monkeypatch, work_of_a_read=64.0)
        assert WorkingSet not in algorithms(program)

    def test_one_whose_calls_take_long_takes_newton_steps_of_many_outputs_later(self, monkeypatch):
        # Outputs that are solved by themselves are calls for each of them.
        program = correlated_program(c=60, n=60, blocks=5)
        machine(monkeypatch, work_of_a_read=8.0, work_of_a_call=1.0)
        early = plan(program)[0].max_steps
        machine(monkeypatch, work_of_a_read=8.0, work_of_a_call=2.0**40)
        assert early < plan(program)[0].max_steps

    @pytest.mark.parametrize("work_of_a_read", [1.0, 8.0, 64.0, 512.0])
    @pytest.mark.parametrize("work_of_a_call", [2.0**10, 2.0**16, 2.0**22])
    def test_every_machine_finds_the_same_optimum(self, monkeypatch, work_of_a_read, work_of_a_call):
        for program, expected in programs_with_optima():
            machine(monkeypatch, work_of_a_read, work_of_a_call)
            result = solve(program, Auto(), tol=1e-6)
            assert result.certificate.relative_gap <= 1e-6
            assert result.certificate.primal == pytest.approx(expected, abs=2e-6 * program.null_value)
