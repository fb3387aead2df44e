"""Fit a model on the workers of Ray Train: ``python ray_train.py SHARDS MODEL``, paths that all machines have."""

import os
import sys

from ray.train import ScalingConfig, get_context
from ray.train.torch import TorchTrainer


def fit(paths):
    from convexformer import ConvexAttentionRegressor, save_model
    from convexformer.storage import read_array

    model = ConvexAttentionRegressor(alpha=0.01, tol=1e-6)
    model.fit(paths["shards"], read_array(paths["shards"], "y"), resume=paths["model"] + ".resume.npz")
    if get_context().get_world_rank() == 0:
        save_model(model, paths["model"])


if __name__ == "__main__":
    shards, model = map(os.path.abspath, sys.argv[1:])
    TorchTrainer(
        fit, train_loop_config={"shards": shards, "model": model}, scaling_config=ScalingConfig(num_workers=2)
    ).fit()
