"""What the tests run on several processes; each function is called on every rank."""

import dataclasses
import gc
import json
import os
import pickle
import signal
import time
import warnings
from contextlib import nullcontext, redirect_stdout
from copy import deepcopy
from datetime import timedelta
from functools import partial
from io import StringIO
from pathlib import Path
from threading import Timer
from unittest.mock import patch

import numpy as np
import pandas as pd
import torch
import torch.distributed as dist
from probe_cases import forms, padded, ragged_samples
from probe_cases import signal as target_of
from sklearn.base import clone

from convexformer import (
    ConvexAttentionClassifier,
    ConvexAttentionClassifierCV,
    ConvexAttentionRegressor,
    ConvexProbeClassifier,
    ConvexProbeClassifierCV,
    ConvexProbeRegressor,
    ConvexProbeRegressorCV,
    ConvexSequenceRegressor,
    DescentConstrainedClassifier,
    DescentConstrainedDenoiser,
    GreedyConvexTransformerClassifier,
    GreedyConvexTransformerRegressor,
    UnfoldedTransformerClassifier,
    UnfoldedTransformerRegressor,
    cli,
    save_model,
)
from convexformer.constrained import InfeasibleWarning
from convexformer.nn import MeanWeights, QueryWeights
from convexformer.nn.training.samples import NetworkSamples, ShardedNetworkSamples, predictions
from convexformer.preprocessing import MeanPooling, PrototypePooling, QueryPooling, TokenGates, TokenPooling
from convexformer.probes import Generation
from convexformer.storage import Source
from convexformer_solvers import (
    Auto,
    AutoConfig,
    DenseMap,
    GatedMap,
    Huber,
    Program,
    get_loss,
    get_penalty,
    get_solver,
    solve,
)
from convexformer_solvers.checks import check_map
from convexformer_solvers.distributed import DistributedConfig, RankError, on_all_ranks, ranks
from convexformer_solvers.distributed.heartbeat import Heartbeats
from convexformer_solvers.distributed.operations import Plan
from convexformer_solvers.distributed.vectors import whole
from convexformer_solvers.linear_maps.streamed import StreamedMap

N_SAMPLES = 90
QUICK = DistributedConfig(heartbeat=0.2)  # ranks wait for several beats before they say who has ended
LOSSES = ("squared", "huber", "logistic", "poisson", "softmax", "squared_hinge")


def data():
    """Tokens, masks of gates, weights and a generator for targets."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn((N_SAMPLES, 4, 3), generator=generator, dtype=torch.float64)
    masks = torch.rand((N_SAMPLES, 3), generator=generator) > 0.4
    weight = torch.rand(N_SAMPLES, generator=generator, dtype=torch.float64)
    weight[::7] = 0
    return tokens, masks, weight


def own_rows(n_samples=N_SAMPLES):
    """This rank's samples: uneven shares, of which the first has few."""
    rank, size = dist.get_rank(), dist.get_world_size()
    ends = [round(n_samples * ((share + 1) / size) ** 1.5) for share in range(size)]
    return slice(([0, *ends])[rank], ends[rank])


def program_of(linear_map, masks, weight, case):
    """The program of a case on a map of all samples without gates."""
    loss_name, penalty, has_gates, has_intercept, has_weights = case
    loss = get_loss(loss_name)
    y = loss.example_target(N_SAMPLES, 2, torch.Generator().manual_seed(1))
    linear_map = linear_map.gated(masks) if has_gates else linear_map
    sample_weight = weight if has_weights else None
    program = Program(linear_map, y, loss, get_penalty(penalty), 1.0, sample_weight, has_intercept)
    return program.with_alpha(0.2 * program.alpha_max)


def solved(linear_map, masks, weight, case, tol=3e-10):
    """Objective, bound and gap of a case."""
    result = solve(program_of(linear_map, masks, weight, case), get_solver("auto"), tol=tol)
    return result.certificate.primal, result.certificate.dual, result.certificate.relative_gap


def all_programs(cases, least_samples):
    """Certificates of cases; from so many samples on the ranks work on vectors of samples by themselves."""
    tokens, masks, weight = data()
    group = ranks(DistributedConfig(least_samples=least_samples))

    def work(linear_map):
        return {case: solved(linear_map, masks, weight, case) for case in cases}

    return on_all_ranks(DenseMap(tokens[own_rows()]), work, group)


