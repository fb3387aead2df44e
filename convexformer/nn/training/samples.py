"""Samples that networks are trained on, in one process or spread over the ranks of a process group.

Of samples on several ranks, rank 0 trains the network. In each step it sends the weights to the ranks, which compute
the network on their own samples, and it receives the sum of their gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from convexformer.nn.modules.base import AttentionNetwork
from convexformer_solvers import Penalty
from convexformer_solvers.distributed import Sharded
from convexformer_solvers.linear_maps.parts import InParts

# Called with a network, tokens, which rows of a batch they are, and options; gives a row for each sample.
NetworkFunction = Callable[..., Tensor]


class NetworkSamples(InParts):
    """Samples in one tensor, and the network that is trained on them.

    Parameters
    ----------
    tokens : Tensor of shape (N, n, d)
        The samples.
    network : Module, optional
        The network; the ranks of a group have copies of it.
    """

    device = property(lambda self: self.tokens.device)
    dtype = property(lambda self: self.tokens.dtype)
    n_features = property(lambda self: self.tokens.shape[2])

    def __init__(self, tokens: Tensor, network: nn.Module | None = None) -> None:
        self.tokens, self.network = tokens, network

    def __len__(self) -> int:
        return len(self.tokens)

    def to(self, device: torch.device) -> NetworkSamples:
        """The samples on a device."""
        return NetworkSamples(self.tokens.to(device), self.network)

    def rows(self, index: Tensor | slice) -> NetworkSamples:
        """Some of the samples."""
        return NetworkSamples(self.tokens[index], self.network)

    def of(self, network: nn.Module) -> NetworkSamples:
        """The samples for a network that is to be trained."""
        return NetworkSamples(self.tokens, network)

    def outputs(self, function: NetworkFunction, network: nn.Module, index: Tensor, **options: Any) -> Tensor:
        """What a function makes of the network and some samples, differentiable in the network's weights."""
        return function(network, self.tokens[index], rows=slice(None), **options)

    def for_training(self, network: AttentionNetwork) -> tuple[AttentionNetwork, Tensor]:
        """A network and samples as ``train`` takes them."""
        return network, self.tokens

    # Commands of rank 0

    def computed(
        self, function: NetworkFunction, weights: Tensor, rows: Tensor, differentiable: bool, options: dict[str, Any]
    ) -> Tensor:
        """``outputs`` of all samples of this rank with given weights, of which ``gradient`` may be asked next."""
        assert self.network is not None
        self._weights = weights
        vector_to_parameters(weights, self.network.parameters())
        with torch.set_grad_enabled(differentiable):
            self._outputs = function(self.network, self.tokens, rows=rows, **options)
        return self._outputs.detach()

    def gradient(self, slopes: Tensor) -> Tensor:
        """Gradient in the weights of the outputs times `slopes`, summed over the samples of this rank."""
        assert self.network is not None
        weights = list(self.network.parameters())
        vector_to_parameters(self._weights, weights)  # other batches may have been computed since
        return parameters_to_vector(
            torch.autograd.grad(self._outputs, weights, slopes, allow_unused=True, materialize_grads=True)
        )


class ShardedNetworkSamples(Sharded):
    """Samples of which each rank has its own; it exists on rank 0.

    A batch sends the weights to the ranks and its outputs to rank 0, and in training the slopes of its outputs to the
    ranks and the sum of the gradients to rank 0.

    Parameters
    ----------
    layout, name, local
        As in ``Sharded``; the parts are ``NetworkSamples``.
    """

    device = property(lambda self: self.local.device)
    dtype = property(lambda self: self.local.dtype)
    n_features = property(lambda self: self.local.n_features)

    @staticmethod
    def alike(local: NetworkSamples) -> dict[str, Any]:
        return {"shape of a sample": tuple(local.tokens.shape[1:]), "precision": local.dtype}

    def __len__(self) -> int:
        return self.layout.n_samples

    def of(self, network: nn.Module) -> ShardedNetworkSamples:
        """As of ``NetworkSamples``: each rank gets a copy of the network."""
        return self._derived("of", network=network)

    def outputs(self, function: NetworkFunction, network: nn.Module, index: Tensor, **options: Any) -> Tensor:
        """As of ``NetworkSamples``; the function must be one that can be pickled."""
        weights = parameters_to_vector(network.parameters())
        return _Outputs.apply(weights, self.rows(index), function, options)

    def for_training(self, network: AttentionNetwork) -> tuple[AttentionNetwork, Tensor]:
        """A network that takes positions of samples, and those of all."""
        return _OfPositions(network, self.of(network)), torch.arange(len(self), device=self.device)

    def computed(self, function: NetworkFunction, weights: Tensor, options: dict[str, Any]) -> Tensor:
        """``outputs`` of all samples, in order."""
        parts = self._all(
            "computed",
            "rows",
            per_sample={"rows": torch.arange(len(self))},
            function=function,
            weights=weights,
            differentiable=weights.requires_grad,
            options=options,
        )
        return self.layout.joined(parts)

    def gradient(self, slopes: Tensor) -> Tensor:
        """Gradient in the weights of the last outputs times `slopes`, summed over all samples."""
        return self._all("gradient", "sum", per_sample={"slopes": slopes})


class _Outputs(torch.autograd.Function):
    """Outputs of samples on the ranks as a function of the weights."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, samples: Any, function: NetworkFunction, options: dict[str, Any]) -> Tensor:
        ctx.samples = samples
        return samples.computed(function, weights, options)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slopes: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.samples.gradient(slopes), None, None, None


class _OfPositions(AttentionNetwork):
    """A network of samples on the ranks, which takes their positions in place of tokens."""

    def __init__(self, network: AttentionNetwork, samples: ShardedNetworkSamples) -> None:
        super().__init__()
        self.network: AttentionNetwork = network
        self._samples = samples

    def check_samples(self, samples: Tensor, name: str = "tokens") -> None:
        """Positions need no check."""

    def forward(self, tokens: Tensor) -> Tensor:
        return self._samples.outputs(predictions, self.network, tokens)

    def decay(self, penalty: str | Penalty | None = None) -> Tensor:
        return self.network.decay(penalty)


def predictions(network: nn.Module, tokens: Tensor, rows: Any) -> Tensor:
    """Predictions of a network."""
    return network(tokens)
