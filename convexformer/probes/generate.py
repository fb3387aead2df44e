"""Column generation of queries and gates: those are added that would lower the objective most."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from convexformer.gates.search import ascended, geometric, largest_dual_norms
from convexformer.nn.modules.base import copied_to
from convexformer.nn.modules.probe import TokenPooler
from convexformer.nn.modules.token_weights import GateWeights, QueryWeights, TokenWeights
from convexformer.preprocessing.dictionary import factors_of
from convexformer.preprocessing.moments import Moments
from convexformer.preprocessing.pooling import query_temperature
from convexformer.preprocessing.sequences import TokenSequences, draw_tokens
from convexformer.validation import check_positive, is_integer
from convexformer_solvers import Penalty, Program
from convexformer_solvers.validation import check_counts, shown

KINDS = ("queries", "gates")
_TINY = 1e-30  # lengths below it are those of zero: targets may be in any units


class GenerationStop(Enum):
    """How the generation of weightings ended; the value is the message that users read."""

    NONE_FOUND = "no violating weighting in {n_restarts} restarts of each kind, which does not prove that there is none"
    BUDGET = "max_new={max_new} weightings added; there may be more that lower the objective"
    STOPPED = "stopped by the callback"
    INTERRUPTED = "interrupted from the keyboard"


@dataclass(frozen=True)
class Generation:
    """How weightings are generated.

    Parameters
    ----------
    max_new : int, default=32
        Weightings to add at most.
    kinds : sequence of {"queries", "gates"}, default=("queries", "gates")
        What to search for, in turn.
    per_round : int, default=8
        Weightings to add between two solves at most. Fewer take more solves and fewer weightings.
    n_restarts : int, default=32
        Starting points of each search, which ascend at once.
    n_steps : int, default=30
        Steps of the ascent.
    step_lengths : pair of float, default=(0.3, 0.02)
        Lengths of the first and the last step, in units of the radius of queries and of the normals of gates.
        Thresholds of gates are in units of the spread of tokens.
    widths : pair of float, default=(1.0, 0.02)
        Widths of the sigmoid that stands for the step of a gate, first and last, in units of the spread of tokens.
    n_samples : int, default=2000
        Samples that the ascent sees at most, drawn with odds by the norms of their dual variables. What it finds is
        judged by all samples.
    tol : float, default=0.01
        Relative excess of a dual norm over ``alpha`` that does not count as a violation.
    similarity : float, default=0.95
        Weightings whose correlations with the dual point have a larger cosine than this are not added together, as one
        of them does the work of both.
    temperature : float, optional
        Temperature of queries. Default: ``query_temperature(n_features)``, as in ``QueryPooling``. That suits
        standardised tokens; scores, and with them a suitable temperature, grow with the square of the tokens' spread.
    radius : float, optional
        Norm of queries at most. Default: the largest norm of a starting point.

    Raises
    ------
    ValueError
        If a parameter is not as described.

    Examples
    --------
    >>> Generation(max_new=8, kinds=("queries",)).per_round
    8
    """

    max_new: int = 32
    kinds: Sequence[str] = KINDS
    per_round: int = 8
    n_restarts: int = 32
    n_steps: int = 30
    step_lengths: tuple[float, float] = (0.3, 0.02)
    widths: tuple[float, float] = (1.0, 0.02)
    n_samples: int = 2000
    tol: float = 0.01
    similarity: float = 0.95
    temperature: float | None = None
    radius: float | None = None

    def __post_init__(self) -> None:
        counts = ("max_new", "per_round", "n_restarts", "n_steps", "n_samples")
        check_counts(**{name: getattr(self, name) for name in counts})
        if not isinstance(self.kinds, (list, tuple)) or not self.kinds or not set(self.kinds) <= set(KINDS):
            raise ValueError(f"kinds must be a list or tuple of {KINDS}, got {self.kinds!r}")
        check_positive(tol=self.tol, similarity=self.similarity)
        for name in ("step_lengths", "widths"):
            pair = getattr(self, name)
            if not isinstance(pair, (list, tuple)) or len(pair) != 2:
                raise ValueError(f"{name} must be a pair of positive numbers, the first and the last, got {pair!r}")
            check_positive(**{name: pair[0]})
            check_positive(**{name: pair[1]})
        for name in ("temperature", "radius"):
            if getattr(self, name) is not None:
                check_positive(**{name: getattr(self, name)})

    def said(self, end: GenerationStop) -> str:
        """The message of an end."""
        return end.value.format(n_restarts=self.n_restarts, max_new=self.max_new)


def get_generation(generate: Any) -> Generation | None:
    """The generation that a parameter ``generate`` means.

    Parameters
    ----------
    generate : None, int or Generation
        An integer is ``max_new``.

    Returns
    -------
    Generation or None

    Raises
    ------
    ValueError
        If it is none of these.

    Examples
    --------
    >>> get_generation(16).max_new, get_generation(None)
    (16, None)
    """
    if generate is None or isinstance(generate, Generation):
        return generate
    if is_integer(generate, 1):
        return Generation(max_new=int(generate))
    raise ValueError(f"generate must be None, a positive integer or Generation(...), got {shown(generate)}")


class WeightingRound(NamedTuple):
    """One round of a generation.

    Attributes
    ----------
    n_weightings : int
        Weightings in the program that was solved.
    objective, dual : float
        Objective at its solution, and the certified lower bound for these weightings.
    violation : float
        Largest dual norm that the search met, over ``alpha``, less 1; negative where none is violated.
    n_added : int
        Weightings that were added then.

    Examples
    --------
    >>> from convexformer import ConvexProbeRegressor
    >>> from convexformer.preprocessing import MeanPooling
    >>> X = np.random.default_rng(0).normal(size=(80, 4, 3))
    >>> y = np.maximum(X[..., 0], 0).mean(1)  # not a function of the mean token
    >>> model = ConvexProbeRegressor(alpha=0.01, dictionary=MeanPooling(), generate=2, random_state=0).fit(X, y)
    >>> first = model.generation_.rounds[0]
    >>> first.n_weightings, first.n_added, first.violation > 0.01
    (1, 2, True)
    >>> model.certificate_.primal < first.dual  # no weights of the first weighting alone attain that
    True
    """

    n_weightings: int
    objective: float
    dual: float
    violation: float
    n_added: int


class GenerationReport(NamedTuple):
    """The generation of weightings of a fit.

    Attributes
    ----------
    rounds : list of WeightingRound
        The way there.
    end : str
        Why no more were added. The certificate of the fit is exact for the weightings that it has, and says nothing of
        others.

    Examples
    --------
    >>> from convexformer import ConvexProbeRegressor
    >>> from convexformer.preprocessing import MeanPooling
    >>> X = np.random.default_rng(0).normal(size=(80, 4, 3))
    >>> y = np.maximum(X[..., 0], 0).mean(1)  # not a function of the mean token
    >>> model = ConvexProbeRegressor(alpha=0.01, dictionary=MeanPooling(), generate=2, random_state=0).fit(X, y)
    >>> rounds, end = model.generation_
    >>> len(rounds), end
    (1, 'max_new=2 weightings added; there may be more that lower the objective')
    """

    rounds: list[WeightingRound]
    end: str

    def __repr__(self) -> str:
        added = sum(each.n_added for each in self.rounds)
        return f"GenerationReport({len(self.rounds)} rounds, {added} weightings added, end={self.end!r})"


class DualPoint(NamedTuple):
    """What the search sees of a solved program.

    Attributes
    ----------
    samples : TokenSequences
        The training samples, tokens as the weightings see them.
    values : Tensor of shape (N, c)
        Rows of the dual point times the weights of their samples, in float64.
    sample_weight : Tensor of shape (N,)
        Weights that sum to 1.
    penalty : Penalty
        Whose dual norm is bounded.
    alpha : float
        The bound.
    scaled : bool
        Whether pooled tokens have factors that give them variance one.
    """

    samples: TokenSequences
    values: Tensor
    sample_weight: Tensor
    penalty: Penalty
    alpha: float
    scaled: bool

    @classmethod
    def of(cls, program: Program, dual_point: Tensor, pooler: TokenPooler, samples: TokenSequences) -> DualPoint:
        """That of a program and its certificate's dual point."""
        weight = program.weight.double()
        values = weight[:, None] * dual_point.to(weight)
        tokens = samples.mapped(pooler.standardized)
        return cls(tokens, values, weight, program.penalty, program.alpha, pooler.factors is not None)