def operations():
    """Of each operation the result on values of the ranks and that on one tensor, and how often values were gathered.

    On all samples in order, and on some samples in another order of which the last rank has none.
    """
    from sample_operations import CHANGES, OPERATIONS, REFUSED

    tokens = data()[0]
    others = torch.randn((3, N_SAMPLES, 3), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    index = torch.randperm(round(N_SAMPLES * 0.4), generator=torch.Generator().manual_seed(2))

    def found(linear_map, plain):
        values, n_gathered = linear_map.placed(plain), []
        values.sample_layout.gathered = lambda values: (
            n_gathered.append(1) or type(values.sample_layout).gathered(values.sample_layout, values)
        )
        results = {}
        for name, operation in (OPERATIONS | CHANGES).items():
            del n_gathered[:]
            result = operation(values.clone())
            n = len(n_gathered)
            wanted = operation(plain.clone() if name in CHANGES else plain)
            parts = result if isinstance(result, (tuple, list)) else [result]
            wanted = wanted if isinstance(wanted, (tuple, list)) else [wanted]
            results[name] = [whole(part) for part in parts], list(wanted), n
        return results

    def is_apart(linear_map, plain):
        given = plain.clone()
        values = linear_map.placed(given)
        changed = values.clone().add_(1)
        values.zero_()
        kept = not bool(values.any()) and torch.equal(given, plain)  # the ranks change theirs as a result is asked for
        given.zero_()
        changed.numpy(force=True).fill(0)
        linear_map.gathered(changed).zero_()
        return kept and torch.equal(whole(changed), plain + 1)

    def in_another_order(linear_map, plain):
        flipped = linear_map.rows(torch.arange(N_SAMPLES - 1, -1, -1))
        found, wanted = flipped.rmatvec(linear_map.placed(plain)), DenseMap(tokens.flip(0)).rmatvec(plain)
        torch.testing.assert_close(found, wanted)
        both = linear_map.placed(plain) + flipped.placed(plain)  # of which each rank has other rows
        torch.testing.assert_close(both, 2 * plain)
        by_column = linear_map.placed(plain.T.contiguous().T)
        torch.testing.assert_close(whole(by_column.view(-1)), plain.view(-1))

    def work(linear_map):
        assert is_apart(linear_map, others[0])
        in_another_order(linear_map, others[1])
        return [
            found(linear_map, others[0]),
            found(linear_map.rows(index), others[1][index]),
            {name: said_of(refused, linear_map.placed(others[2])) for name, refused in REFUSED.items()},
        ]

    group = ranks(DistributedConfig(least_samples=1))
    return on_all_ranks(DenseMap(tokens[own_rows()]), work, group)


def said_of(run, *arguments):
    """The error of a call."""
    try:
        run(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


class _OwnError(KeyError):
    pass


def _failing(linear_map, how):
    """A function of a part that fails on rank 1, and has much to say for itself."""
    if dist.get_rank() == 1:
        if how == "long":
            raise ValueError("why? " * 10_000)
        if how == "kind":
            raise _OwnError("own")
        if how == "no message":
            b"\xff".decode()
        if how == "result":
            return lambda: None
    return len(linear_map), np.zeros(20_000)


def commands():
    """What is said of commands that fail on a rank, results that are long, and values that are lost."""
    tokens, earlier = data()[0], []

    def work(linear_map):
        assert ranks() is None  # as rank 0 leads the others
        earlier.append(linear_map)
        said = {how: said_of(linear_map.each_part, partial(_failing, how=how)) for how in FAILURES}
        said["function"] = said_of(linear_map.each_part, lambda part: part)
        long = [linear_map.each_part(partial(_failing, how="")) for _ in range(3)]
        wide = linear_map.weighted_gram(
            torch.cat(5 * [linear_map.columns(torch.arange(4)).flatten(1)], 1), torch.ones(N_SAMPLES).double()
        )
        values = linear_map.placed(tokens[:, 0])
        total = values.sum()
        lost = values.gather(1, (values[:, :1] > -99).long() * 7)  # of which the ranks find that it is none
        said |= {"lost": said_of(lost.sum), "again": said_of(values.sum)}
        return said, [[count for count, _ in of_ranks] for of_ranks in long], wide, total

    group = ranks(DistributedConfig(least_samples=1))
    mine = DenseMap(tokens[own_rows()])
    said, *results = on_all_ranks(mine, work, group)
    said["unsent"] = said_of(on_all_ranks, mine, lambda linear_map: lambda: None, group)
    others = {"empty": mine.rows(slice(0)), "place": StreamedMap(Unreadable(tokens[own_rows()], fails=False))}
    for name, other in others.items():
        said[name] = said_of(on_all_ranks, other if group.rank == 1 else mine, len, group)
    said["error of rank 0"] = said_of(on_all_ranks, mine, _fails_with_an_error_of_its_own, group)
    n_samples, said["earlier"] = on_all_ranks(mine, lambda later: (len(later), said_of(earlier[0].largest)), group)
    return said, *results, n_samples, _in_another_group(lambda: on_all_ranks(mine, len, ranks()))


def _fails_with_an_error_of_its_own(linear_map):
    class Own(ValueError):
        pass

    raise Own("own")


def _in_another_group(run):
    """What a call gives in a process group that is made in place of the first."""
    store = dist.PrefixStore("another", dist.distributed_c10d._get_default_store())
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=30))
    return run()


def _made_but_on_rank_1(part):
    if dist.get_rank() == 1:
        raise ValueError("own")
    return part


def left_overs():
    """How many plans of operations there are within common work and after it, and names of what is no longer used."""
    tokens = data()[0]

    def count():
        gc.collect()
        return sum(type(found) is Plan for found in gc.get_objects())

    def work(linear_map):
        parts = linear_map.layout.team.parts
        before, values, some = set(parts), linear_map.placed(tokens[:, 0]), linear_map.rows(slice(5, 40))
        assert bool(values.exp().sum() > 0)
        n_plans, n_used = count(), len(parts)
        assert "rank 1: own" in said_of(linear_map.map_made, _made_but_on_rank_1)  # the others have kept theirs
        del values, some
        linear_map.largest()  # a command, before which the ranks drop what is no longer used
        return n_plans, n_used - len(before), set(parts) - before

    return on_all_ranks(DenseMap(tokens[own_rows()]), work, ranks(DistributedConfig(least_samples=1))), count()


FAILURES = ("long", "kind", "no message", "result")


def maps(least_samples):
    """The identities of linear maps, of the samples of all ranks and of some of them."""
    tokens, masks, _ = data()

    def work(linear_map):
        check_map(linear_map)
        gated, one = linear_map.gated(masks), GatedMap(tokens, masks)
        check_map(gated)
        index = torch.randperm(N_SAMPLES, generator=torch.Generator().manual_seed(0))[:40]
        some = gated.rows(index)
        check_map(some)
        check_map(some.rows(slice(3, 30)))
        check_map(gated.restricted(torch.tensor([1, 5, 6])))
        coef = torch.ones((*one.feature_shape, 2), dtype=torch.float64)
        moments = gated.moments(torch.rand(N_SAMPLES).double(), torch.rand((N_SAMPLES, 3)).double())
        return (some.matvec(coef), one.rows(index).matvec(coef), len(moments[0]), gated.largest())

    return on_all_ranks(DenseMap(tokens[own_rows()]), work, ranks(DistributedConfig(least_samples=least_samples)))


