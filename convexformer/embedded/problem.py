"""The programs of one set of symbols under all embeddings."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

import torch
from torch import Tensor

from convexformer.gates import Gates
from convexformer.nn.modules.base import normal_draws
from convexformer.validation import check_finite
from convexformer_solvers import Loss, Penalty, Program, TableMap, get_loss, get_penalty
from convexformer_solvers.validation import check_counts, check_kind, check_tensor


@dataclass(frozen=True, eq=False)
class EmbeddedProblem:
    r"""Symbols, targets and gates; with an embedding they are a convex program.

    .. math:: \min_{E} V(E), \qquad V(E) = \min_Z \; \frac1N \sum_i L\Big(\sum_{g, k} 1[u_{1g}^\top X_i u_{2g} \ge 0] \,
              Z_{gk}^\top x_{ik}, \; y_i\Big) + \alpha \sum_{g, k} \Omega(Z_{gk}), \qquad x_{ik} = E_k[s_{ik}]

    The inner problem is the gated convex program (paper [C], Thm 3) on the tokens :math:`X_i`; the outer one is not
    convex. The rows of :math:`E_k` have length one: were they free, they would grow and the decay with the
    coefficients fade away.

    Parameters
    ----------
    symbols : Tensor of shape (N, n_tokens), int64
        Symbols of the samples, from 0.
    target : Tensor of shape (N, n_outputs), float
        Targets as the loss wants them. Their precision and device are those of the computations.
    gates : Gates
        Fixed directions. What they let through changes with the embedding, but passes no gradient.
    loss : str or Loss
        Loss of the outputs.
    penalty : str or Penalty
        Penalty of the coefficients. ``GroupNuclear`` lets the outputs share features; with ``GroupL2``, where each
        output has features of its own, modular arithmetic is only memorised.
    n_symbols : int
        Number of symbols.

    Raises
    ------
    TypeError
        If `symbols` or `target` is no tensor, or `gates` are no ``Gates``.
    ValueError
        If the parts do not fit together, or the targets are not finite.

    Examples
    --------
    >>> gates = Gates([[1.0, 0.0]], [[1.0, 0.0, 0.0]])
    >>> problem = EmbeddedProblem(torch.tensor([[0, 1], [1, 1]]), torch.eye(2), gates, "squared", "nuclear", 2)
    >>> problem.program(random_tables(problem, seed=0), alpha=0.1).coef_shape
    (1, 2, 3, 2)
    """

    symbols: Tensor = field(repr=False)
    target: Tensor = field(repr=False)
    gates: Gates
    loss: Loss
    penalty: Penalty
    n_symbols: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "loss", get_loss(self.loss))
        object.__setattr__(self, "penalty", get_penalty(self.penalty))
        check_counts(n_symbols=self.n_symbols)
        check_kind("gates", self.gates, Gates, "Gates(u1, u2)")
        self._check_symbols(self.symbols)
        check_tensor("target", self.target)
        if self.target.ndim != 2 or len(self.target) != len(self.symbols) or not self.target.is_floating_point():
            raise ValueError(
                f"target must be floating and of shape ({len(self.symbols)}, n_outputs), got {self.target.dtype} of "
                f"shape {tuple(self.target.shape)}"
            )
        if self.target.device != self.symbols.device:
            raise ValueError(f"target must be on {self.symbols.device} like the symbols, got {self.target.device}")
        if self.gates.u1.shape[1] != self.n_tokens:
            raise ValueError(f"gates: u1 must have n_tokens={self.n_tokens} columns, got {self.gates.u1.shape[1]}")
        check_finite("target", self.target)
        self.loss.check_target(self.target)

    def _check_symbols(self, symbols: Tensor, n_tokens: int | None = None) -> None:
        """Raise an error unless these are symbols of samples, of so many tokens."""
        check_tensor("symbols", symbols)
        is_wrong = symbols.ndim != 2 or symbols.dtype != torch.int64 or len(symbols) == 0
        if is_wrong or n_tokens not in (None, symbols.shape[1]):
            wanted = "n_tokens" if n_tokens is None else n_tokens
            raise ValueError(
                f"symbols must be int64 of shape (n_samples, {wanted}), got {symbols.dtype} of shape "
                f"{tuple(symbols.shape)}"
            )
        if bool(((symbols < 0) | (symbols >= self.n_symbols)).any()):
            raise ValueError(f"symbols must be from 0 to below n_symbols={self.n_symbols}")

    def check_tables(self, tables: Tensor) -> None:
        """Raise an error naming ``tables`` unless they are an embedding of the symbols, all finite."""
        check_tensor("tables", tables)
        shape = (self.n_tokens, self.n_symbols, self.width)
        if tuple(tables.shape) != shape:
            raise ValueError(f"tables must have shape {shape}, got {tuple(tables.shape)}")
        check_finite("tables", tables)

    @property
    def n_tokens(self) -> int:
        """Tokens of a sample."""
        return self.symbols.shape[1]

    @property
    def width(self) -> int:
        """Features of a token."""
        return self.gates.u2.shape[1]

    @property
    def coef_shape(self) -> tuple[int, ...]:
        """Shape of the coefficients, ``(h, n_tokens, width, n_outputs)``."""
        return (len(self.gates), self.n_tokens, self.width, self.target.shape[1])

    def map(self, tables: Tensor, symbols: Tensor | None = None) -> TableMap:
        """Linear map from coefficients to outputs under an embedding.

        Parameters
        ----------
        tables : Tensor of shape (n_tokens, n_symbols, width)
            The embedding: a row for each symbol at each position.
        symbols : Tensor of shape (N, n_tokens), optional
            Other symbols than those of the problem.
        """
        if symbols is None:
            symbols = self.symbols
        else:
            self._check_symbols(symbols, self.n_tokens)
        positions = torch.arange(self.n_tokens, device=tables.device)
        return TableMap(tables, symbols, self.gates.masks(tables[positions, symbols]))

    def program(self, tables: Tensor, alpha: float) -> Program:
        """The convex program under an embedding.

        Parameters
        ----------
        tables : Tensor of shape (n_tokens, n_symbols, width)
            The embedding.
        alpha : float
            Weight of the penalty.

        Returns
        -------
        Program
            Without an intercept.
        """
        return Program(self.map(tables), self.target, self.loss, self.penalty, alpha)

    def outputs(self, tables: Tensor, coef: Tensor, symbols: Tensor | None = None) -> Tensor:
        """Outputs of the block, shape ``(N, n_outputs)``.

        Parameters
        ----------
        tables : Tensor of shape (n_tokens, n_symbols, width)
            The embedding.
        coef : Tensor of shape (h, n_tokens, width, n_outputs)
            Coefficients.
        symbols : Tensor of shape (N, n_tokens), optional
            Other symbols than those of the problem.
        """
        return self.map(tables, symbols).matvec(coef)

    def rows(self, index: Tensor) -> EmbeddedProblem:
        """The problem of some of the samples."""
        return dataclasses.replace(self, symbols=self.symbols[index], target=self.target[index])

    def double(self) -> EmbeddedProblem:
        """The same problem in float64."""
        return dataclasses.replace(self, target=self.loss.target_in(self.target, torch.float64))


def random_tables(problem: EmbeddedProblem, seed: int = 0) -> Tensor:
    """Random embedding, each row uniform on the unit sphere.

    Parameters
    ----------
    problem : EmbeddedProblem
        Gives the shape, the precision and the device.
    seed : int, default=0
        Seed.

    Returns
    -------
    Tensor of shape (n_tokens, n_symbols, width)

    Examples
    --------
    >>> from convexformer.gates import Gates
    >>> symbols = torch.tensor([[a, b] for a in range(3) for b in range(3)])
    >>> target, gates = torch.eye(3)[symbols.sum(1) % 3], Gates([[1.0, 0.0], [0.0, 1.0]], [[1.0, 0.5], [-0.5, 1.0]])
    >>> problem = EmbeddedProblem(symbols, target, gates, "softmax", "nuclear", 3)
    >>> tables = random_tables(problem, seed=1)
    >>> tables.shape, bool(torch.allclose(tables.norm(dim=-1), torch.ones(2, 3)))
    (torch.Size([2, 3, 2]), True)
    """
    drawn = normal_draws(seed)(problem.n_tokens, problem.n_symbols, problem.width).to(problem.target)
    return unit_rows(drawn)


def unit_rows(tables: Tensor) -> Tensor:
    """Rows scaled to length one."""
    return torch.nn.functional.normalize(tables, dim=-1)


def along_sphere(tables: Tensor, gradient: Tensor) -> Tensor:
    """Part of a gradient that is tangent to the unit spheres of the rows."""
    return gradient - (gradient * tables).sum(-1, keepdim=True) * tables
