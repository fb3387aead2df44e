"""The same code on another device than the CPU gives the same answers: a GPU where there is one, and a stand-in."""

import numpy as np
import pytest
import torch
from sklearn.model_selection import GroupKFold
from stand_in_device import NAME, StandIn, stand_in

from convexformer import (
    ConvexAttentionClassifier,
    ConvexAttentionClassifierCV,
    ConvexAttentionRegressor,
    ConvexAttentionRegressorCV,
    ConvexProbeClassifierCV,
    ConvexProbeRegressor,
    ConvexSequenceRegressor,
    DescentConstrainedClassifier,
    DescentConstrainedDenoiser,
    UnfoldedTransformerRegressor,
    attention_program,
    optimality_gap,
)
from convexformer.gates import generate_gates
from convexformer.nn import AttentiveProbe, ConvexAttention, SoftmaxAttention, train
from convexformer.preprocessing import (
    MaxPooling,
    MeanPooling,
    PrototypePooling,
    QueryPooling,
    RelativePositions,
    TokenGates,
)
from convexformer.probes import refit_probe
from convexformer.solvers import Status, get_solver, solve


def data(n_samples=40, n=4, d=3, c=1, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n_samples, n, d))
    return X, X[:, 0, :c] - X[:, 1, -c:] + 0.1 * rng.normal(size=(n_samples, c))


# The stand-in itself


def test_the_stand_in_refuses_what_a_gpu_refuses():
    with stand_in():
        here = torch.arange(6.0).view(2, 3)
        there = here.to(NAME)
        assert isinstance(there, StandIn)
        assert there.device.type == NAME
        for mixture in (lambda: there + here, lambda: there @ here.T, lambda: here[there[0].long()]):
            with pytest.raises(RuntimeError):
                mixture()
        with pytest.raises(RuntimeError, match="expected a generator of stand_in"):
            torch.randn(3, generator=torch.Generator(), device=NAME)
        for conversion in (there.numpy, lambda: np.asarray(there)):
            with pytest.raises(TypeError, match="cpu"):
                conversion()
        assert torch.equal((there + 1).cpu(), here + 1)
        assert torch.equal(there[:, torch.tensor([2, 0])].cpu(), here[:, [2, 0]])  # indices from the CPU are allowed
        assert torch.equal(there[:, [2, 0]].cpu(), here[:, [2, 0]])
        there[0] += torch.ones(3, device=NAME)
        assert torch.equal(there.cpu()[0], here[0] + 1)
        assert float(there.sum()) == float(here.sum()) + 3


# Estimators


CONSTRAINED = {"objective": "last", "n_layers": 2, "n_epochs": 1, "random_state": 0}
FITS = {
    "attention": lambda X, y, path: ConvexAttentionRegressor(0.05).fit(X, y[:, 0], resume=path),
    "gated": lambda X, y, path: ConvexAttentionRegressor(0.05, activation="gated_relu", random_state=0).fit(X, y[:, 0]),
    "generated": lambda X, y, path: ConvexAttentionRegressor(
        0.05, activation="gated_relu", gates="generated", random_state=0
    ).fit(X, y[:, 0]),
    "folds": lambda X, y, path: ConvexAttentionRegressorCV(alphas=2, cv=2).fit(X, y[:, 0]),
    "probe": lambda X, y, path: ConvexProbeRegressor(0.05, random_state=0).fit(X, y[:, 0]),
    "sequence": lambda X, y, path: ConvexSequenceRegressor(0.05).fit(X, y[:, None]),
    "unfolded": lambda X, y, path: UnfoldedTransformerRegressor(n_layers=2, n_steps=2, random_state=0).fit(X, y[:, 0]),
    "constrained": lambda X, y, path: DescentConstrainedClassifier(**CONSTRAINED).fit(X, y[:, 0] > 0),
    "denoised": lambda X, y, path: DescentConstrainedDenoiser(**CONSTRAINED).fit(X),
}


@pytest.mark.parametrize("fit", FITS.values(), ids=FITS)
def test_the_default_device_of_torch_changes_no_fit(fit, tmp_path):
    X, y = data()
    X = X.astype(np.float32)
    here = fit(X, y, tmp_path / "here")
    output = "predict" if hasattr(here, "predict") else "transform"
    wanted = getattr(here, output)(X)
    with stand_in(), torch.device(NAME):
        there = fit(X, y, tmp_path / "there")
        np.testing.assert_allclose(getattr(there, output)(X), wanted, atol=1e-5)
        if fit is not FITS["probe"] and hasattr(here, "heads_"):
            assert there.heads_.objective(X, y) == pytest.approx(here.certificate_.primal)


