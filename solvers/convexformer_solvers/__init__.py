"""Generic convex programs with certificates: losses, penalties, linear maps, solvers. Knows nothing of attention.

Users of convexformer import these names from ``convexformer.solvers``.
"""

from .admm import Admm
from .auto import Auto
from .certificate import certify
from .checks import check_loss, check_map, check_penalty, check_solver
from .column_generation import ColumnGeneration
from .exact import Exact
from .fista import Fista
from .gated_map import GatedMap
from .loop import Callback, solve
from .loss import Loss
from .losses import LOSSES, Huber, Logistic, Poisson, Softmax, Squared, SquaredHinge, get_loss
from .operators import DenseMap, LinearMap
from .path import Path, PathInterrupted, alpha_grid, iterate_path, solve_path
from .penalties import PENALTIES, GroupL2, GroupNuclear, get_penalty
from .penalty import Atoms, Factors, Penalty
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
from .sequence_penalties import PerTarget, RowStochastic
from .signed_map import SignedMap
from .smoothing_newton import SmoothingNewton
from .solver import Point, Solver
from .table_map import TableMap

__all__ = [
    "LOSSES",
    "PENALTIES",
    "SOLVERS",
    "Admm",
    "Atoms",
    "Auto",
    "Callback",
    "Certificate",
    "ColumnGeneration",
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
    "PerTarget",
    "Point",
    "Poisson",
    "Program",
    "Progress",
    "RowStochastic",
    "SemismoothNewton",
    "SignedMap",
    "SmoothingNewton",
    "Softmax",
    "Solver",
    "SolverInterrupted",
    "SolverResult",
    "SolverUnavailableError",
    "Squared",
    "SquaredHinge",
    "Status",
    "TableMap",
    "alpha_grid",
    "certify",
    "check_loss",
    "check_map",
    "check_penalty",
    "check_solver",
    "get_loss",
    "get_penalty",
    "get_solver",
    "iterate_path",
    "solve",
    "solve_path",
]
