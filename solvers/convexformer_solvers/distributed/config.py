"""The numbers by which ranks wait for each other."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DistributedConfig:
    """Numbers of the communication between ranks.

    Parameters
    ----------
    timeout : float, default=60
        Seconds without a sign of life after which a rank counts as dead. A closed connection is noticed within seconds.
    heartbeat : float, default=1
        Seconds between two signs of life of a rank, and between two looks at those of the others.
    least_samples : int, optional
        Samples of all ranks from which on each rank works on targets and predictions of its own samples. Those of fewer
        samples are on rank 0. Default: as many float64 numbers as are sent in the time of a command without arguments.
        Both times are measured: a product sends a number for each sample that rank 0 holds, and a sum over samples
        that it does not hold takes a command.

    Examples
    --------
    >>> from convexformer_solvers import ranks
    >>> group = ranks(DistributedConfig(timeout=600.0))  # the first call, on every rank
    """

    timeout: float = 60.0
    heartbeat: float = 1.0
    least_samples: int | None = None
