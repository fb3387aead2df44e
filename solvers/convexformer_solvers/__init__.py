"""Generic convex programs with certificates: losses, penalties, linear maps, solvers. Knows nothing of attention.

Users of convexformer import these names from ``convexformer.solvers``.
"""

from .algorithms.admm import Admm
from .algorithms.base import Solver
from .algorithms.column_generation import ColumnGeneration
from .algorithms.cvxpy import Exact
from .algorithms.fista import Fista
from .algorithms.semismooth_newton import SemismoothNewton
from .algorithms.smoothing_newton import SmoothingNewton
from .algorithms.stage import Stage
from .auto import Auto, AutoConfig, plan
from .certificate import certify
from .checks import check_loss, check_map, check_penalty, check_solver
from .distributed import DistributedConfig, RankError, ShardedMap, on_all_ranks, ranks
from .linear_maps.base import LinearMap
from .linear_maps.dense import DenseMap
from .linear_maps.derived import SignedMap
from .linear_maps.gated import GatedMap
from .linear_maps.lookup import TableMap
from .linear_maps.source import Source, Traffic
from .linear_maps.streamed import StreamedMap
from .losses import LOSSES, get_loss
from .losses.base import Loss
from .losses.classification import Logistic, Softmax, SquaredHinge
from .losses.regression import Huber, Poisson, Squared
from .path import Path, PathInterrupted, alpha_grid, iterate_path, solve_path
from .penalties import PENALTIES, get_penalty
from .penalties.base import Atoms, Factors, Penalty
from .penalties.group import GroupL2, GroupNuclear
from .penalties.sequence import PerTarget, RowStochastic
from .points import Point
from .program import Program
from .registry import SOLVERS, get_solver
from .result import Certificate, History, Progress, SolverInterrupted, SolverResult, SolverUnavailableError, Status
from .solve import Callback, solve

__all__ = [
    "LOSSES",
    "PENALTIES",
    "SOLVERS",
    "Admm",
    "Atoms",
    "Auto",
    "AutoConfig",
    "Callback",
    "Certificate",
    "ColumnGeneration",
    "DenseMap",
    "DistributedConfig",
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
    "RankError",
    "RowStochastic",
    "SemismoothNewton",
    "ShardedMap",
    "SignedMap",
    "SmoothingNewton",
    "Softmax",
    "Solver",
    "SolverInterrupted",
    "SolverResult",
    "SolverUnavailableError",
    "Source",
    "Squared",
    "SquaredHinge",
    "Stage",
    "Status",
    "StreamedMap",
    "TableMap",
    "Traffic",
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
    "on_all_ranks",
    "plan",
    "ranks",
    "solve",
    "solve_path",
]