def limits():
    """Memory limits, of which each rank has its own, of maps of all ranks, and whether these are in memory."""
    source = Unreadable(data()[0][own_rows()], fails=False)
    streamed = StreamedMap(source, memory_limit=1000 - dist.get_rank())

    def work(linear_map):
        held = [linear_map.map_made(_held, by=by) for by in ([0], [0, 1, 2])]
        return [(made.memory_limit, made.in_memory) for made in (linear_map, linear_map.rows(slice(20, 90)), *held)]

    return on_all_ranks(streamed, work, ranks())


def few_samples(names):
    """Certificates and passes of programs of fewer samples than features, with large means, and if it were in memory.

    The samples are read in passes, within a limit that has no room for the features' Gram matrix.
    """
    generator = torch.Generator().manual_seed(0)
    own, shared = (torch.randn((60, *shape), generator=generator, dtype=torch.float64) for shape in ((70, 8), (1, 1)))
    tokens = 0.3 * own + shared + 1e5

    def work(linear_map):
        found = {}
        for name in names:
            loss = get_loss(name)
            y = loss.example_target(60, 2, torch.Generator().manual_seed(1))
            program = Program(linear_map, y, loss, get_penalty("group_l2"), 1.0, fit_intercept=True)
            program = program.with_alpha(0.2 * program.alpha_max)
            before = linear_map.traffic().passes
            result = solve(program, get_solver("auto"), tol=1e-10)
            in_memory = solve(dataclasses.replace(program, map=DenseMap(tokens)), get_solver("auto"), tol=1e-10)
            found[name] = result.certificate, in_memory.certificate, linear_map.traffic().passes - before
        return found

    source = Unreadable(tokens[own_rows(60)], fails=False)
    return on_all_ranks(StreamedMap(source, memory_limit=500_000), work, ranks())


def _held(part, by):
    return DenseMap(data()[0][own_rows()]) if dist.get_rank() in by else part


def problem(n_samples=450):
    """Data of estimators: samples, numbers, labels and weights."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(n_samples, 5, 3))
    y = X[:, 2, 0] - X[:, 1, 1] + 0.3 * rng.normal(size=n_samples)
    return X, y, np.where(y > 0, "up", "down"), rng.uniform(0.5, 2, n_samples)


# Bytes that hold Gram matrices of 15 features and less than a rank's samples.
STREAMED = 30_000
NARROW = 13_000  # has no room for them
LAYERED_STREAMED = 70_000  # holds those of a layer of two gates
ESTIMATORS = {
    "regressor": ConvexAttentionRegressor(alpha=0.05, tol=1e-10),
    # On a disk with a working set before the Gram matrix of all features, which is small here.
    "few tokens": ConvexAttentionRegressor(alpha=0.2, tol=1e-10, solver=Auto(AutoConfig(costly_gram=0.0))),
    "classifier": ConvexAttentionClassifier(alpha=0.02, tol=1e-10, class_weight="balanced"),
    "far targets": ConvexAttentionRegressor(alpha=0.0005, tol=1e-10, loss=Huber(0.01)),
    "gated": ConvexAttentionRegressor(alpha=0.05, tol=1e-10, activation="gated_relu", n_gates=6, random_state=0),
    "difference": ConvexAttentionRegressor(
        alpha=0.05, tol=1e-10, activation="gated_relu", n_gates=6, gates="difference", random_state=0
    ),
    "cv": ConvexAttentionClassifierCV(alphas=2, cv=2, tol=1e-6, scoring="accuracy", n_jobs=2),
    "cv_loss": ConvexAttentionClassifierCV(alphas=2, cv=2, tol=1e-6),
}


# Later layers are trained on predictions, which a gap determines to its square root: so there is nearly none.
_DEEP = {"n_gates": 2, "tol": 1e-14, "random_state": 0}
LAYERED = {
    "greedy regressor": GreedyConvexTransformerRegressor(alpha=0.05, **_DEEP),
    "greedy classifier": GreedyConvexTransformerClassifier(alpha=0.05, class_weight="balanced", **_DEEP),
    "greedy difference": GreedyConvexTransformerRegressor(alpha=0.05, n_layers=3, gates="difference", **_DEEP),
    "single_row": ConvexSequenceRegressor(alpha=0.05, tol=1e-10),
    "stochastic": ConvexSequenceRegressor(alpha=0.05, tol=1e-10, form="stochastic"),
    "substochastic": ConvexSequenceRegressor(alpha=0.05, tol=1e-10, form="substochastic", loss="huber"),
}


def layered_target(name):
    """Targets of an estimator of ``LAYERED``."""
    X, y, labels, _ = problem()
    targets = {"greedy regressor": y, "greedy classifier": labels, "greedy difference": y}
    return targets.get(name, np.stack([X[:, ::-1, 0], X[:, :, 1] + 0.1 * y[:, None]], 2))


def layered_figures(model, X, y, weight):
    """What must be the same on all ranks, and as in one process."""
    certificates = getattr(model, "certificates_", None) or [model.certificate_]
    layers = getattr(model, "layers_", [])
    parts = [np.asarray(part) for layer in layers or [model] for part in (layer.coef_, layer.intercept_)]
    gates = [part.tolist() for layer in layers for part in (layer.gates_.u1, layer.gates_.u2)]
    return {
        "objectives": [certificate.primal for certificate in certificates],
        "bounds": [certificate.dual for certificate in certificates],
        "gates": gates,
        "model": [part.tobytes() for part in (*parts, model.predict(problem()[0]))],
        "score": model.score(X, y, weight),
        "passes": None if model.traffic_ is None else model.traffic_.passes,
    }


def layered(path):
    """Fits to the rank's own samples, to a path that all share, and one with little memory."""
    X, _, _, weight = problem()
    rows, found = own_rows(len(X)), {}
    for name, estimator in LAYERED.items():
        target = layered_target(name)
        own = clone(estimator).fit(X[rows], target[rows], weight[rows])
        found[name, "own"] = layered_figures(own, X[rows], target[rows], weight[rows])
        shared = clone(estimator).fit(path, target, weight)
        found[name, "shared"] = layered_figures(shared, path, target, weight)
        if name != "greedy difference":
            limit = LAYERED_STREAMED if name.startswith("greedy") else STREAMED
            streamed = clone(estimator).set_params(memory_limit=limit).fit(path, target, weight)
            found[name, "streamed"] = layered_figures(streamed, path, target, weight)
    return found


