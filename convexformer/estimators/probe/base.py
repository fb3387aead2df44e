"""What certified probes share: the dictionary, the program on pooled tokens, and explanations."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import is_classifier
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from convexformer.estimators.base import ConvexAttentionBase, Problem, ProgramParts, Start
from convexformer.estimators.path_result import PathResult
from convexformer.estimators.tokens import SavedState
from convexformer.nn.modules.base import copied_to
from convexformer.nn.modules.probe import ProbeNetwork, TokenPooler
from convexformer.preprocessing.checking import check_sequences, choose_samples
from convexformer.preprocessing.dictionary import factors_of, get_dictionary, make_pooler
from convexformer.preprocessing.moments import Moments
from convexformer.preprocessing.pooled import block_moments, pooled_map, pooled_predictions, scale_blocks
from convexformer.preprocessing.pooling import pooled, weights_of
from convexformer.preprocessing.sequences import TokenSequences
from convexformer.preprocessing.sharded import ShardedSequences
from convexformer.probes.explanation import Explanation
from convexformer.probes.generate import (
    DualPoint,
    Generation,
    GenerationReport,
    GenerationStop,
    WeightingRound,
    find_weightings,
    get_generation,
)
from convexformer.probes.growth import Growth
from convexformer.targets import LabelTargets, Targets
from convexformer.validation import Result, check_flag, check_stream, result_of
from convexformer_solvers import LinearMap, Path, Program, SolverResult, Status
from convexformer_solvers.io.checkpoint import PathFile
from convexformer_solvers.memory import as_bytes


@dataclass(frozen=True, kw_only=True)
class ProbeProblem(Problem):
    """A program on pooled tokens.

    Attributes
    ----------
    pooler : TokenPooler
        The dictionary.
    samples : TokenSequences
        The training samples.
    start : tuple of Tensor or None
        Coefficients and intercept to start from, and a dual point where there is one.
    """

    pooler: TokenPooler
    samples: TokenSequences
    start: Start | None = None

    def with_pooler(self, pooler: TokenPooler, linear_map: LinearMap, start: Start) -> ProbeProblem:
        """The problem of another dictionary."""
        return replace(self, program=self.program.with_map(linear_map), pooler=pooler, start=start)


@dataclass(eq=False, repr=False, kw_only=True)
class ConvexProbeBase(ConvexAttentionBase):
    """What probes share: the dictionary, the program on pooled tokens, and explanations."""

    _of_all_ranks = ShardedSequences

    dictionary: Any = "auto"
    generate: int | Generation | None = None
    standardize: bool = True
    activation = "linear"

    # Building the program

    def _check_model(self, is_grid: bool) -> None:
        get_dictionary(self.dictionary, longest=1)
        check_flag(self.standardize, "standardize")
        as_bytes(self.memory_limit)
        get_generation(self.generate)

    def _read_samples(self, X: Any, reset: bool, part: slice | None = None) -> TokenSequences:
        samples = check_sequences(self, X, reset, part)
        self._n_dims = 3
        return samples

    def _build(
        self, samples: Any, parts: ProgramParts, targets: Targets, sample_weight: NDArray[np.float64] | None
    ) -> ProbeProblem:
        stream = check_stream(self.random_state)
        before = stream.get_state()
        weight = None if parts.sample_weight is None else parts.sample_weight.numpy(force=True)
        lengths = samples.lengths.numpy(force=True)
        pooler = make_pooler(
            get_dictionary(self.dictionary, int((lengths if weight is None else lengths[weight > 0]).max())),
            samples,
            standardize=bool(self.standardize),
            random_state=stream,
            sample_weight=weight,
        )
        self._drawn = "" if all(map(np.array_equal, before, stream.get_state())) else "weightings"
        samples = samples.to(parts.target.device)
        pooler, linear_map = self._scaled(pooler, samples, parts.sample_weight)
        program = Program(linear_map, *parts.of_program)
        return ProbeProblem(program, targets, None, sample_weight, pooler=pooler, samples=samples)

    def _scaled(
        self, pooler: TokenPooler, samples: TokenSequences, weight: Tensor | None
    ) -> tuple[TokenPooler, LinearMap]:
        """The dictionary with its factors, where tokens are standardised, and the linear map of its program."""
        linear_map = self._map(pooler, samples)
        if self.standardize:
            own = None if weight is None else {"weight": weight}
            factors = factors_of(Moments.joined(linear_map.each_part(block_moments, own)))
            linear_map.each_part(scale_blocks, factors=factors)
            pooler = TokenPooler(pooler.weightings, pooler.mean, pooler.scale, factors)
        return pooler, linear_map

    def _map(self, pooler: TokenPooler, samples: TokenSequences) -> LinearMap:
        """The pooled tokens, in memory or, beyond the limit, in a file."""
        return samples.map_made(pooled_map, pooler=pooler, memory_limit=as_bytes(self.memory_limit))

    # Solving

    def _solve_path(self, X: Any, y: Any, sample_weight: Any, **options: Any) -> PathResult:
        if get_generation(self.generate) is not None:
            raise ValueError(
                f"generate={self.generate!r} depends on alpha, so a grid of alphas has no one program; leave it out"
            )
        return super()._solve_path(X, y, sample_weight, **options)

    def _path_result(self, problem: Problem, path: Path) -> PathResult:
        self.pooler_ = cast(ProbeProblem, problem).pooler  # of an estimator of the path's own
        return replace(super()._path_result(problem, path), pool=self.pool)

    def _start(self, problem: Problem) -> Start | None:
        own = cast(ProbeProblem, problem).start
        return super()._start(problem) if own is None else own

    def _fit_problem(self, problem: Problem, like: Any, file: PathFile | None = None) -> None:
        self.generation_: GenerationReport | None = None
        own, generation = cast(ProbeProblem, problem), get_generation(self.generate)
        growth = None if generation is None or file is None else _growth_of(file, generation.max_new)
        if growth is None:
            super()._fit_problem(own, like, file)
        if generation is not None:
            self._grow(own, generation, like, growth, file)

    def _grow(
        self, first: ProbeProblem, generation: Generation, like: Any, growth: Growth | None, file: PathFile | None
    ) -> None:
        """Add weightings while they lower the objective; after each round the estimator has the solution so far."""
        rounds: list[WeightingRound] = []
        self.generation_ = GenerationReport(rounds, generation.said(GenerationStop.INTERRUPTED))  # until it has ended
        problem = first
        if growth is None:
            stream = check_stream(self.random_state)
        else:
            stream = growth.stream
            rounds += growth.rounds
            pooler = first.pooler.extended(growth.added.weightings, growth.added.factors)
            problem = first.with_pooler(pooler, self._map(pooler, first.samples), growth.solution)
            super()._fit_problem(problem, like)
        end = GenerationStop.BUDGET
        while left := generation.max_new - sum(found.n_added for found in rounds):
            if self.status_ is Status.STOPPED:
                end = GenerationStop.STOPPED
                break
            n_before, certificate = problem.pooler.n_weightings, self.certificate_
            try:
                problem, violation = self._extended(problem, generation, left, stream)
            except KeyboardInterrupt as interruption:
                how = "" if file is None else f"; repeat the call with resume={str(file.path)!r} to continue"
                raise KeyboardInterrupt(
                    f"interrupted in the search for weightings of round {len(rounds) + 1}; the estimator has the "
                    f"certified solution so far{how}"
                ) from interruption
            n_added = problem.pooler.n_weightings - n_before
            rounds.append(WeightingRound(n_before, certificate.primal, certificate.dual, violation, n_added))
            if n_added == 0:
                end = GenerationStop.NONE_FOUND
                break
            super()._fit_problem(problem, like)
            if file is not None:
                solution = (*self._solution, cast(Tensor, self.certificate_.dual_point))
                file.keep(*Growth.of(problem.pooler, first.pooler, solution, rounds, stream).saved())
        self.generation_ = GenerationReport(rounds, generation.said(end))

    def _extended(
        self, problem: ProbeProblem, generation: Generation, left: int, stream: np.random.RandomState
    ) -> tuple[ProbeProblem, float]:
        """The problem with weightings that violate the dual constraint of its solution, and the largest violation."""
        program, samples = problem.program, problem.samples
        theta = cast(Tensor, self.certificate_.dual_point).to(program.y.device)
        point = DualPoint.of(program, theta, problem.pooler, samples)
        pooler, violation, n_new = problem.pooler, -np.inf, 0
        for n_kinds, kind in zip(range(len(generation.kinds), 0, -1), generation.kinds, strict=True):
            n_wanted = -(-(min(generation.per_round, left) - n_new) // n_kinds)  # an even share, rounded up
            found = find_weightings(point, kind, generation, n_wanted, stream)
            violation = max(violation, found.violation)
            if found.weights is not None:
                pooler = pooler.extended([found.weights], found.factors)
                n_new = pooler.n_weightings - problem.pooler.n_weightings
        if n_new == 0:
            return problem, violation
        linear_map = self._map(pooler, samples)
        coef, intercept = self._solution
        coef = torch.cat([coef, coef.new_zeros((n_new, *coef.shape[1:]))]).to(program.y.device)
        return problem.with_pooler(pooler, linear_map, (coef, intercept.to(coef.device))), violation

    def _store(self, problem: Problem, result: SolverResult, like: Any) -> None:
        own = cast(ProbeProblem, problem)
        self.pooler_ = own.pooler
        super()._store(problem, result, like)
        self.traffic_ = own.samples.traffic()

    def _store_network(self, solution: tuple[Tensor, Tensor], trained_for: dict[str, Any], like: Any) -> None:
        super()._store_network(solution, trained_for, like)
        self.weighting_norms_ = self.token_norms_
        del self.token_norms_

    # Saving and loading

    def _saved_state(self) -> SavedState:
        header, arrays = super()._saved_state()
        state = {f"pooler.{name}": tensor.numpy(force=True) for name, tensor in self.pooler_.state_dict().items()}
        return header | {"parts": self.pooler_.described()}, arrays | state

    def _restore_state(self, header: dict[str, Any], arrays: dict[str, NDArray]) -> None:
        own = {name.removeprefix("pooler."): array for name, array in arrays.items() if name.startswith("pooler.")}
        self.pooler_ = TokenPooler.rebuilt(header["parts"], own)
        self.generation_ = None
        super()._restore_state(header, arrays)

    # Predicting

    def _outputs(self, X: Any) -> Tensor:
        check_is_fitted(self)
        samples = self._placed_samples(X)
        coef, intercept = self._solution
        return samples.rows_made(pooled_predictions, pooler=self.pooler_, coef=coef, intercept=intercept)

    def _chosen_samples(self, X: Any, index: NDArray[np.int64]) -> Any:
        return choose_samples(X, index)

    def pool(self, X: Any) -> Result:
        """Pooled tokens, which the program is about: ``heads_.predict(model.pool(X))`` are the outputs.

        Parameters
        ----------
        X : array-like or pair
            As in ``fit``.

        Returns
        -------
        ndarray of shape (n_samples, n_weightings, n_features)
        """
        check_is_fitted(self)
        return result_of(pooled(self.pooler_, self._read_samples(X, reset=False)), X)

    def token_weights(self, X: Any) -> Result:
        r"""Where each weighting looks: the weights :math:`a_j(X)_k` of tokens, without the factors :math:`f_j`.

        Parameters
        ----------
        X : array-like or pair
            As in ``fit``.

        Returns
        -------
        ndarray of shape (n_samples, n_weightings, n_tokens)
            Weightings in the order of ``coef_``, tokens in that of ``X``; of a list there are as many as the longest
            sample has. Zero for tokens that are not real, and nowhere negative. The weights of the mean and of queries
            sum to one over the tokens of a sample. So do those of the maximum, which are shares of features: those that
            are largest in the token. So do those of a position, but to zero in samples without it. The sums of a gate
            and of a prototype are the share of tokens that are its own, at most one. Those of a ``TokenWeights`` of
            one's own are what it gives.

        Examples
        --------
        >>> from convexformer import ConvexProbeRegressor
        >>> from convexformer.preprocessing import MeanPooling, RelativePositions
        >>> X = [[[1.0], [3.0]], [[2.0]]]
        >>> probe = ConvexProbeRegressor(alpha=0.1, dictionary=[MeanPooling(), RelativePositions([1])])
        >>> probe.fit(X, [1.0, 0.0]).token_weights(X)
        array([[[0.5, 0.5],
                [0. , 1. ]],
        <BLANKLINE>
               [[1. , 0. ],
                [0. , 0. ]]])
        """
        check_is_fitted(self)
        return result_of(weights_of(self.pooler_, self._read_samples(X, reset=False)), X)

    def to_torch(self) -> ProbeNetwork:
        """The probe as a torch module, from tokens and a mask to outputs.

        Returns
        -------
        ProbeNetwork
            In the precision of the fit, with a column for each output: of two classes there is one, the score of the
            second. It exports by ``torch.export`` and saves itself by ``save_pretrained``.
            A cast to half precision leaves one or two digits of the scores: keep the module in float32 behind an
            encoder in half precision.
        """
        check_is_fitted(self)
        return ProbeNetwork(copied_to(self.pooler_, "cpu"), *self._solution)

    def explain(self, X: Any) -> Explanation:
        r"""What each token adds to the scores.

        .. math:: f(X) = b + \sum_k \Big( \sum_j f_j \, a_j(X)_k \, \tilde x_k^\top Z_j \Big)

        Parameters
        ----------
        X : array-like or pair
            As in ``fit``.

        Returns
        -------
        Explanation
            Contributions that sum, with the intercept, to ``decision_function`` of a classifier and to the outputs of a
            regressor: the predictions, or their logarithm for the Poisson loss.
        """
        check_is_fitted(self)
        samples = self._placed_samples(X)
        network = self.to_torch().to(samples.device)
        dtype = torch.promote_types(samples.dtype, network.coef.dtype)
        network.coef.data, network.bias.data = network.coef.data.to(dtype), network.bias.data.to(dtype)
        found: list[Tensor] = []
        n_outputs = network.coef.shape[2]
        with torch.no_grad():
            for _, tokens, mask in samples.chunks(self.pooler_.n_weightings * n_outputs):
                parts = network.contributions(tokens.to(dtype), mask)
                found += [self._shown(part[real]) for part, real in zip(parts, mask, strict=True)]
            baseline = self._shown(network.bias.detach()[None])[0]
        single = baseline.shape[0] == 1 and (is_classifier(self) or self._targets.single)
        arrays = [(part[:, 0] if single else part).numpy(force=True) for part in found]
        values = float(baseline[0]) if single else baseline.numpy(force=True)
        return Explanation(arrays, values, getattr(self, "classes_", None))

    def _shown(self, outputs: Tensor) -> Tensor:
        """Outputs as ``decision_function`` has them, for a classifier."""
        return cast(LabelTargets, self._targets).scores(outputs) if is_classifier(self) else outputs


def _growth_of(file: PathFile, max_new: int) -> Growth | None:
    """What an earlier call has added and left in a file, unless that is more than is asked for."""
    if file.kept is None:
        return None
    try:
        growth = Growth.loaded(*file.kept)
    except (KeyError, TypeError, ValueError) as error:
        raise file.refused(f"its weightings cannot be used ({error!r})") from error
    return growth if growth.added.n_weightings <= max_new else None
