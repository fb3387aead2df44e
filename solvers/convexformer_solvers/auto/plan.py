"""The plan of the default solver: which algorithms run on a program, in which order, and why."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import torch

from convexformer_solvers.algorithms.admm import Admm, AdmmConfig
from convexformer_solvers.algorithms.block_descent import BlockDescent
from convexformer_solvers.algorithms.constant import Constant
from convexformer_solvers.algorithms.few_passes import (
    BatchConfig,
    Batched,
    GramMetrics,
    LowRankMetrics,
    MetricGradient,
    Metrics,
)
from convexformer_solvers.algorithms.few_passes.metric import outputs_apart
from convexformer_solvers.algorithms.fista import Fista, GreedyFista
from convexformer_solvers.algorithms.polish import PolishConfig
from convexformer_solvers.algorithms.proximal_dual import ProximalDual
from convexformer_solvers.algorithms.semismooth_newton import SemismoothNewton
from convexformer_solvers.algorithms.smoothing_newton import SmoothingNewton
from convexformer_solvers.algorithms.stage import Patience, Stage
from convexformer_solvers.algorithms.working_set import WorkingSet, WorkingSetConfig
from convexformer_solvers.linalg.eigenvalue_ratio import eigenvalue_ratio, some_samples_tell
from convexformer_solvers.linalg.newton_systems import newton_work
from convexformer_solvers.program import Program
from convexformer_solvers.reductions.center import Center
from convexformer_solvers.reductions.moments import Moments, moments_of
from convexformer_solvers.reductions.precision import BothPrecisions, SinglePrecision
from convexformer_solvers.reductions.weights import Targets
from convexformer_solvers.rounding import EPS, SINGLE

from .config import AutoConfig
from .cost import (
    admm_work,
    block_numbers,
    block_steps_of_admm,
    factor_work,
    gradient_steps_of_admm,
    gradient_steps_of_gram,
    products_of_gram,
)


def plan(program: Program, warm: bool = False, config: AutoConfig | None = None) -> tuple[Stage, ...]:
    """The stages that ``Auto`` takes on a program, one after the other, until its gap is within the tolerance.

    The decision list. The stages of all points that apply follow each other in this order.

    1. ``alpha`` from ``alpha_max`` on: the best constant model, which is the solution.
    2. Data that are not held in memory: the stages of this point and no other. With fewer samples than features, more
       features than 500 and room for the samples' Gram matrix: 12 steps in a metric of low rank, 24 where its rank is
       that of the data, alternating directions and semismooth Newton steps, each where they apply. Otherwise, where
       there is room for Gram matrices of the features, the squared loss takes the plan of the program that one pass
       leads to (``Moments``), and other losses take steps in the metric of a Gram matrix (``MetricGradient``). A
       working set comes before ``Moments`` where the Gram matrix of all features takes as long as many passes, and few
       blocks violate the dual constraint at zero; not along a path, of which that matrix serves every ``alpha``. Where
       there is no room for these Gram matrices, all losses take steps in a metric of low rank. Then gradient steps.
    3. A loss of unbounded curvature (Poisson): the stages of this point and no other. Large data whose features are
       more than slightly dependent take steps in a metric of low rank. Then gradient steps and Newton steps on smoothed
       objectives, gradient steps and semismooth Newton steps, each pair where its Newton steps apply, and gradient
       steps without end. Gradient steps before Newton steps take a fifth of the time of these. Steps in the metric
       count as the first of them. A penalty that is no sum over blocks: gradient steps alone.
    4. Features that are nearly independent, for this ``alpha``: greedy gradient steps in single precision, for as long
       as a Gram matrix would take. They begin on a working set where samples are at most ``set_width`` times as many as
       features.
    5. Squared loss with one output and the group-l2 penalty: block descent on a working set, for as long as alternating
       directions would take, if there are at least as many samples as features or the Gram matrix is very costly. Other
       programs of the squared loss with a costly Gram matrix, which takes longer than a step of alternating directions:
       these on a working set. Features that are more than slightly dependent and a costly Gram matrix: steps in a
       metric of low rank, if ``alpha`` is strong enough for few of them, after working sets if the loss is squared and
       before them if not. Along a path all programs of losses that do not couple the outputs take a working set.
    6. A Gram matrix too large to factorise: steps in a metric of low rank, where the features are more than slightly
       dependent, then gradient steps, and no later point.
    7. A loss whose targets lie far out on its linear parts (Huber) and a Gram matrix that can be factorised, in place
       of points 4 and 5: Newton steps on smoothed objectives, which smooth the loss, too, and then proximal steps in
       the dual. With fewer samples than features proximal steps also come before Newton steps, unless these take as
       little time as ``first_steps`` alternating directions.
    8. Alternating directions, on large data in single and then in double precision, until they have taken a fifth of
       the time of Newton steps: 80 steps at least, with the squared loss 400. Where there are no Newton steps, a loss
       that couples the outputs takes 400, other losses take 80, and the squared loss takes none.
    9. Newton steps on smoothed objectives, unless point 8 would take more than ``steps`` before them. Then gradient
       steps where the loss couples the outputs, and semismooth Newton steps where they apply to another loss that is
       not quadratic.
    10. Alternating directions at greater length, and gradient steps without end.

    Parameters
    ----------
    program : Program
        Samples of positive weight, targets in float64.
    warm : bool, default=False
        Whether the start is the solution at another ``alpha`` of a path.
    config : AutoConfig, optional
        Numbers that decide. Default: those of ``AutoConfig``.

    Returns
    -------
    tuple of Stage
        Each says why it is there.

    Examples
    --------
    >>> import torch
    >>> from convexformer_solvers import DenseMap, GroupL2, Program, Squared
    >>> data = torch.randn(50, 3, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    >>> program = Program(DenseMap(data), data[:, 0, :1], Squared(), GroupL2(), alpha=0.1)
    >>> [stage.algorithm.name for stage in plan(program)]
    ['working_set(block_descent)', 'admm', 'smoothing_newton', 'admm', 'fista']
    """
    return tuple(_Planner(program, warm, config or AutoConfig()).stages())


class _Planner:
    """The decision list of ``plan`` on one program."""

    def __init__(self, program: Program, warm: bool, config: AutoConfig) -> None:
        self.program, self.warm, self.config = program, warm, config
        self.single_moments = program.map.dtype == torch.float32
        self.factorises = program.map.smaller_side <= config.largest_side
        self.more_features = program.map.smaller_side < math.prod(program.map.feature_shape)  # than samples
        self.takes_gram = not program.map.in_memory and self._room_for_gram() and not self._room_for_kernel()
        # On all features a polish costs more than on a working set.
        self.seldom = PolishConfig(wait=2 * PolishConfig.wait)
        self.newton_time = self._newton_time()
        self.n_before_newton = self._steps_before(self.newton_time)
        self.takes_newton = self.n_before_newton <= config.steps

    def stages(self) -> Iterator[Stage]:
        """The stages of all points of the list that apply."""
        program = self.program
        set_before_gram = list(self._set_before_gram())
        if self.takes_gram and program.loss.quadratic and not set_before_gram:
            moments_of(program, self.single_moments)  # gives alpha_max, too
        if program.alpha >= (1 - 8 * EPS) * program.alpha_max:
            yield Stage(Constant(), "alpha is at least alpha_max: the solution is zero")
        if not program.map.in_memory:
            yield from set_before_gram
            yield from self._few_passes()
            yield self._gradient_steps("the data are not held in memory: these make no copy")
            return
        if not math.isfinite(program.loss.smoothness):
            yield from self._unbounded_curvature()
            return
        if not program.penalty.block_separable:  # the size of groups says nothing of a good rho
            yield self._gradient_steps("the penalty is no sum over blocks")
            return
        if self.factorises and program.tail_length > self.config.long_tails:
            yield from self._long_tails()
        else:
            yield from self._first_stages()
        if self.factorises:
            yield from self._alternating()
        elif self._dependent():
            why = "the Gram matrix is too large to factorise, and far from a multiple of the identity"
            yield from self._low_rank(why, self.config.steps)
        yield self._gradient_steps("nothing else has ended before")

    def _set_before_gram(self) -> Iterator[Stage]:
        """A working set, where its Gram matrix takes a pass and that of all features the time of many."""
        program, config = self.program, self.config
        if not (self.takes_gram and program.loss.quadratic and program.penalty.block_separable):
            return
        *blocks, width, n_outputs = program.coef_shape
        if self.warm or program.map.passes_of_gram(n_outputs) < config.costly_gram / 3:  # one matrix serves a path
            return
        norms = program.null_dual_norms.reshape(math.prod(blocks), -1).amax(1)
        if int((norms > program.alpha).sum()) * width > config.set_width * program.map.smaller_side:
            return
        of_a_pass = math.sqrt(program.map.product_work(n_outputs) / program.map.n_samples)
        sets = WorkingSetConfig(int(of_a_pass), growth=1.0, decrease=SINGLE, widest=config.set_width, form="root")
        inner = Stage(self._batched(config, sets.decrease), "solves the set")
        why = "few blocks can be active: one pass for their Gram matrix, one to look at all blocks"
        yield Stage(WorkingSet(inner, sets), why, patience=Patience(steps=3))

    def _few_passes(self) -> Iterator[Stage]:
        """What needs few passes over data that are not held in memory."""
        inner = self._batched(self.config)
        if self.takes_gram and self.program.loss.quadratic:
            why = "one pass for the Gram matrix, which has all that the data say"
            if self.single_moments:
                n_steps = math.ceil(math.log(SINGLE) / math.log(inner.config.factor))
                yield Stage(inner, f"{why}, in single precision", n_steps, (Moments(single=True),))
            yield Stage(inner, why, reductions=(Moments(),))
        elif self.takes_gram:
            why = "one pass for each step in the metric of a Gram matrix"
            yield from self._metric_steps(GramMetrics(self._batched(self._of_models())), why, self.config.steps)
        else:
            if self._room_for_kernel():
                yield from self._few_samples()
            yield from self._low_rank("there is no room for Gram matrices", self.config.steps)

    def _few_samples(self) -> Iterator[Stage]:
        """What ends before steps in a metric where the Gram matrix of the samples has room, in a pass or several."""
        stages = [dataclasses.replace(stage, patience=Patience()) for stage in self._outputs_apart_newton()]
        if Admm().unmet_requirement(self.program) is None:
            why = "there is room for the Gram matrix of few samples, in a pass for some of the features each"
            stages.insert(0, Stage(Admm(), why, self.config.few_steps, (Center(),), self.seldom))
        if stages:  # else the same steps follow, without a new metric
            exact = self._rank() >= self.program.map.n_samples
            n_steps = self.config.usual_steps // (1 if exact else 2)
            yield from self._low_rank("few directions may be all that count", n_steps)
        yield from stages

    def _batched(self, config: AutoConfig, factor: float = BatchConfig.factor) -> Batched:
        """The default solver on programs without data, in steps that each lower the gap by a factor."""
        from .solver import Auto  # which goes by this plan

        return Batched(Auto(config), BatchConfig(factor))

    def _of_models(self) -> AutoConfig:
        """Numbers for the minima of models: no block descent, which is less exact, for cheap factors."""
        n_products = factor_work(self.program) / self.program.map.product_work(1)
        return self.config if n_products > 2 else dataclasses.replace(self.config, block_calls=math.inf)

    def _low_rank(self, why: str, n_steps: float) -> Iterator[Stage]:
        """Steps in a metric of low rank, where there is room for it."""
        if rank := self._rank():
            yield from self._metric_steps(LowRankMetrics(rank), f"{why}: steps in a metric of low rank", n_steps)

    def _metric_steps(self, metrics: Metrics, why: str, n_steps: float) -> Iterator[Stage]:
        steps = MetricGradient(metrics)
        if steps.unmet_requirement(self.program) is None:
            yield Stage(steps, why, n_steps, (BothPrecisions(),))

    def _rank(self) -> int:
        """The rank of a metric that is formed in the time of a few steps, and for which there is room."""
        program, config, k = self.program, self.config, outputs_apart(self.program, joined=False)
        (n_samples, *shape), limit = program.map.shape, program.map.memory_limit or math.inf
        p = math.prod(shape)
        matrices, passed = config.gram_copies * p * program.y.element_size(), n_samples * program.map.dtype.itemsize
        room = limit / (k * (matrices + 3 * passed))  # predictions, in float64 again where squares overflow
        # The more steps a metric takes to form, the fewer follow: least in all where both are as many.
        n_steps = math.sqrt(config.usual_steps * k)
        in_time = n_steps * program.map.product_work(k) / ((1 + k) * n_samples * p)
        # From there on the smallest eigenvalue, which stands for all others, is zero as these are.
        exact = n_samples + (not program.fit_intercept)
        return int(min(room, in_time, exact, p))

    def _room_for_gram(self) -> bool:
        """Whether Gram matrices of the features, of all outputs that the loss couples, are small enough."""
        program, config = self.program, self.config
        loss, limit = program.loss, program.map.memory_limit or math.inf
        n_outputs = outputs_apart(program, joined=True)
        side, n_parts = math.prod(program.map.feature_shape), n_outputs if loss.output_separable else 1
        side *= n_outputs // n_parts
        size = config.gram_copies * n_parts * program.y.element_size() * side**2
        return side <= config.largest_side and size <= limit

    def _room_for_kernel(self) -> bool:
        """Whether systems are solved in the samples, and their Gram matrix and a block's columns are small enough."""
        n_samples, *_, width = self.program.map.shape
        n_copies = 2 * self.config.gram_copies // 3  # what solves in the samples takes fewer
        size = self.program.y.element_size() * n_samples * max(n_copies * n_samples, width)
        in_samples = self.more_features and some_samples_tell(self.program)
        return in_samples and self.factorises and size <= (self.program.map.memory_limit or math.inf)

    def _long_tails(self) -> Iterator[Stage]:
        """Newton steps on smoothed losses, then proximal steps in the dual; these also before where few are enough."""
        inner = Stage(Admm(), "solves each proximal step", reductions=(Center(),), polish=self.seldom)
        proximal = Stage(ProximalDual(inner), "the targets are far out on the linear parts of the loss")
        if self.takes_newton and self.more_features and self.newton_time > self.config.first_steps:
            yield dataclasses.replace(proximal, max_steps=self.n_before_newton)
        yield from self._newton(self.config.few_steps)
        yield dataclasses.replace(proximal, max_steps=self.config.steps)

    def _first_stages(self) -> Iterator[Stage]:
        """What may end before a Gram matrix of all features is formed and factorised."""
        program, coupled = self.program, not self.program.loss.output_separable
        looks = some_samples_tell(program) if coupled else products_of_gram(program) > self.config.costly_gram / 3
        if looks and self._nearly_independent():
            yield self._greedy_steps()
        if not program.loss.quadratic:
            yield from self._soon_in_low_rank()
        if not coupled:
            yield from self._working_set()
        if program.loss.quadratic:
            yield from self._soon_in_low_rank()

    def _greedy_steps(self) -> Stage:
        """Greedy gradient steps, on a set of blocks where that is much smaller than all of them."""
        n_samples, (*blocks, width, _), config = self.program.map.n_samples, self.program.coef_shape, self.config
        n_features = math.prod(blocks) * width
        columns = n_samples + width if n_samples <= config.set_width * n_features else n_features
        sets = WorkingSetConfig(
            columns, wait=self.seldom.wait, widest=config.set_width, form="samples", ends_in_all=True
        )
        return Stage(
            WorkingSet(Stage(GreedyFista(power_steps=2), "takes the steps"), sets),
            "the features are nearly independent: gradient steps end before a Gram matrix is factorised",
            reductions=(Center(), SinglePrecision()),
            polish=PolishConfig(wait=1),
            patience=Patience(grace=gradient_steps_of_admm(self.program, config)),
        )

    def _nearly_independent(self) -> bool:
        """Whether the features are so nearly independent, for this ``alpha``, that gradient steps end soonest."""
        program, config = self.program, self.config
        found = eigenvalue_ratio(program)
        if not found <= max(config.independent, AdmmConfig.independent):
            return False
        even = found <= config.independent
        if not program.loss.output_separable or (even and not program.loss.quadratic):
            return True
        if self._steps_if_independent() * (1 if even else 2) > gradient_steps_of_admm(program, config):
            return False
        return even or self._median_size() <= config.gradient_steps

    def _soon_in_low_rank(self) -> Iterator[Stage]:
        """Steps in a metric of low rank, where they end before a costly Gram matrix of all features is formed."""
        program, config = self.program, self.config
        if products_of_gram(program) < config.costly_gram:
            return
        n_steps = gradient_steps_of_admm(program, config, config.calls)
        # The squared loss and few samples need few alternating directions, and coupled outputs many metric steps: these
        # count 6 times, and 12 times with few samples.
        factor = 3 if program.loss.quadratic or self.more_features else 1
        if not program.loss.output_separable:
            factor = 3 * (factor + 1)
        if 2 * factor * self._steps_if_independent() <= n_steps and self._dependent():
            yield from self._low_rank("the Gram matrix of all features takes longer", n_steps)

    def _dependent(self) -> bool:
        """Whether the features are more than slightly dependent."""
        return eigenvalue_ratio(self.program) > AdmmConfig.independent

    def _steps_if_independent(self) -> float:
        """Gradient steps that independent features take."""
        return self.config.gradient_steps * math.sqrt(self._median_size())

    def _median_size(self) -> float:
        """Median dual norm of the groups at zero, over ``alpha``."""
        return float(self.program.null_dual_norms.median()) / self.program.alpha

    def _working_set(self) -> Iterator[Stage]:
        program, config = self.program, self.config
        blocks, largest, widest = BlockDescent(), self._widest_set(), config.set_width
        n_products, n_steps = products_of_gram(program), block_steps_of_admm(program, config)
        costly = n_products >= config.costly_gram
        longer_than_a_step = program.map.gram_work() > admm_work(program, config)
        # Few samples have a Gram matrix of their own, which is soon formed.
        pays = n_steps >= 1 and (not self.more_features or n_products >= 2 * config.costly_gram)
        if pays and blocks.unmet_requirement(program) is None:
            why = "few blocks are active as a rule: block descent on these, for as long as others would take"
            sets = WorkingSetConfig(
                widest=widest if costly and not self.more_features else 1.0,
                largest_width=largest,
                single=program.map.n_stored >= config.least_single,
                block_steps=n_steps,
            )
            yield Stage(WorkingSet(Stage(blocks, "solves the set"), sets), why, reductions=(Center(),))
        elif program.loss.quadratic and costly and longer_than_a_step:
            inner = Stage(Admm(), "solves the set", reductions=(Center(),), polish=PolishConfig())
            sets = WorkingSetConfig(widest=widest, largest_width=largest, form="root")
            yield Stage(WorkingSet(inner, sets), "the Gram matrix of all features is costly", reductions=(Center(),))
        elif self.warm:
            single = SinglePrecision(config.least_single)
            inner = Stage(Admm(), "solves the set", reductions=(Center(), single), polish=PolishConfig())
            sets = WorkingSetConfig(widest=widest, largest_width=largest, form="samples")
            why = "a path has few active blocks at first"
            yield Stage(WorkingSet(inner, sets), why, 2 * config.first_steps, (Center(),), PolishConfig())

    def _widest_set(self) -> float:
        """Columns of a working set, whose Gram matrix is formed sooner than steps in a metric of low rank end."""
        program, config = self.program, self.config
        steps = 2 * config.usual_steps * program.map.product_work(program.y.shape[1])
        return min(config.largest_side / 2, math.inf if self.factorises else math.sqrt(steps / program.map.n_samples))

    def _alternating(self) -> Iterator[Stage]:
        """Alternating directions, and Newton steps on smoothed objectives where they cost little enough."""
        loss, config = self.program.loss, self.config
        if self.takes_newton or not loss.quadratic:
            without_newton = config.first_steps if loss.output_separable else config.few_steps
            n_steps = self.n_before_newton if self.takes_newton else without_newton
            yield from self._in_both_precisions("first of all", n_steps)
        yield from self._newton(config.few_steps)
        if not loss.output_separable:
            yield self._gradient_steps("the loss couples the outputs: these do not mind", config.few_steps)
        elif not loss.quadratic:
            yield from self._outputs_apart_newton()
        yield from self._in_both_precisions("at greater length", self.config.steps)

    def _in_both_precisions(self, why: str, n_steps: float) -> Iterator[Stage]:
        program, polish = self.program, self.seldom
        single = SinglePrecision(self.config.least_single)
        # Rounding in float32 would leave groups that are not zero where the solution is.
        is_single = single.pays(program) and program.alpha < (1 - SINGLE) * program.alpha_max
        if is_single:
            reason = f"{why}, in single precision for as long as that leads on"
            yield Stage(Admm(), reason, n_steps, (Center(), single), polish, Patience())
        yield Stage(Admm(), f"{why}, in double precision", n_steps, (Center(),), polish, carries=is_single)

    def _unbounded_curvature(self) -> Iterator[Stage]:
        why, config = "the loss's curvature has no bound", self.config
        large, n_before = self.program.map.n_stored >= config.least_single, self.n_before_newton
        for stage in self._low_rank(why, config.first_steps) if large and self._dependent() else ():
            n_before -= config.first_steps
            yield stage
        if self.takes_newton:
            if n_before >= 1:
                yield self._gradient_steps(why, n_before)
            yield from self._newton(config.few_steps)
        for newton in self._outputs_apart_newton():
            of_newton = config.usual_steps * gradient_steps_of_gram(self.program)
            yield self._gradient_steps(why, min(self._steps_before(of_newton), config.steps))
            yield newton
        yield self._gradient_steps(f"{why}, and nothing else has ended before")

    def _outputs_apart_newton(self) -> Iterator[Stage]:
        """Semismooth Newton steps for each output by itself, where they apply."""
        newton = SemismoothNewton()
        if newton.unmet_requirement(self.program) is None and self.factorises:
            why = "Newton steps for each output by itself: few of them end where few groups are active"
            yield Stage(newton, why, self.config.first_steps)

    def _gradient_steps(self, why: str, n_steps: float = math.inf) -> Stage:
        return Stage(Fista(), why, n_steps, (Targets(of_map=True),))

    def _newton(self, n_steps: float) -> Iterator[Stage]:
        """Newton steps on smoothed objectives, unless they take too long."""
        if self.takes_newton:
            why = "Newton steps on smoothed objectives: few of them end where others are slow"
            yield Stage(SmoothingNewton(), why, n_steps)

    def _steps_before(self, newton_time: float) -> float:
        """First-order steps before Newton steps that take the time of so many."""
        config = self.config
        # With the squared loss they end by themselves as a rule.
        at_least = config.few_steps if self.program.loss.quadratic else config.first_steps
        return max(at_least, config.newton_share * newton_time)

    def _newton_time(self) -> float:
        """First-order steps in the time of Newton steps on smoothed objectives; inf where none apply."""
        program = self.program
        if SmoothingNewton().unmet_requirement(program) is not None or block_numbers(program) > Center.largest:
            return math.inf
        calls = 2 * self.config.calls * program.n_parts
        step = newton_work(program) + calls * program.map.rates.work_of_a_call
        return self.config.usual_steps * step / admm_work(program, self.config)
