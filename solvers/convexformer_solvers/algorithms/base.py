"""The contract of a solver; ``loop.py`` runs, certifies and stops all that keep it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from convexformer_solvers.program import Program
from convexformer_solvers.validation import check_kind


class Point(NamedTuple):
    """A primal point, with a dual point where the solver has one to offer.

    Attributes
    ----------
    coef : Tensor of shape ``program.coef_shape``
        Coefficients; a solver never changes them in place once it has handed them out.
    intercept : Tensor of shape (c,)
        Intercept; zeros when the program has none.
    dual : Tensor of shape (N, c) or None
        A candidate for ``certify``; need not be feasible.
    pred : Tensor of shape (N, c) or None
        Predictions behind `dual`, from which another solver can start.
    """

    coef: Tensor
    intercept: Tensor
    dual: Tensor | None = None
    pred: Tensor | None = None


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
    ...         length = 1 / program.lipschitz(program.map.matvec(start.coef) + start.intercept)
    ...         return start.coef, length
    ...
    ...     def step(self, program, state):
    ...         coef, length = state
    ...         pred = program.map.matvec(coef)
    ...         theta = -program.loss.gradient(pred + program.best_intercept(pred), program.y)
    ...         target = coef + length * program.weighted_adjoint(theta)
    ...         return program.penalty.prox(target, length * program.alpha), length
    ...
    ...     def point(self, program, state):
    ...         coef, _ = state
    ...         return Point(coef, program.best_intercept(program.map.matvec(coef)))
    >>> check_solver(ProximalGradient())
    """

    requires_of_loss: ClassVar[tuple[str, ...]] = ()
    requires_of_penalty: ClassVar[tuple[str, ...]] = ()

    @property
    @abstractmethod
    def name(self) -> str:
        """What results, messages and the progress bar call the algorithm; of a registered one, its key."""

    def unmet_requirement(self, program: Program) -> str | None:
        """What the algorithm needs that a program lacks, whatever its ``alpha``; ``solve`` asks before it begins.

        A solver that is made of others returns theirs as well: neither ``init`` nor anything else looks again.

        Parameters
        ----------
        program : Program
            The program, with the penalty that ``Penalty.for_outputs`` gives for its outputs.

        Returns
        -------
        str or None
            What goes on from "the solver needs", or None where the algorithm applies: by default where loss and
            penalty define the methods that it requires.
        """
        wanted = ((program.loss, self.requires_of_loss), (program.penalty, self.requires_of_penalty))
        for part, methods in wanted:
            missing = [method for method in methods if not part.defines(method)]
            if missing:
                return f"the methods {missing} of {part!r}, which does not define them"
        return None

    @abstractmethod
    def init(self, program: Program, start: Point) -> Any:
        """State at the given starting point.

        Parameters
        ----------
        program : Program
            The program in the working precision, with no requirement unmet.
        start : Point
            Where to start; its tensors belong to others.

        Returns
        -------
        object
            Whatever ``step`` and ``point`` need; the loop only hands it on.
        """

    def init_again(self, program: Program, start: Point, previous: Any) -> Any:
        """State at a starting point, on the data of a previous state whose program differs in ``alpha`` alone.

        A solver that has computed something of the data takes it over; others, as this one, start afresh.

        Parameters
        ----------
        program : Program
            The program in the working precision.
        start : Point
            Where to start.
        previous : object
            A state of this solver on the other program.

        Returns
        -------
        object
            As from ``init``.
        """
        return self.init(program, start)

    @abstractmethod
    def step(self, program: Program, state: Any) -> Any:
        """The state after one iteration.

        Parameters
        ----------
        program : Program
            The program of ``init``.
        state : object
            A state, which may be asked for its point later: its tensors stay as they are.

        Returns
        -------
        object
            The next state.
        """

    @abstractmethod
    def point(self, program: Program, state: Any) -> Point:
        """The point that the state stands for.

        Parameters
        ----------
        program : Program
            The program of ``init``.
        state : object
            A state.

        Returns
        -------
        Point
            In the precision of ``program.y``; a dual point may have another.
        """

    def handover(self, program: Program, state: Any) -> Point:
        """The point for another solver to go on from, where this one is given up.

        Parameters
        ----------
        program : Program
            The program of ``init``.
        state : object
            A state.

        Returns
        -------
        Point
            By default that of ``point``.
        """
        return self.point(program, state)

    def estimated_gap(self, state: Any) -> float | None:
        """What the duality gap of ``point`` may be; only says when a certificate is worth its cost.

        Parameters
        ----------
        state : object
            A state.

        Returns
        -------
        float or None
            Absolute. None, which is the default: nothing is known, certificates come at regular intervals. Infinite:
            not now.
        """
        return None

    def activity(self, state: Any) -> str:
        """What the algorithm is doing, in a few words for the progress bar.

        Parameters
        ----------
        state : object
            A state.

        Returns
        -------
        str
            By default the name.
        """
        return self.name

    def finished(self, state: Any) -> bool:
        """Whether further steps could not change the point, whatever its quality.

        Parameters
        ----------
        state : object
            A state.

        Returns
        -------
        bool
            By default False.
        """
        return False


def null_point(program: Program) -> Point:
    """The best constant model."""
    return Point(program.y.new_zeros(program.coef_shape), program.null_intercept)


def check_solver_type(solver: Any) -> None:
    """Raise ``TypeError`` unless ``solver`` is a solver: a name is not enough here."""
    check_kind("solver", solver, Solver, "get_solver('auto')")