class Found(NamedTuple):
    """Weightings that violate the dual constraint, with their factors, and the largest violation that was met."""

    weights: TokenWeights | None
    factors: Tensor | None
    violation: float


def find_weightings(
    point: DualPoint, kind: str, config: Generation, n_wanted: int, random_state: np.random.RandomState
) -> Found:
    r"""Search for weightings whose dual constraint is violated.

    A weighting :math:`a_u` would lower the objective where

    .. math:: f_u \, \Omega^\circ \Big( \sum_i p_i \, T_u(X_i) \, \theta_i^\top \Big) > \alpha.

    The left side is raised by normalised gradient steps from all starting points at once: of queries itself, inside a
    ball; of gates with a sigmoid in place of the step, which narrows. The better of each start and its end counts.

    Parameters
    ----------
    point : DualPoint
        The solved program.
    kind : {"queries", "gates"}
        What to search for.
    config : Generation
        Sizes of the search.
    n_wanted : int
        Weightings to return at most.
    random_state : RandomState
        Draws starting points and the samples of the ascent.

    Returns
    -------
    Found
    """
    part = (_ascended_queries if kind == "queries" else _ascended_gates)(point, config, random_state)
    sums, factors = _correlations(part, point)
    norms = largest_dual_norms(point.penalty, sums * factors[:, None, None])
    excess = norms / point.alpha - 1
    chosen = _most_violating(sums, excess, config, n_wanted)
    if not chosen:
        return Found(None, None, float(excess.max()))
    return Found(_selected(part, chosen), factors[chosen] if point.scaled else None, float(excess.max()))


