"""Outputs of trained networks, and their test scores while they train."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from convexformer.nn import AttentionNetwork, TrainingHistory

from .data import Part, r2_and_error

_AT_ONCE = 256
_LOOKS = 20


@torch.no_grad()
def outputs_of(network: AttentionNetwork, tokens: NDArray[np.float32], device: str | None) -> NDArray[np.float64]:
    """Predictions of a network, a few samples at a time, in float64."""
    parts = torch.as_tensor(tokens).split(_AT_ONCE)
    return torch.cat([network(part.to(device)).cpu() for part in parts]).double().numpy()


class TestScores:
    """Test R2 of a network at some steps, more of them early, for each run of a search.

    Parameters
    ----------
    test : Part
        Test samples.
    device : str or None
        Device of the network.
    n_steps : int
        Steps of each run.
    """

    __test__ = False  # no test case, whatever its name

    def __init__(self, test: Part, device: str | None, n_steps: int) -> None:
        self.test, self.device = test, device
        self.looks = {0, *np.geomspace(1, n_steps, _LOOKS).astype(int).tolist()}
        self.runs: list[dict[int, float]] = []

    def of(self, network: AttentionNetwork) -> Callable[[int, float], None]:
        """Callback for ``train`` of this network."""

        def look(step: int, objective: float) -> None:
            if step == 0:
                self.runs.append({})
            if step in self.looks:
                outputs = outputs_of(network, self.test.tokens, self.device)
                self.runs[-1][step] = r2_and_error(outputs, self.test.y)[0]

        return look

    def curve(self, history: TrainingHistory, final: float | None) -> tuple[list[float], list[float]]:
        """Seconds and scores of the run that a search kept, with the score that it ended with.

        Parameters
        ----------
        history : TrainingHistory
            What ``train`` returned.
        final : float or None
            Test R2 of the network that it left, None where it diverged.

        Returns
        -------
        seconds, scores
        """
        number = next(i for i, trial in enumerate(history.trials) if trial.seconds is history.seconds)
        run = self.runs[number - len(history.trials)]  # a later search of the same scores comes last
        seconds = dict(zip(history.steps, history.seconds, strict=True))
        last = [] if final is None else [(history.seconds[-1], final)]
        return [*(seconds[step] for step in run), *(t for t, _ in last)], [*run.values(), *(r2 for _, r2 in last)]