@pytest.mark.parametrize("estimator", [ConvexAttentionRegressorCV, ConvexAttentionClassifierCV])
def test_cross_validation(estimator, accelerator):
    X, y = data()
    y = y[:, 0] if estimator is ConvexAttentionRegressorCV else y[:, 0] > 0
    here, there = (estimator(alphas=4, cv=2, device=device).fit(X, y) for device in ("cpu", accelerator))
    assert there.alpha_ == pytest.approx(here.alpha_)
    np.testing.assert_allclose(there.coef_, here.coef_, atol=1e-3)


@pytest.mark.parametrize("generate", [None, 4])
def test_probes(generate, accelerator):
    X, y = data()
    lengths = np.random.default_rng(1).integers(1, 5, size=len(X))
    dictionary = [MeanPooling(), QueryPooling(5), TokenGates(5), PrototypePooling(3), RelativePositions([0])]
    options = {"dictionary": [*dictionary, MaxPooling()], "generate": generate, "random_state": 0, "tol": 1e-7}
    here, there = (
        ConvexProbeRegressor(0.01, device=device, **options).fit((X, lengths), y[:, 0])
        for device in ("cpu", accelerator)
    )
    assert there.certificate_.primal == pytest.approx(here.certificate_.primal, rel=1e-5)
    np.testing.assert_allclose(there.predict((X, lengths)), here.predict((X, lengths)), atol=1e-3)
    np.testing.assert_allclose(there.explain((X, lengths)).scores, there.predict((X, lengths)), atol=1e-9)
    np.testing.assert_allclose(there.pool((X, lengths)), here.pool((X, lengths)), atol=1e-6)


def test_cross_validated_probes(accelerator):
    X, y = data()
    options = {"alphas": 2, "cv": 2, "random_state": 0, "dictionary": [QueryPooling(5), PrototypePooling(3)]}
    here, there = (
        ConvexProbeClassifierCV(device=device, **options).fit(X, y[:, 0] > 0) for device in ("cpu", accelerator)
    )
    assert there.alpha_ == pytest.approx(here.alpha_)
    assert there.certificate_.primal == pytest.approx(here.certificate_.primal, abs=1e-3)


def test_refits_of_probes(accelerator):
    X, y = data()
    module = AttentiveProbe(3, 1, n_queries=2)
    here, there = (refit_probe(module, X, y, 0.01, device=device) for device in ("cpu", accelerator))
    assert there.certificate.primal == pytest.approx(here.certificate.primal, abs=1e-4)


def test_targets_in_large_units(accelerator):
    X, y = data()
    here, there = (
        ConvexAttentionRegressor(1.0, loss="huber", tol=1e-5, device=device).fit(X, 1e5 * y)
        for device in ("cpu", accelerator)
    )
    assert there.status_ is here.status_ is Status.CONVERGED
    np.testing.assert_allclose(there.coef_, here.coef_, atol=1e-3 * np.abs(here.coef_).max())


@pytest.mark.parametrize("form", ["single_row", "stochastic", "substochastic"])
def test_sequences(form, accelerator):
    X, y = data(c=2)
    Y = np.stack([y, X[..., 0, :2]], axis=1)
    here, there = (
        ConvexSequenceRegressor(0.05, form=form, tol=1e-6, device=device).fit(X, Y) for device in ("cpu", accelerator)
    )
    assert there.certificate_.primal == pytest.approx(here.certificate_.primal, rel=1e-5)
    np.testing.assert_allclose(there.predict(X), here.predict(X), atol=1e-2)


def test_tensors_stay_where_they_are(accelerator):
    X, y = (torch.as_tensor(part).to(accelerator) for part in data())
    program = attention_program(X, y, alpha=0.05)
    result = solve(program, get_solver("auto"), tol=1e-6)
    assert result.coef.device.type == result.certificate.dual_point.device.type == accelerator
    expected = ConvexAttentionRegressor(0.05, tol=1e-6).fit(*data())
    assert result.certificate.primal == pytest.approx(expected.certificate_.primal, rel=1e-4)


