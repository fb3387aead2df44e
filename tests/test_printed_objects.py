"""Results print on one line what they are, and no page of their numbers."""

import numpy as np
import pytest
import torch

from convexformer import ConvexProbeRegressor
from convexformer.constrained import DescentConstraints, exact_readout
from convexformer.datasets import WordVectors
from convexformer.embedded import train_jointly
from convexformer.embedded.problem import EmbeddedProblem
from convexformer.gates import Gates
from convexformer.preprocessing import MeanPooling
from convexformer.probes import Generation
from convexformer.programs import attention_program
from convexformer.solvers import get_solver, solve, solve_path
from convexformer.unfolded import DescentRegion, DescentReport

rng = np.random.default_rng(0)
X = rng.normal(size=(80, 6, 4))
Y = np.maximum(X[:, 1, 0], 0) + X[:, 2, 1]


def solver_results():
    program = attention_program(X, Y, alpha=1e-3)
    result = solve(program, get_solver("fista"), tol=1e-12, max_iter=3000)
    path = solve_path(program, get_solver("auto"))
    assert len(result.history.iteration) > 3
    yield result, f"certificate={result.certificate!r}"
    yield result.history, f"History({len(result.history.iteration)} certificates, {result.n_iter} iterations, "
    yield path, f"Path(30 alphas from {path.alphas[0]:.3g} to {path.alphas[-1]:.3g}, gaps at most {max(path.gaps):.1e})"
    yield type(result.history)(), "History(no certificates)"
    yield type(path)([], []), "Path(no alphas)"


def embedding():
    symbols = torch.tensor([[a, b] for a in range(9) for b in range(9)])
    gates = Gates(rng.normal(size=(4, 2)), rng.normal(size=(4, 9)))
    problem = EmbeddedProblem(symbols, torch.eye(9)[symbols.sum(1) % 9], gates, "softmax", "nuclear", 9)
    yield problem, "gates=Gates(4 gates, 2 tokens, 9 features)"
    yield train_jointly(problem, alpha=1e-3, n_steps=2), "step=2"


def others():
    generate = Generation(12, per_round=1)
    probe = ConvexProbeRegressor(0.001, dictionary=MeanPooling(), generate=generate, random_state=0).fit(X, Y)
    n_rounds = len(probe.generation_.rounds)
    yield probe.generation_, f"GenerationReport({n_rounds} rounds, 12 weightings added, end='max_new=12 weightings"
    yield DescentRegion(*torch.randn(2, 50, 8), 0.5), "DescentRegion(ratio=0.5)"
    yield (
        DescentReport(np.ones((3, 2, 99)), np.zeros((3, 99), bool), False, "none"),
        "(guaranteed=False, reason='none')",
    )
    yield WordVectors([f"word{k}" for k in range(500)], np.ones((500, 9))), "WordVectors(500 words, 9 features)"
    first = rng.normal(size=(50, 30))
    features, target = np.stack([first, 2 * first]), first @ rng.normal(size=(30, 5))
    yield exact_readout(features, target, DescentConstraints(alpha=0.1, c_ref=50.0), decay=0.1), "ExactReadout(duals="


@pytest.mark.parametrize("make", [solver_results, embedding, others])
def test_results_print_on_a_line(make):
    for part, shown in make():
        text = repr(part)
        assert shown in text
        assert "\n" not in text
        assert len(text) < 300