# Batches of eight samples, of which a rank may have none.
_STEPS = {"batch_size": 8, "random_state": 0}
NETWORKS = {
    "unfolded": UnfoldedTransformerRegressor(n_layers=2, n_steps=10, tol=1e-6, random_state=0),
    "unfolded batches": UnfoldedTransformerClassifier(
        alpha=0.05, n_layers=2, n_steps=8, lr=[0.01, 0.03], width=4, pooling="tokens", class_weight="balanced", **_STEPS
    ),
    "unfolded columns": UnfoldedTransformerRegressor(n_layers=2, n_steps=10, refit_readout=False, random_state=0),
    "constrained": DescentConstrainedClassifier(0.02, n_epochs=3, lr=0.01, class_weight="balanced", **_STEPS),
    "constrained columns": DescentConstrainedClassifier(0.02, n_epochs=2, resilience=0.5, **_STEPS),
    "denoiser": DescentConstrainedDenoiser(0.02, n_epochs=2, lr=0.01, **_STEPS),
    "dust": DescentConstrainedDenoiser(0.02, n_epochs=2, model="dust", validation_fraction=0.0, **_STEPS),
}


def network_arguments(name, rows=slice(None)):
    """What the ``fit`` of an estimator of ``NETWORKS`` gets of some samples; some have padding."""
    X, y, labels, weight = problem(80)
    X[::3, 3:] = 0
    X = X[:, :, 0] if "columns" in name else X
    if name in ("denoiser", "dust"):
        return (X[rows],)
    if "constrained" in name:
        return X[rows], labels[rows]
    return X[rows], (labels if "batches" in name else y)[rows], weight[rows]


def network_figures(model, arguments):
    """What must be the same on all ranks, and as in one process up to rounding."""
    figures = {name: value.numpy() for name, value in model.network_.state_dict().items() if torch.is_tensor(value)}
    for name in ("duals_", "layer_losses_", "energies_", "classes_"):
        if hasattr(model, name):
            figures[name] = np.asarray(getattr(model, name))
    if hasattr(model, "certificate_"):
        gap = model.optimality_gap_
        figures["objectives"] = np.array([model.certificate_.primal, gap.objective, gap.start_objective])
    history = model.history_
    figures["history"] = np.array(history.losses if hasattr(history, "losses") else history.objective)
    if hasattr(model, "score"):
        figures["score"] = np.array(model.score(*arguments))
    frozen = not any(weight.requires_grad for weight in model.network_.parameters())
    return figures, frozen and all(isinstance(weight, torch.nn.Parameter) for weight in model.network_.parameters())


# From how many samples on their values are on the ranks.
WAYS = {"rank 0": 10**6, "ranks": 1, "path": 10**6}


def networks(paths, fits):
    """Training of networks on the rank's own samples, with their values on rank 0 or on the ranks, and on a path."""
    warnings.simplefilter("ignore", InfeasibleWarning)
    group, found = ranks(), {}
    for name, way in fits:
        group.least_samples = WAYS[way]
        arguments = network_arguments(name, own_rows(80))
        if way == "path":
            _, *per_sample = network_arguments(name)
            arguments = (f"{paths}/{name}.npy", *per_sample)
        found[name, way] = network_figures(clone(NETWORKS[name]).fit(*arguments), arguments)
    again = clone(NETWORKS["unfolded"]).fit(*network_arguments("unfolded", own_rows(80)))
    again.set_params(refit_readout=False).fit(*network_arguments("unfolded", own_rows(80)))
    return found, sorted(vars(again))