@pytest.mark.parametrize("estimator", [ConvexAttentionRegressor, ConvexSequenceRegressor])
def test_estimators_work_on_the_device_of_the_samples(estimator, accelerator):
    X, y = data(c=2)
    targets = np.stack([y] * X.shape[1], axis=1) if estimator is ConvexSequenceRegressor else y
    there, seen = torch.as_tensor(X).to(accelerator), []
    model = estimator(0.05, tol=1e-6, callback=lambda progress: seen.append(progress.coef.device.type))
    predictions = model.fit(there, torch.as_tensor(targets).to(accelerator)).predict(there)
    assert set(seen) == {accelerator}
    assert isinstance(predictions, np.ndarray)
    expected = estimator(0.05, tol=1e-6).fit(X, targets)
    assert model.certificate_.primal == pytest.approx(expected.certificate_.primal, rel=1e-4)
    np.testing.assert_allclose(predictions, expected.predict(X), atol=1e-2)
    for spoilt, message in ((there.to_sparse(), "X must be a dense tensor"), (there / 0, "Input X contains NaN")):
        with pytest.raises(ValueError, match=message):
            estimator(0.05).fit(spoilt, targets)


@pytest.mark.parametrize("estimator", [ConvexAttentionRegressor, ConvexAttentionClassifier, ConvexSequenceRegressor])
def test_scores_and_objectives_of_tensors_there(estimator, accelerator):
    X, y = data(c=2)
    y = y[:, 0] > 0 if estimator is ConvexAttentionClassifier else y
    weight = np.random.default_rng(1).uniform(0.1, 3, size=len(X))
    model = estimator(0.05, tol=1e-6).fit(X, y, weight)
    there = [torch.as_tensor(part).to(accelerator) for part in (X, y, weight)]
    assert model.score(*there) == pytest.approx(model.score(X, y, weight), rel=1e-6)
    assert model.heads_.objective(*there) == pytest.approx(model.certificate_.primal, rel=1e-6)
    bound = model.heads_.program(*there).dual(model.certificate_.dual_point.to(accelerator))
    assert float(bound) == pytest.approx(model.certificate_.dual, rel=1e-6)


def test_groups_of_samples_there(accelerator):
    X, y = data()
    parts = X, y[:, 0], np.ones(len(X)), np.arange(len(X)) % 4
    here, there = (
        ConvexAttentionRegressorCV(alphas=3, cv=GroupKFold(4)).fit(*given, groups=groups)
        for *given, groups in (parts, [torch.as_tensor(part).to(accelerator) for part in parts])
    )
    np.testing.assert_allclose(there.score_path_, here.score_path_, rtol=1e-3)


def test_ragged_samples_there(accelerator):
    X, y = data()
    lengths = np.random.default_rng(1).integers(1, 5, size=len(X))
    samples = [torch.as_tensor(tokens[:length]) for tokens, length in zip(X, lengths, strict=True)]
    there = [tokens.to(accelerator) for tokens in samples]
    model = ConvexProbeRegressor(0.01, dictionary=MeanPooling(), tol=1e-7)
    expected = model.fit(samples, y[:, 0]).predict(samples)
    np.testing.assert_allclose(model.fit(there, y[:, 0]).predict(there), expected, atol=1e-3)
    with pytest.raises(ValueError, match=r"X must hold samples on one device, got X\[1\] on cpu and X\[0\] on"):
        model.fit([there[0], *samples[1:]], y[:, 0])


def test_generated_gates(accelerator):
    X, y = data(c=2)
    here, there = (
        generate_gates(*(torch.as_tensor(part).to(device) for part in (X, y)), alpha=0.005, max_gates=3, random_state=0)
        for device in ("cpu", accelerator)
    )
    assert len(there.gates) == len(here.gates) > 1
    assert there.certificate.primal == pytest.approx(here.certificate.primal, rel=1e-4)


# Networks


def test_the_optimality_gap_of_a_network(accelerator):
    gaps = []
    for device in ("cpu", accelerator):
        X, y = (torch.as_tensor(part).to(device) for part in data())
        network = ConvexAttention(4, 3, 1, 6).double().to(device)
        train(network, X, y, alpha=0.05, n_steps=20)
        gaps.append(optimality_gap(network, X, y, alpha=0.05))
    assert gaps[1].objective == pytest.approx(gaps[0].objective, rel=1e-6)
    assert gaps[1].bound == pytest.approx(gaps[0].bound, rel=1e-3)


@pytest.mark.parametrize("position", [0, -1, "mean"])
def test_softmax_attention_at_any_position(position, accelerator):
    network, X = SoftmaxAttention(3, 1, 2, 2, position=position).double(), torch.as_tensor(data()[0])
    expected = network(X)
    torch.testing.assert_close(network.to(accelerator)(X.to(accelerator)).cpu(), expected)