def _correlations(part: TokenWeights, point: DualPoint) -> tuple[Tensor, Tensor]:
    """Sums ``(h, d, c)`` of pooled tokens times dual values over all samples, and the factors ``(h,)``."""
    own = {"values": point.values, "weight": point.sample_weight}
    of_parts = point.samples.each_part(_sums_of_part, own, part=part)
    sums = torch.stack([found.to(point.values) for found, _ in of_parts]).sum(0)
    factors = factors_of(Moments.joined(moments for _, moments in of_parts)).to(sums)
    return sums, factors if point.scaled else torch.ones_like(factors)


def _sums_of_part(
    samples: TokenSequences, part: TokenWeights, values: Tensor, weight: Tensor
) -> tuple[Tensor, Moments]:
    """Sums over one part of the samples, and moments of their pooled tokens."""
    part = copied_to(part, samples.device)
    sums = values.new_zeros((part.n_weightings, samples.n_features, values.shape[1]))

    def passing() -> Iterator[Moments]:
        for rows, tokens, mask in samples.chunks(part.n_weightings):
            pooled = part(tokens, mask) @ tokens
            pooled[weight[rows] == 0] = 0.0  # what does not count may be infinite
            sums.add_(torch.einsum("ihd,ic->hdc", pooled.double(), values[rows]))
            yield Moments.of(pooled, weight[rows])

    with torch.no_grad():
        moments = Moments.joined(passing())
    return sums, moments


def _most_violating(sums: Tensor, excess: Tensor, config: Generation, n_wanted: int) -> list[int]:
    """Positions of the weightings that violate most and are not alike."""
    units = torch.nn.functional.normalize(sums.flatten(1), eps=_TINY)
    chosen: list[int] = []
    for index in excess.argsort(descending=True).tolist():
        if float(excess[index]) <= config.tol or len(chosen) == n_wanted:
            break
        if not chosen or float((units[chosen] @ units[index]).max()) <= config.similarity:
            chosen.append(index)
    return chosen


