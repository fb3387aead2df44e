"""scikit-learn's own checks of the estimator contract, with no failure expected and no warning let through."""

import pytest
from sklearn.base import BaseEstimator
from sklearn.utils.estimator_checks import parametrize_with_checks

import convexformer
from convexformer import (
    ConvexAttentionClassifier,
    ConvexAttentionClassifierCV,
    ConvexAttentionRegressor,
    ConvexAttentionRegressorCV,
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
)
from convexformer.probes import Generation

GATED = {"activation": "gated_relu", "n_gates": 8, "random_state": 0}
DEEP = {"alpha": 0.05, "n_gates": 2, "random_state": 0}
SHALLOW = {"n_layers": 2, "width": 4, "n_steps": 5, "random_state": 0}
# A short grid that stays away from tiny alphas keeps the hundreds of fits of the checks quick.
QUICK = {"alphas": 2, "cv": 2, "eps": 0.3}
FEW = Generation(max_new=2, n_restarts=4, n_steps=5)

ESTIMATORS = [
    ConvexAttentionRegressor(),
    ConvexAttentionRegressor(**GATED),
    ConvexAttentionRegressor(penalty="nuclear"),
    ConvexAttentionRegressor(loss="huber"),
    ConvexAttentionRegressorCV(**QUICK),
    ConvexAttentionClassifier(),
    # The check compares two fits to 1e-7: with this alpha both end in a polish, far within their tolerance.
    ConvexAttentionClassifier(alpha=0.05, **GATED),
    ConvexAttentionClassifier(penalty="nuclear"),
    ConvexAttentionClassifier(loss="squared_hinge"),
    ConvexAttentionClassifierCV(**QUICK),
    ConvexProbeRegressor(random_state=0),
    ConvexProbeRegressor(generate=FEW, random_state=0),
    ConvexProbeRegressorCV(random_state=0, **QUICK),
    ConvexProbeClassifier(random_state=0),
    ConvexProbeClassifier(generate=FEW, penalty="nuclear", random_state=0),
    ConvexProbeClassifierCV(random_state=0, **QUICK),
    ConvexSequenceRegressor(),
    ConvexSequenceRegressor(form="stochastic"),
    GreedyConvexTransformerRegressor(**DEEP),
    GreedyConvexTransformerClassifier(**DEEP),
    UnfoldedTransformerRegressor(**SHALLOW),
    UnfoldedTransformerClassifier(**SHALLOW),
    DescentConstrainedClassifier(objective="last", lr=0.02, n_epochs=20, n_layers=2, random_state=0),
    DescentConstrainedDenoiser(objective="last", n_epochs=5, n_layers=2, random_state=0),
]


# Predictions that are to agree to 1e-7 do so by the algorithm that comes first, which the plan takes by rates.
@pytest.mark.usefixtures("steady_rates")
@parametrize_with_checks(ESTIMATORS)
def test_scikit_learn_contract(estimator, check):
    check(estimator)


def test_every_public_estimator_is_checked():
    public = {getattr(convexformer, name) for name in convexformer.__all__}
    estimators = {item for item in public if isinstance(item, type) and issubclass(item, BaseEstimator)}
    assert estimators == {type(estimator) for estimator in ESTIMATORS}


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=lambda estimator: type(estimator).__name__)
def test_tags_allow_token_sequences(estimator):
    tags = estimator.__sklearn_tags__()
    assert tags.input_tags.three_d_array
    assert tags.input_tags.two_d_array
    assert tags.target_tags.multi_output == isinstance(
        estimator,
        (
            ConvexAttentionRegressor,
            ConvexAttentionRegressorCV,
            ConvexProbeRegressor,
            ConvexProbeRegressorCV,
            ConvexSequenceRegressor,
            GreedyConvexTransformerRegressor,
            UnfoldedTransformerRegressor,
        ),
    )