class Squares(torch.nn.Module):
    """A network whose derivative depends on its weights, but for some that no output depends on."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.arange(3.0, dtype=torch.float64)[:, None] + 1)
        self.unread = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))

    def forward(self, tokens):
        return (tokens @ (self.weight * self.weight)).sum(1)


def network_gradients():
    """Gradient at some weights, asked for after outputs at others, of samples that are all on the last rank."""
    tokens = torch.randn((20, 2, 3), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    network, index = Squares(), torch.arange(17, 20)

    def gradient(samples):
        copied = deepcopy(network)
        samples = samples.of(copied)
        outputs = samples.outputs(predictions, copied, index)
        others = deepcopy(copied)
        others.weight.data += 1
        with torch.no_grad():
            samples.outputs(predictions, others, index)
        outputs.square().sum().backward()
        return copied.weight.grad

    def work(samples):
        return gradient(samples), gradient(NetworkSamples(tokens))

    return on_all_ranks(NetworkSamples(tokens[own_rows(20)]), work, ranks(), ShardedNetworkSamples)


def network_failures():
    """What all ranks say of mistakes of one of them, of Ctrl-C and of a loss that is not finite."""
    last = dist.get_rank() == dist.get_world_size() - 1
    unfolded, constrained = NETWORKS["unfolded"], NETWORKS["constrained"]
    X, y, _ = network_arguments("unfolded", own_rows(80))
    labels = network_arguments("constrained", own_rows(80))[1]
    bad = X.copy()
    bad[0, 0, 0] = np.nan
    mistakes = {
        "nan": lambda: unfolded.fit(bad if last else X, y),
        "widths": lambda: constrained.fit(X[:, :, : 2 if last else 3], labels),
        "targets": lambda: unfolded.fit(X, y[: -1 if last else None]),
        "weights": lambda: constrained.fit(X, labels, np.ones(len(X))),
        "parameter": lambda: clone(constrained).set_params(alpha=1.0).fit(X, labels),
        "path": lambda: unfolded.fit("nothing.npy", y),
        "diverged": lambda: clone(constrained).set_params(lr=1e200).fit(X, labels),
        "Ctrl-C": lambda: stopped.fit(X, y),
    }

    def stop(step, objective):
        if step == 7:
            raise KeyboardInterrupt

    stopped = clone(unfolded).set_params(callback=None if last else stop)
    said = {}
    for name, mistake in mistakes.items():
        try:
            mistake()
        except (ValueError, TypeError, ArithmeticError, OSError, KeyboardInterrupt) as error:
            said[name] = f"{type(error).__name__}: {error}"
    return said, stopped.n_iter_, network_figures(stopped, (X, y))


def long_training(started):
    """Training that takes a while."""
    ranks(QUICK)

    def running(step, objective):
        Path(started).touch()

    X, y, weight = network_arguments("unfolded", own_rows(80))
    UnfoldedTransformerRegressor(n_steps=10**6, callback=running).fit(X, y, weight)


def layered_failures():
    """What all ranks say of mistakes of one of them."""
    X, y, _, weight = problem()
    rows = own_rows(len(X))
    last = dist.get_rank() == dist.get_world_size() - 1
    bad = X[rows].copy()
    bad[0, 0, 0] = np.nan
    greedy, sequence = LAYERED["greedy regressor"], LAYERED["single_row"]
    mistakes = {
        "greedy nan": lambda: greedy.fit(bad if last else X[rows], y[rows]),
        "greedy parameter": lambda: clone(greedy).set_params(n_layers=0).fit(X[rows], y[rows]),
        "sequence nan": lambda: sequence.fit(bad if last else X[rows], X[rows][:, :, 0]),
        "sequence targets": lambda: sequence.fit(X[rows], X[rows][:, :, 0][: -1 if last else None]),
    }
    said = {}
    for name, mistake in mistakes.items():
        try:
            mistake()
        except ValueError as error:
            said[name] = str(error)
    model = clone(greedy).set_params(callback=_Interruption()) if not last else clone(greedy)
    try:
        model.fit(X[rows], y[rows], weight[rows])
    except KeyboardInterrupt:
        said["layers at Ctrl-C"] = [certificate.primal for certificate in model.certificates_]
    return said


class _Interruption:
    """A callback that presses Ctrl-C in the second layer."""

    def __init__(self):
        self.layer, self.last = -1, np.inf

    def __call__(self, progress):
        self.layer += progress.iteration <= self.last
        self.last = progress.iteration
        if self.layer == 1:
            raise KeyboardInterrupt


def figures(model, X, y, weight):
    """What must be the same on all ranks, and as in one process."""
    return {
        "objective": model.certificate_.primal,
        "bound": model.certificate_.dual,
        "coef": np.asarray(model.coef_),
        "intercept": np.asarray(model.intercept_),
        "score": model.score(X, y, weight),
        "n_features": model.n_features_in_,
        "passes": None if model.traffic_ is None else model.traffic_.passes,
    }


def estimators(path):
    """Fits to the rank's own samples, to a path that all share, and one with little memory."""
    X, y, labels, weight = problem()
    rows, found = own_rows(len(X)), {}
    for name, estimator in ESTIMATORS.items():
        target = labels if hasattr(estimator, "class_weight") else y
        own = clone(estimator).fit(X[rows], target[rows], weight[rows])
        found[name, "own"] = figures(own, X[rows], target[rows], weight[rows])
        shared = clone(estimator).fit(path, target, weight)
        found[name, "shared"] = figures(shared, path, target, weight)
        if name not in ("difference", "cv_loss"):
            streamed = clone(estimator).set_params(memory_limit=STREAMED).fit(path, target, weight)
            found[name, "streamed"] = figures(streamed, path, target, weight)
        if name in ("regressor", "classifier"):
            narrow = clone(estimator).set_params(memory_limit=NARROW).fit(path, target, weight)
            found[name, "narrow"] = figures(narrow, path, target, weight)
    stored = path.replace("X.npy", "targets.npz")
    of_paths = clone(ESTIMATORS["regressor"]).fit(path, stored, f"{stored}:sample_weight")
    found["regressor", "paths"] = figures(of_paths, path, stored, f"{stored}:sample_weight")
    result = ESTIMATORS["regressor"].path(X[rows], y[rows], n_alphas=3)
    return found, (result.alphas, result.coefs, result.gaps)