def _selected(part: TokenWeights, index: list[int]) -> TokenWeights:
    arrays = {name: getattr(part, name)[index] for name in part.arrays}
    return type(part)(**arrays, **part.settings())


class _Batch(NamedTuple):
    """The samples of an ascent: tokens (B, n, d), which are real, dual values (B, c) and weights (B,)."""

    tokens: Tensor
    mask: Tensor
    values: Tensor
    weight: Tensor


def _batch(point: DualPoint, config: Generation, random_state: np.random.RandomState) -> _Batch:
    """Some of the samples, those of large dual variables more likely, weighted so that sums are right on average."""
    counted = point.sample_weight.nonzero()[:, 0]
    odds = torch.linalg.vector_norm(point.values, dim=1)
    if len(counted) <= config.n_samples or not bool(odds.any()):
        index = counted[: config.n_samples]
        factor = torch.ones_like(odds[index])
    else:
        odds = odds / odds.sum()
        drawn = random_state.choice(len(odds), size=config.n_samples, p=odds.numpy(force=True))
        index = torch.as_tensor(drawn, device=odds.device)
        factor = 1 / (config.n_samples * odds[index])
    tokens, mask = point.samples.rows(index).padded(slice(0, len(index)))
    values, weight = factor[:, None] * point.values[index], (factor * point.sample_weight[index]).to(tokens)
    return _Batch(tokens, mask, values.to(tokens), weight / weight.sum())


def _starts(point: DualPoint, count: int, random_state: np.random.RandomState) -> Tensor:
    """Tokens to start from."""
    seed = int(random_state.randint(2**31 - 1))
    return draw_tokens(point.samples, count, seed, point.sample_weight.numpy(force=True))


class _PooledMoments(torch.autograd.Function):
    """Sums ``(h, d, c)`` of pooled tokens times dual values, and variances ``(h,)``, of weights ``(B, h, n)``.

    Pooled tokens are by far the largest array of a search, which each operation of autograd would read and write anew.
    """

    @staticmethod
    def forward(
        ctx: Any, weights: Tensor, tokens: Tensor, values: Tensor, sample_weight: Tensor
    ) -> tuple[Tensor, Tensor]:
        pooled = weights @ tokens
        rows = torch.cat([values, sample_weight[:, None]], 1)
        sums = (rows.mT @ pooled.flatten(1)).unflatten(1, pooled.shape[1:])
        centred = pooled.sub_(sums[-1])
        spread = sample_weight @ torch.linalg.vector_norm(centred, dim=2).square() / centred.shape[2]
        ctx.save_for_backward(centred, tokens, values, sample_weight)
        return sums[:-1].permute(1, 2, 0).contiguous(), spread

    @staticmethod
    def backward(ctx: Any, of_sums: Tensor, of_spread: Tensor) -> tuple[Tensor | None, ...]:
        centred, tokens, values, sample_weight = ctx.saved_tensors
        slope = (values @ of_sums.permute(2, 0, 1).flatten(1)).view_as(centred)
        # The mean does not count: the deviations from it have the weighted sum zero.
        slope.addcmul_(centred, (2 / centred.shape[2] * sample_weight[:, None] * of_spread)[..., None])
        return slope @ tokens.mT, None, None, None


def _norms_of(batch: _Batch, point: DualPoint, weights: Tensor) -> Tensor:
    """Dual norms, times factors where pooled tokens have them, of weights ``(B, h, n)`` of the samples of an ascent."""
    sums, spread = _PooledMoments.apply(weights, batch.tokens, batch.values, batch.weight)
    norms = largest_dual_norms(point.penalty, sums)
    return norms * (spread + torch.finfo(spread.dtype).eps).rsqrt() if point.scaled else norms


def _ascend(start: Any, norms: Callable[..., Tensor], limit: Callable[..., Any], config: Generation) -> Any:
    return ascended(start, norms, limit, geometric(config.step_lengths, config.n_steps), _TINY)


