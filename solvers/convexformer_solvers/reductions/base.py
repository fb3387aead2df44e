"""Reductions of a program to an equivalent one that is easier to solve, after cvxpy's: accepts, apply, invert."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from convexformer_solvers.linear_maps.derived import RoundedMap
from convexformer_solvers.points import Point
from convexformer_solvers.program import Program


class Reduction(ABC):
    """One step from a program to an equivalent one, for any ``alpha`` of both, and back from its points.

    A reduction has no state: what ``apply`` finds out of the program the other two methods get as ``data``.
    """

    def accepts(self, program: Program) -> bool:
        """Whether the step changes the program and is worth its cost; ``Chain`` leaves it out elsewhere."""
        return True

    @abstractmethod
    def apply(self, program: Program) -> tuple[Program, Any]:
        """The easier program, and what the way back needs."""

    def restrict(self, point: Point, data: Any) -> Point:
        """A point of the original program as one of the easier one, by default itself; only coefficients must stay."""
        return point

    def invert(self, point: Point, data: Any) -> Point:
        """A point of the easier program as one of the original one, by default itself; only coefficients must stay."""
        return point


class Link(NamedTuple):
    """A reduction that has been applied, and the program that it has led to."""

    reduction: Reduction
    data: Any
    program: Program


class Chain(NamedTuple):
    """A program and what reductions have made of it, one after the other."""

    original: Program
    links: tuple[Link, ...] = ()  # the steps that were worth their cost

    @classmethod
    def of(cls, program: Program, reductions: Sequence[Reduction], known: Chain | None = None) -> Chain:
        """The chain of a program; steps that a known chain of the same program begins with are taken from there."""
        chain = cls(program)
        before = () if known is None else known.with_alpha(program.alpha).links
        for reduction in reductions:
            place = len(chain.links)
            if len(before) > place and before[place].reduction == reduction:
                chain = cls(program, before[: place + 1])
            elif reduction.accepts(chain.program):
                before = ()
                link = Link(reduction, *reversed(reduction.apply(chain.program)))
                chain = cls(program, (*chain.links, link))
        return chain

    @property
    def program(self) -> Program:
        """The easiest program."""
        return self.links[-1].program if self.links else self.original

    def with_alpha(self, alpha: float) -> Chain:
        """The same for another weight of the penalty; nothing is computed again."""
        links = tuple(link._replace(program=link.program.with_alpha(alpha)) for link in self.links)
        return Chain(self.original.with_alpha(alpha), links)

    def restrict(self, point: Point) -> Point:
        """A point of the original program as one of the easiest."""
        for reduction, data, _ in self.links:
            point = reduction.restrict(point, data)
        return point

    def invert(self, point: Point) -> Point:
        """A point of the easiest program as one of the original."""
        for reduction, data, _ in reversed(self.links):
            point = reduction.invert(point, data)
        return point

    @property
    def in_double(self) -> Chain:
        """The chain up to its last program with float64 targets: the one in which gaps are estimated."""
        links = self.links
        while links and links[-1].program.y.dtype != torch.float64:
            links = links[:-1]
        return self._replace(links=links)

    @property
    def rounded(self) -> Program:
        """The program of ``in_double`` with products in the precision of the easiest one, cheaper in single."""
        exact = self.in_double.program
        return exact if exact is self.program else exact.with_map(RoundedMap(self.program.map))

    def point_in_double(self, point: Point) -> Point:
        """A point of the easiest program as one of the last program with float64 targets."""
        return self._replace(links=self.links[len(self.in_double.links) :]).invert(point)