def failures(path):
    """What all ranks say of mistakes of one of them."""
    X, y, labels, _ = problem()
    rank, rows = dist.get_rank(), own_rows(len(X))
    last = rank == dist.get_world_size() - 1
    bad = X[rows].copy()
    bad[0, 0, 0] = np.nan
    model = ESTIMATORS["regressor"]
    fitted = clone(PROBES["regressor"]).fit(X[rows], y[rows])
    mistakes = {
        "empty": lambda: model.fit(X[rows][: 0 if last else None], y[rows][: 0 if last else None]),
        "nan": lambda: model.fit(bad if last else X[rows], y[rows]),
        "widths": lambda: model.fit(X[rows][:, :, : 2 if last else 3], y[rows]),
        "targets": lambda: model.fit(X[rows], y[rows][: -1 if last else None]),
        "targets of all": lambda: model.fit(path, np.append(y, 0.0)),
        "shapes": lambda: model.fit(X[rows], y[rows, None] if last else y[rows]),
        "single": lambda: model.fit(X[rows], 1.0 if last else y[rows]),
        "no such path": lambda: model.fit(X[rows], "nowhere.npy" if last else y[rows]),
        "precision of targets": lambda: model.fit(X[rows], torch.as_tensor(y[rows]).bfloat16()),
        "fewer samples than ranks": lambda: model.fit(str(Path(path).with_name("few.npy")), y[:2]),
        "parameter": lambda: clone(model).set_params(alpha=-1.0).fit(X[rows], y[rows]),
        "source": lambda: model.fit(Unreadable(X[rows], last), y[rows]),
        "own kind of error": lambda: model.fit(Unreadable(X[rows], last, _Gone), y[rows]),
        "Ctrl-C as it reads": lambda: model.fit(Unreadable(X[rows], last, KeyboardInterrupt), y[rows]),
        "kinds of labels": lambda: ESTIMATORS["classifier"].fit(
            X[rows], labels[rows] if last else np.arange(len(y))[rows] % 2
        ),
        "bytes and numbers": lambda: ESTIMATORS["classifier"].fit(
            X[rows], labels.astype("S")[rows] if last else np.arange(len(y))[rows] % 2
        ),
        "labels that cannot be sent": lambda: ESTIMATORS["classifier"].fit(
            X[rows], [(lambda: 0) if last else 0 for _ in y[rows]]
        ),
        "other parameter": lambda: clone(model).set_params(alpha=0.1 if last else 0.2).fit(X[rows], y[rows]),
        "other loss": lambda: clone(model).set_params(loss=Huber(0.1 if last else 0.2)).fit(X[rows], y[rows]),
        "other alphas": lambda: clone(ESTIMATORS["cv"]).set_params(alphas=[0.1 if last else 0.2]).fit(X[rows], y[rows]),
        "other method": lambda: model.fit(X[rows], y[rows]) if last else model.path(X[rows], y[rows]),
        "other grid": lambda: model.path(X[rows], y[rows], n_alphas=2 if last else 3),
        "parameter that is not a number": lambda: clone(model).set_params(alpha=np.nan).fit(X[rows], y[rows]),
        "other names": lambda: model.fit(
            pd.DataFrame(X[rows][:, :2, 0], columns=list("ba" if last else "ab")), y[rows]
        ),
        "dimensions": lambda: model.fit(X[rows][:, :, 0] if last else X[rows][:, :, :1], y[rows]),
        "file": lambda: model.fit("nothing.npy" if last else path, y[rows]),
        "probe": lambda: PROBES["regressor"].fit(X[rows][:, :, : 2 if last else 3], y[rows]),
        "precision": lambda: model.fit(X[rows].astype("f4" if last else "f8"), y[rows]),
        "probe, precision": lambda: PROBES["regressor"].fit(X[rows].astype("f4" if last else "f8"), y[rows]),
        "probe, nan": lambda: PROBES["regressor"].fit(bad if last else X[rows], y[rows]),
        "probe, empty": lambda: PROBES["regressor"].fit([] if last else list(X[rows]), y[rows][: 0 if last else None]),
        "probe, no token": lambda: PROBES["regressor"].fit((X[rows], [0 if last else 5] * len(y[rows])), y[rows]),
        "probe, weights": lambda: ConvexProbeRegressor(dictionary=OnFirstRanks()).fit(X[rows], y[rows]),
        "probe, score": lambda: fitted.score(X[rows][:, :, : 2 if last else 3], y[rows]),
    }
    said = {}
    for name, mistake in mistakes.items():
        try:
            mistake()
        except (ValueError, TypeError, OSError, RuntimeError, KeyboardInterrupt) as error:
            said[name] = str(error)
    model.fit(X[rows], y[rows])  # and goes on
    return said, model.certificate_.primal