def _best(candidates: Iterable[Tensor], norms: Callable[[Tensor], Tensor]) -> Tensor:
    """Of each row the candidate with the largest norm, and the first of those that rounding alone tells apart."""
    best, *others = candidates
    largest = norms(best)
    for other in others:
        found = norms(other)
        higher = found > largest * (1 + torch.finfo(found.dtype).eps ** 0.5)
        best, largest = torch.where(higher[:, None], other, best), torch.where(higher, found, largest)
    return best


def _ascended_queries(point: DualPoint, config: Generation, random_state: np.random.RandomState) -> QueryWeights:
    first = _starts(point, config.n_restarts, random_state)
    radius = float(torch.linalg.vector_norm(first, dim=1).max()) if config.radius is None else float(config.radius)
    radius = radius or 1.0  # the one token may be zero
    temperature = query_temperature(first.shape[1]) if config.temperature is None else float(config.temperature)
    batch = _batch(point, config, random_state)

    def norms(step: int, directions: Tensor) -> Tensor:
        scores = (batch.tokens @ (radius * directions).mT).mT / temperature
        return _norms_of(batch, point, torch.softmax(scores.masked_fill(~batch.mask[:, None], -torch.inf), -1))

    def limit(directions: Tensor) -> tuple[Tensor]:
        return (directions / torch.linalg.vector_norm(directions, dim=1, keepdim=True).clamp(min=1.0),)

    start = limit(first / radius)
    found = _best([*_ascend(start, norms, limit, config), *start], partial(norms, -1))  # steps may be too long
    return QueryWeights(radius * found, temperature)


def _ascended_gates(point: DualPoint, config: Generation, random_state: np.random.RandomState) -> GateWeights:
    batch = _batch(point, config, random_state)
    through = _starts(point, config.n_restarts, random_state)  # each plane begins near a token
    normals = torch.as_tensor(random_state.standard_normal(tuple(through.shape))).to(through)
    real = batch.mask[:, None].to(batch.tokens.dtype)
    shares = real / real.sum(-1, keepdim=True)
    # From the mean of the tokens, in units of their spread: both are about those of standardised tokens.
    mean = batch.weight @ (shares @ batch.tokens)[:, 0]
    centred = batch.tokens - mean
    unit = float((batch.weight @ (shares[:, 0] * centred.square().mean(2)).sum(1)).sqrt()) or 1.0
    thresholds = (normals * (through - mean)).sum(1, keepdim=True)
    widths = unit * geometric(config.widths, config.n_steps)

    def sides(planes: Tensor) -> Tensor:
        return (centred @ planes[:, :-1].mT - unit * planes[:, -1]).mT

    def norms(step: int, planes: Tensor) -> Tensor:
        return _norms_of(batch, point, torch.sigmoid(sides(planes) / widths[step]) * shares)

    def gate_norms(planes: Tensor) -> Tensor:
        return _norms_of(batch, point, (sides(planes) >= 0) * shares)

    def beside(planes: Tensor) -> Iterator[Tensor]:
        """Planes through tokens, moved half the way to the next token on either side: rounding decides no mask."""
        distances = (sides(planes) / unit).masked_fill(~batch.mask[:, None], 0.0)
        for side in (1, -1):
            ahead = side * distances
            nearest = ahead.where(ahead > torch.finfo(ahead.dtype).eps ** 0.5, 1.0).amin((0, 2))
            yield torch.cat([planes[:, :-1], planes[:, -1:] + side * nearest[:, None] / 2], 1)

    def limit(planes: Tensor) -> tuple[Tensor]:
        return (planes / torch.linalg.vector_norm(planes[:, :-1], dim=1, keepdim=True),)

    start = limit(torch.cat([normals, thresholds / unit], 1))
    # The sigmoid may lead away from gates that violate.
    found = _best([*_ascend(start, norms, limit, config), *beside(*start)], gate_norms)
    return GateWeights(found[:, :-1], unit * found[:, -1] + found[:, :-1] @ mean)
