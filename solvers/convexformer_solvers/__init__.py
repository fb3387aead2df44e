"""Generic convex programs with certificates: losses, penalties, linear maps, solvers. Knows nothing of attention.

Users of convexformer import these names from ``convexformer.solvers``.
"""

from .admm import Admm
from .auto import Auto
from .certificate import certify
from .checks import check_loss, check_map, check_penalty, check_solver
from .exact import Exact
from .fista import Fista
from .gated_map import GatedMap
from .losses import LOSSES, Huber, Logistic, Loss, Poisson, Softmax, Squared, SquaredHinge, get_loss
from .operators import DenseMap, LinearMap
from .path import Path, PathInterrupted, alpha_grid, solve_path
from .penalties import PENALTIES, Factors, GroupL2, GroupNuclear, Penalty, get_penalty
from .program import Program
from .registry import SOLVERS, get_solver
from .result import (
    Certificate,
    History,
    Progress,
    SolverInterrupted,
    SolverResult,
    SolverUnavailableError,
    Status,
)
from .semismooth import SemismoothNewton
from .solver import Callback, Point, Solver, solve

__all__ = [
    "LOSSES",
    "PENALTIES",
    "SOLVERS",
    "Admm",
    "Auto",
    "Callback",
    "Certificate",
    "DenseMap",
    "Exact",
    "Factors",
    "Fista",
    "GatedMap",
    "GroupL2",
    "GroupNuclear",
    "History",
    "Huber",
    "LinearMap",
    "Logistic",
    "Loss",
    "Path",
    "PathInterrupted",
    "Penalty",
    "Point",
    "Poisson",
    "Program",
    "Progress",
    "SemismoothNewton",
    "Softmax",
    "Solver",
    "SolverInterrupted",
    "SolverResult",
    "SolverUnavailableError",
    "Squared",
    "SquaredHinge",
    "Status",
    "alpha_grid",
    "certify",
    "check_loss",
    "check_map",
    "check_penalty",
    "check_solver",
    "get_loss",
    "get_penalty",
    "get_solver",
    "solve",
    "solve_path",
]