def own_parameters(path):
    """The objective of fits on ranks that have their own of what they may; whether they keep it; other mistakes."""
    X, y, labels, _ = problem()
    rank, rows, folder = dist.get_rank(), own_rows(len(X)), Path(path).parent
    last = rank == dist.get_world_size() - 1
    own = {
        "memory_limit": 10**6 + rank,
        "n_jobs": 1 + rank,
        "verbose": last,
        "callback": [None, _no_news, partial(_no_news)][rank],
        "resume": folder / f"rank_{rank}",
        "scoring": [_Accuracy() for _ in range(3)][rank],  # whose repr has another address on each rank
    }
    model = clone(ESTIMATORS["cv"]).set_params(**own)
    share = slice(rank * len(X) // 3, (rank + 1) * len(X) // 3)  # a path of other samples would need all labels
    model.fit(os.path.relpath(path) if last else path, labels[share])
    keeps = all(getattr(model, name) is value for name, value in own.items())
    table, plain = pd.DataFrame(X[rows, :, 0]), ESTIMATORS["regressor"]
    table.columns = list("abcde")
    named = clone(plain).fit(table if last else table.to_numpy(), y[rows])
    others = clone(plain).fit(table.to_numpy() if last else table, y[rows])
    objectives = [each.certificate_.primal for each in (model, named, others)]
    among = folder / "parts" / "rank.npz"
    mistakes = {
        "estimator": lambda: (
            clone(PROBES["regressor"] if last else plain).set_params(random_state=None).fit(X[rows], y[rows])
        ),
        "shards": lambda: clone(plain).fit(among.parent, y, resume=among),
    }
    return objectives, keeps, {name: said_of(mistake) for name, mistake in mistakes.items()}


def _no_news(progress):
    pass


class _Accuracy:
    """A scorer without a ``repr`` of its own."""

    def __call__(self, model, X, y):
        return model.score(X, y)


class _Gone(Exception):
    pass


class Unreadable(Source):
    """Samples that a rank cannot read."""

    shape, dtype = (), torch.float64

    def __init__(self, X, fails, error=RuntimeError):
        self.X, self.fails, self.error, self.shape = torch.as_tensor(X), fails, error, X.shape

    def read(self, rows):
        if self.fails:
            raise self.error("the disk has gone")
        return self.X[rows]


class Longest(TokenPooling):
    """Queries that are the first tokens of the longest samples: a dictionary that reads the samples by itself."""

    def make_weights(self, samples, random_state, sample_weight=None):
        longest = samples.rows(samples.lengths.sort(descending=True, stable=True).indices[:3])
        tokens, _ = longest.padded(slice(0, 3))
        largest = torch.stack([tokens.abs().amax((0, 1)) for _, tokens, _ in samples.chunks()]).amax(0)
        return QueryWeights(torch.cat([tokens[:, 0], largest[None]]), temperature=1.0)


class OnFirstRanks(TokenPooling):
    """The mean, of which the last rank knows nothing."""

    class Weights(MeanWeights):
        def forward(self, tokens, mask):
            if dist.get_rank() == dist.get_world_size() - 1:
                raise ValueError("no weights here")
            return super().forward(tokens, mask)

    def make_weights(self, samples, random_state, sample_weight=None):
        return self.Weights()


DICTIONARY = [MeanPooling(), QueryPooling(6), TokenGates(4), TokenGates(3, source="pairs")]
FOUND = Generation(max_new=4, per_round=2, n_restarts=6, n_steps=10, n_samples=50)
OPTIONS = {"dictionary": DICTIONARY, "random_state": 0}
PROBES = {
    "regressor": ConvexProbeRegressor(alpha=0.05, tol=1e-10, **OPTIONS),
    "auto": ConvexProbeRegressor(alpha=0.05, tol=1e-10, random_state=0),
    "classifier": ConvexProbeClassifier(
        alpha=0.02, tol=1e-10, class_weight="balanced", dictionary=PrototypePooling(4), random_state=0
    ),
    "own": ConvexProbeRegressor(alpha=0.05, tol=1e-10, dictionary=[Longest(), MeanPooling()], standardize=False),
    "limited": ConvexProbeRegressor(alpha=0.05, tol=1e-9, memory_limit=14 * 4 * 8 * 40, **OPTIONS),
    "generated": ConvexProbeRegressor(alpha=0.02, tol=1e-10, generate=FOUND, **OPTIONS),
    "cv": ConvexProbeClassifierCV(alphas=2, cv=2, tol=1e-6, scoring="accuracy", n_jobs=2, **OPTIONS),
    "cv_loss": ConvexProbeRegressorCV(alphas=2, cv=2, tol=1e-9, generate=FOUND, **OPTIONS),
}


def probe_problem():
    """Samples of 1 to 7 tokens, numbers, labels and weights."""
    samples = ragged_samples(n_samples=200)
    y = target_of(samples)
    weight = np.random.default_rng(0).uniform(0.5, 2, len(y))
    weight[::5] = 0
    return samples, y, np.where(y > np.median(y), "up", "down"), weight


def probe_figures(model, X, y, weight):
    """What must be the same on all ranks, and as in one process."""
    return figures(model, X, y, weight) | {
        "dictionary": {name: array.numpy() for name, array in model.pooler_.state_dict().items()},
        "pooler": model.pooler_,
        "rounds": None if model.generation_ is None else [counts.n_added for counts in model.generation_.rounds],
        "alpha": model.heads_.alpha,
        "scores": getattr(model, "score_path_", None),
    }


def probes(path):
    """Fits to the rank's own samples, and to a path that all share."""
    samples, y, labels, weight = probe_problem()
    lengths, rows, found = [len(sample) for sample in samples], own_rows(len(y)), {}
    for name, probe in PROBES.items():
        target = labels if hasattr(probe, "class_weight") else y
        own = clone(probe).fit(samples[rows], target[rows], weight[rows])
        found[name, "own"] = probe_figures(own, samples[rows], target[rows], weight[rows])
        shared = clone(probe).fit((path, lengths), target, weight)
        found[name, "shared"] = probe_figures(shared, (path, lengths), target, weight)
    return found, tuple(PROBES["regressor"].path(samples[rows], y[rows], weight[rows], n_alphas=3))


def probe_forms(path):
    """Objectives of a probe of the same samples in all forms, by each rank in its own form, and on a disk."""
    samples, y, _, _ = probe_problem()
    rows, rank, model = own_rows(len(y)), dist.get_rank(), PROBES["regressor"]
    own = forms(samples[rows])
    array, lengths, mask = padded(samples[rows])
    file = f"{path}.{rank}.npy"
    np.save(file, array)
    part = slice(rank * len(y) // dist.get_world_size(), (rank + 1) * len(y) // dist.get_world_size())
    given = {name: (X, y[rows]) for name, X in own.items()}
    given |= {
        "each its own": (list(own.values())[rank], y[rows]),
        "own files": ((file, lengths), y[rows]),
        "memory maps": ((np.load(file, mmap_mode="r"), mask), y[rows]),
        "lengths of the part": ((path, [len(sample) for sample in samples[part]]), y[part]),
        "mask of all": ((path, padded(samples)[2]), y),
    }
    return {name: clone(model).fit(X, target).certificate_.primal for name, (X, target) in given.items()}


def probe_arrays(path):
    """Fits to arrays whose longest length differs between the ranks, and to a whole path without lengths."""
    rank, model = dist.get_rank(), PROBES["regressor"]
    X, y = different_arrays()[rank]
    whole = np.load(path)
    return model.fit(X, y).certificate_.primal, model.fit(path, whole[:, 0, 0]).certificate_.primal


def different_arrays():
    """An array of each rank's samples, of another length."""
    rng = np.random.default_rng(1)
    arrays = [rng.normal(size=(40, length, 4)) for length in (2, 7, 4)]
    return [(X, target_of(X)) for X in arrays]


def long_fit(path, resume, model, started, tol=1e-13):
    """A fit that takes a while, saves its progress, and is saved."""
    ranks(QUICK)
    X = np.load(path, mmap_mode="r")
    y = X[:, 0, 0] - X[:, 1, 1] > 0
    estimator = ConvexAttentionClassifier(alpha=1e-4, tol=tol, solver="fista", memory_limit=700_000, max_iter=10**6)

    def running(progress):
        Path(started).touch()

    estimator.set_params(callback=running)
    estimator.fit(path, y, resume=resume)
    if dist.get_rank() == 0:
        save_model(estimator.set_params(callback=None), model)
    return estimator.certificate_


def interrupted():
    """Ctrl-C on rank 0 in the middle of a fit: all ranks have the best point so far."""
    X, y, _, _ = problem()
    rows = own_rows(len(X))

    def stop(progress):
        if progress.iteration > 3:
            raise KeyboardInterrupt

    model = ConvexAttentionRegressor(alpha=0.001, tol=1e-13, solver="fista", callback=stop)
    try:
        model.fit(X[rows], y[rows])
    except KeyboardInterrupt as error:
        return model.certificate_.primal, model.status_.name, str(error)
    return None


def interrupted_as_it_waits(reading, interrupted):
    """Ctrl-C on rank 1 as it waits for rank 0, which reads; what each rank says of this fit and the next."""
    ranks(QUICK)
    X, y, _, _ = problem()
    rows, timers, said = own_rows(len(X)), [], []
    if dist.get_rank() == 0:
        source = Slow(X[rows], Path(reading), Path(interrupted))
    else:
        source = Unreadable(X[rows], fails=False)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def ended(*arguments, given=ranks.__globals__["_ended"]):
        if dist.get_rank() == 1 and not timers and Path(reading).exists():
            timers.append(Timer(0.05, signal.raise_signal, [signal.SIGINT]))
            timers[0].start()
        return given(*arguments)

    with patch.dict(ranks.__globals__, _ended=ended):
        for _ in range(2):
            try:
                ESTIMATORS["regressor"].fit(source, y[rows])
            except (KeyboardInterrupt, RankError) as error:
                said.append(f"{type(error).__name__} {error}")
                Path(interrupted).touch()
    print("said", said)


class Slow(Unreadable):
    """Samples that are read until one file is there; meanwhile another is."""

    def __init__(self, X, reading, interrupted):
        super().__init__(X, fails=False)
        self.reading, self.interrupted = reading, interrupted

    def read(self, rows):
        self.reading.touch()
        while not self.interrupted.exists():
            time.sleep(0.01)
        return super().read(rows)


def command_line(path):
    """What ``convexformer fit`` of one file of all samples tells, on rank 0."""
    with (
        patch("convexformer.cli.fit.process_group", lambda device: nullcontext((dist.get_rank(), device))),
        redirect_stdout(StringIO()) as printed,
    ):
        options = ["--alpha", "cv", "--n-alphas", "4", "--tol", "1e-10", "--model", f"{path}.{dist.get_rank()}"]
        assert cli.main(["fit", path, *options, "--json"]) == 0
    return json.loads(printed.getvalue() or "null")


def predict_command(file, model, out):
    """What ``convexformer predict`` tells on rank 0, and how many samples the network was computed for on each rank."""
    heights = []

    def outputs(self, X, given=ConvexAttentionClassifier._outputs):
        heights.append(len(X))
        return given(self, X)

    with (
        patch("convexformer.cli.predict.process_group", lambda device: nullcontext((dist.get_rank(), device))),
        patch.object(ConvexAttentionClassifier, "_outputs", outputs),
        redirect_stdout(StringIO()) as printed,
    ):
        assert cli.main(["predict", file, "--model", model, "--out", f"{out}{dist.get_rank()}.npz", "--json"]) == 0
    return json.loads(printed.getvalue() or "null"), heights


def silent():
    """A rank that no longer answers, without closing its connections."""
    group = ranks(DistributedConfig(timeout=8, heartbeat=0.5))
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    tokens, _, _ = data()
    return on_all_ranks(DenseMap(tokens[own_rows()]), lambda linear_map: linear_map.largest(), group)


def ended_at_the_start():
    """A rank that ends before its first sign of life."""
    with patch("convexformer_solvers.distributed.ranks.Heartbeats", _ended if dist.get_rank() == 1 else Heartbeats):
        ranks(DistributedConfig(timeout=4, heartbeat=0.2))


def _ended(*_):
    os._exit(1)


def main(case, folder):
    """Run a case and keep what it returns."""
    torch.set_num_threads(1)
    rank, size = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
    where = f"file://{folder / 'init'}"
    dist.init_process_group("gloo", where, rank=rank, world_size=size, timeout=timedelta(seconds=30))
    arguments = pickle.loads((folder / "arguments").read_bytes())
    result = globals()[case](**arguments)
    (folder / f"result_{dist.get_rank()}").write_bytes(pickle.dumps(result))
    time.sleep(0.2)
    dist.destroy_process_group()
