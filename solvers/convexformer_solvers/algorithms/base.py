"""The contract of a solver; ``solve`` runs, certifies and stops all that keep it."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from torch import Tensor

from convexformer_solvers.points import Point, gap_estimate
from convexformer_solvers.program import Program
from convexformer_solvers.reductions.base import Reduction
from convexformer_solvers.reductions.weights import Targets


class Solver(ABC):
    """An algorithm as three steps; ``solve`` does everything else.

    A solver never computes its own gap and never decides that it is done because its answer is good: it moves, and
    the loop certifies. To add one: a subclass in a file of its own and a line in ``registry.SOLVERS``; ``check_solver``
    tests it. ``solve`` calls it without gradients; one that has torch differentiate turns them on.

    Attributes
    ----------
    requires_of_loss, requires_of_penalty : tuple of str
        Optional methods that the algorithm calls; see ``unmet_requirement``.

    Examples
    --------
    Proximal gradient steps:

    >>> from convexformer_solvers import Point, Solver, check_solver
    >>> class ProximalGradient(Solver):
    ...     name = "proximal_gradient"
    ...
    ...     def init(self, program, start):
    ...         pred = program.map.matvec(start.coef)
    ...         return start.coef, 1 / program.lipschitz(pred + program.best_intercept(pred))
    ...
    ...     def step(self, program, state):
    ...         coef, length = state
    ...         pred = program.map.matvec(coef)
    ...         theta = -program.loss.gradient(pred + program.best_intercept(pred), program.y)
    ...         target = coef + length * program.weighted_adjoint(theta)
    ...         return program.penalty.prox(target, length * program.alpha), length
    ...
    ...     def point(self, program, state):
    ...         return Point(state[0])  # with the best intercept
    >>> check_solver(ProximalGradient())
    """

    requires_of_loss: ClassVar[tuple[str, ...]] = ()
    requires_of_penalty: ClassVar[tuple[str, ...]] = ()

    @property
    def reductions(self) -> Sequence[Reduction]:
        """What ``solve`` makes of a program before the algorithm sees it; by default nothing.

        Samples of weight zero are left out for all.
        """
        return ()

    @property
    @abstractmethod
    def name(self) -> str:
        """What results, messages and the progress bar call the algorithm; of a registered one, its key."""

    def unmet_requirement(self, program: Program) -> str | None:
        """What the algorithm needs that a program lacks, whatever its ``alpha``; ``solve`` asks before it begins.

        It goes on from "the solver needs"; None where the algorithm applies: by default where loss and penalty define
        the methods that it requires. `program` has the penalty that ``Penalty.for_outputs`` gives for its outputs. A
        solver that is made of others returns theirs as well: neither ``init`` nor anything else looks again.
        """
        wanted = ((program.loss, self.requires_of_loss), (program.penalty, self.requires_of_penalty))
        for part, methods in wanted:
            missing = [method for method in methods if not part.defines(method)]
            if missing:
                return f"the methods {missing} of {part!r}, which does not define them"
        return None

    @abstractmethod
    def init(self, program: Program, start: Point) -> Any:
        """State at a starting point: whatever ``step`` and ``point`` need.

        `program` is in the working precision, with no requirement unmet. The tensors of `start` belong to others. All
        but its coefficients may be None: a reduction may leave the intercept to be found.
        """

    def init_again(self, program: Program, start: Point, previous: Any) -> Any:
        """State at a starting point, on the data of a previous state whose program differs in ``alpha`` alone.

        A solver that has computed something of the data takes it over; others, as this one, start afresh.
        """
        return self.init(program, start)

    def on_other_blocks(self, state: Any, moved: Callable[[Tensor], Tensor]) -> Any:
        """What ``init_again`` needs of a state on other blocks of the same data, as on those of a growing set.

        `moved` takes coefficients of the state's blocks to those of the others. None, the default: it needs a state on
        the same blocks.
        """
        return None

    @abstractmethod
    def step(self, program: Program, state: Any) -> Any:
        """The state after one iteration; the tensors of the state before, which may be asked for its point, stay."""

    @abstractmethod
    def point(self, program: Program, state: Any) -> Point:
        """The point that a state stands for, in the precision of ``program.y``; a dual point may have another."""

    def gap_estimate(self, program: Program, state: Any) -> float | None:
        """What the duality gap of ``point`` may be, absolute; only says when a certificate is worth its cost.

        None, the default: nothing is known, certificates come at regular intervals. Infinite: not now. Negative, as by
        rounding: of that size.
        """
        return None

    def earlier_points(self, state: Any) -> Sequence[Point]:
        """Points before the state's that may be better, for a solve that ends without a solution; by default none."""
        return ()

    def activity(self, state: Any) -> str:
        """What the algorithm is doing, in a few words for the progress bar; by default its name."""
        return self.name

    def finished(self, state: Any) -> bool:
        """Whether further steps could not change the point, whatever its quality; by default False."""
        return False


class PrimalDualSolver(Solver):
    """A solver whose points carry a primal and a dual point side by side, with predictions and correlation of each.

    That is what lets solvers go on from each other without losing either point. Works in float64 on data of any
    precision.
    """

    reductions: Sequence[Reduction] = (Targets(),)

    def init(self, program: Program, start: Point) -> Any:
        return self.init_again(program, start, None)

    @abstractmethod
    def init_again(self, program: Program, start: Point, previous: Any) -> Any:
        """State at a starting point; `previous` is None, or a state on a program that differs in ``alpha`` alone."""

    def knows_gap(self, state: Any) -> bool:
        """Whether the correlation of the state's point is at hand; else ``point`` takes a product to find it."""
        return True

    def gap_estimate(self, program: Program, state: Any) -> float:
        if not self.knows_gap(state):
            return math.inf
        # In single precision a dual point is outside the domain of the conjugate by rounding.
        exact = program.with_float64_targets()
        return gap_estimate(exact, self.point(program, state).in_precision(exact.y.dtype))
