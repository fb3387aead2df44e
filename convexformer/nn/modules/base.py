"""What the non-convex networks share: predictions, decay, and the objective made of both."""

from __future__ import annotations

import copy
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from inspect import signature
from typing import Any, TypeAlias, TypeVar

import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn

from convexformer.gates import Gates
from convexformer.validation import HALF, as_tensor, check_strided, is_integer, mask_of
from convexformer_solvers import Loss, Penalty, get_loss
from convexformer_solvers.draws import standard_normal
from convexformer_solvers.validation import check_tensor, is_real

ModuleT = TypeVar("ModuleT", bound=nn.Module)
Samples: TypeAlias = Tensor | tuple[Tensor, ArrayLike | Tensor]  # tokens, alone or with a mask or lengths
_ONE_THREAD = threading.RLock()  # of ``seeded``, which may stand inside another


def sample_losses(predictions: Tensor, y: Tensor, loss: str | Loss = "squared") -> Tensor:
    r"""Loss of each sample; that of a sequence is the sum over its positions.

    Parameters
    ----------
    predictions : Tensor of shape (N, c) or (N, T, c)
        Outputs of a network, per sample or per sample and position.
    y : Tensor of the shape of ``predictions`` or (N, T * c)
        Targets of the loss.
    loss : str or Loss, default="squared"
        Half the squared distance by default. Of a loss that is a sum over outputs this is the loss of the flattened
        ``(N, T * c)`` predictions; softmax cross-entropy is taken over the ``c`` outputs of each position.

    Returns
    -------
    Tensor of shape (N,)

    Raises
    ------
    ValueError
        If ``y`` does not have as many samples, or numbers per sample, as ``predictions``.

    Examples
    --------
    >>> sample_losses(torch.zeros(1, 2, 1), torch.tensor([[[2.0], [4.0]]]))
    tensor([10.])
    """
    check_target_shape(y, tuple(predictions.shape))
    n_outputs = predictions.shape[-1]
    by_position = get_loss(loss).value(predictions.reshape(-1, n_outputs), y.reshape(-1, n_outputs))
    return by_position.reshape(len(predictions), -1).sum(1)


def copied_to(module: ModuleT, device: torch.device | str) -> ModuleT:
    """A copy of a module on a device; ``module.to(device)`` would move the module itself."""
    return copy.deepcopy(module).to(device)


def check_target_shape(y: Tensor, shape: tuple[int, ...], name: str = "y") -> None:
    """Raise unless targets have the shape of the predictions, be positions and outputs together or apart."""
    if y.ndim < 2 or tuple(y.flatten(1).shape) != (shape[0], math.prod(shape[1:])):
        raise ValueError(f"{name} must have shape {shape}, that of the predictions, got {tuple(y.shape)}")


def relative_weight(given: ArrayLike | Tensor, y: Tensor) -> Tensor:
    """Checked weights of samples, of mean 1 where they are positive."""
    weight = as_tensor(given, y.device, torch.float64, "sample_weight")
    if weight.shape != (len(y),):
        raise ValueError(f"sample_weight must have shape ({len(y)},), got {tuple(weight.shape)}")
    if not bool(torch.isfinite(weight).all()) or bool((weight < 0).any()) or not bool((weight > 0).any()):
        raise ValueError("sample_weight must be finite, non-negative and not all zero")
    share = (weight / weight.max()).to(y)  # weights themselves may be beyond the numbers of this precision
    return share / share[share > 0].mean()


def check_decay_weight(alpha: Any) -> None:
    """Raise ``ValueError`` unless the weight of a decay is a finite number of at least 0."""
    if not (is_real(alpha) and 0 <= alpha < math.inf):
        raise ValueError(f"alpha must be a number of at least 0, got {alpha!r}")


def check_tokens_for(parameter: Tensor, tokens: Tensor, n_tokens: int | None, n_features: int) -> None:
    """Raise an error unless samples are like a parameter, of so many tokens of such a width; None: of any number."""
    check_like(parameter, tokens, "tokens")
    if tokens.ndim != 3 or tokens.shape[2] != n_features or n_tokens not in (None, tokens.shape[1]):
        wanted = f"(n_samples, {'n_tokens' if n_tokens is None else n_tokens}, {n_features})"
        single = n_tokens is None and tokens.shape[1:] == (n_features,)
        remedy = "; tokens[:, None] makes each row a sample of one token" if single else ""
        raise ValueError(f"tokens must have shape {wanted}, got {tuple(tokens.shape)}{remedy}")


def as_arguments(**values: object) -> str:
    """Arguments as ``repr`` of a module shows them."""
    return ", ".join(f"{name}={value!r}" for name, value in values.items())


def check_seed(seed: Any) -> int:
    """A seed as torch's generators take it; ``ValueError`` where it is none."""
    if not is_integer(seed):
        raise ValueError(f"seed must be an integer, got {seed!r}")
    if not -(2**63) <= seed < 2**64:
        raise ValueError(f"seed must have at most 64 bits, got {seed}")
    return int(seed)


def normal_draws(seed: int) -> Callable[..., Tensor]:
    """Function of a shape that draws standard normal numbers, without touching torch's global generator."""
    generator = torch.Generator().manual_seed(check_seed(seed))

    def draw(*shape: int) -> Tensor:
        drawn = standard_normal(shape, generator)
        return torch.empty(shape).copy_(drawn)  # on the default device

    return draw


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Let torch's modules draw their initial weights from a seed; its global generator is as before afterwards.

    Other threads that enter it wait: they would seed the same generator anew.
    """
    seed = check_seed(seed)
    with _ONE_THREAD, torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed other devices too
        yield


@contextmanager
def seeded_parts(module: nn.Module, seed: int) -> Iterator[None]:
    """Let a module make its parts from a seed, on the default device; drawn on the CPU, so that all have the same."""
    device = torch.empty(0).device
    with torch.device("cpu"), seeded(seed):
        yield
    if device.type != "cpu":
        module.to(device)


def draw_seed() -> int:
    """A seed from torch's global generator, for a part that has a stream of its own inside ``seeded``."""
    return int(torch.randint(2**31, (), device="cpu"))


def check_like(parameter: Tensor, part: Tensor, name: str) -> None:
    """Raise an error naming a part of the data that is no tensor of the precision and on the device of a parameter."""
    check_tensor(name, part)
    check_strided(part, name)
    kind, is_alike = part.device.type, part.dtype == parameter.dtype
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):  # which leaves float64 as it is
        is_alike = is_alike or {part.dtype, parameter.dtype} <= {torch.float32, *HALF}
    if not is_alike or part.device != parameter.device:
        raise ValueError(
            f"{name} must be {parameter.dtype} on {parameter.device} like the network, "
            f"got {part.dtype} on {part.device}"
        )


def check_not_half(name: str, weights: Iterable[Tensor]) -> None:
    """Raise ``ValueError`` naming a network with weights in float16, in which the denominator of Adam is zero."""
    if any(weight.dtype == torch.float16 for weight in weights):
        raise ValueError(
            f"{name} must have weights in float32, float64 or bfloat16, got torch.float16, in which Adam divides by "
            f"zero; train {name}.float() and give the precision back by .half()"
        )


def check_mask(mask: Tensor) -> None:
    """Raise an error unless a mask of tokens is a boolean tensor of two dimensions."""
    check_tensor("mask", mask)
    if mask.dtype != torch.bool or mask.ndim != 2:
        raise ValueError(
            f"mask must be torch.bool of shape (n_samples, n_tokens), True where a token is real, got {mask.dtype} of "
            f"shape {tuple(mask.shape)}; mask.bool() makes one of zeros and ones, and torch.arange(n_tokens) < "
            "lengths[:, None] one of lengths"
        )


def masked(tokens: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens, zero where none is real, and which to weigh: all of a sample without a real one, whose shares are nan."""
    check_mask(mask)
    return tokens.masked_fill(~mask[..., None], 0.0), mask | ~mask.any(1, keepdim=True)


class GatedModule(nn.Module):
    """A module whose ``state_dict`` holds its gates, in float64 whatever the precision of the weights.

    Attributes
    ----------
    gates : Gates or None
        The gates, which a subclass sets.

    Examples
    --------
    >>> class Gated(GatedModule):
    ...     gates = None
    >>> loaded = Gated()
    >>> loaded.set_extra_state({"u1": torch.ones(4, 2), "u2": torch.ones(4, 3)})
    >>> len(loaded.gates)
    4
    """

    gates: Gates | None

    def masks_of(self, tokens: Tensor, masks: Tensor | None) -> Tensor:
        """Masks ``(N, h)`` of the gates on samples; those that are given, if they are such."""
        assert self.gates is not None
        if masks is None and torch.compiler.is_compiling():  # a graph takes no data in parts
            if torch.compiler.is_exporting() and torch.compiler.is_dynamo_compiling():
                raise ValueError("gates would be left out of a graph of strict=True; export with strict=False")
            u1, u2 = (torch.from_numpy(u).to(tokens.device) for u in (self.gates.u1, self.gates.u2))
            return torch.einsum("nkd,hk,hd->nh", tokens.detach().double(), u1, u2) >= 0
        if masks is None:
            return self.gates.masks(tokens)
        wanted = (len(tokens), len(self.gates))
        if tuple(masks.shape) != wanted:
            raise ValueError(f"masks must have shape {wanted}, one column per gate, got {tuple(masks.shape)}")
        return masks

    def get_extra_state(self) -> dict[str, Tensor]:
        """Gates for ``state_dict``; they are no parameters, but without them the weights mean nothing."""
        return {} if self.gates is None else {"u1": torch.tensor(self.gates.u1), "u2": torch.tensor(self.gates.u2)}

    def set_extra_state(self, state: dict[str, Tensor]) -> None:
        """Gates from a ``state_dict``."""
        self.gates = Gates(*(state[name].numpy(force=True) for name in ("u1", "u2"))) if "u1" in state else None


def inputs_of(network: AttentionNetwork, samples: Samples, name: str = "tokens") -> tuple[Tensor, ...]:
    """Tokens alone or, of a pair, checked tokens, zero where none is real, and their mask."""
    if not (isinstance(samples, (tuple, list)) and len(samples) == 2):
        return (samples,)
    if not {"mask", "attention_mask"}.intersection(list(signature(network.forward).parameters)[1:2]):
        raise ValueError(
            f"{name} must be one tensor for {type(network).__name__}, whose forward takes no mask of tokens, got a pair"
        )
    tokens, real = samples
    network.check_samples(tokens, f"{name}[0]")
    mask = mask_of(real, len(tokens), tokens.shape[1], tokens.device, name)
    empty = (~mask.any(1)).nonzero()
    if len(empty):
        raise ValueError(
            f"{name}[1] must leave each sample at least one token that is real, got none of sample {int(empty[0])}"
        )
    return tokens.masked_fill(~mask.reshape(*mask.shape, *[1] * (tokens.ndim - 2)), 0), mask


class AttentionNetwork(nn.Module, ABC):
    """A network of attention heads with its own weight decay; what ``train`` trains.

    A subclass gives ``forward`` and ``decay``, ``prepared`` where something about the samples never changes during
    training, and ``check_samples`` where samples are something else than tokens. Where the second parameter of
    ``forward`` is called ``mask`` or ``attention_mask``, it takes which tokens are real, a tensor of bool of shape
    ``(N, n)``.

    Examples
    --------
    >>> class Mean(AttentionNetwork):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.weight = nn.Parameter(torch.ones(3, 1))
    ...
    ...     def forward(self, tokens):
    ...         return tokens.mean(1) @ self.weight
    ...
    ...     def decay(self, penalty=None):
    ...         return self.weight.square().sum() / 2
    >>> Mean().objective(torch.ones(4, 2, 3), torch.zeros(4, 1), alpha=1.0).item()
    6.0
    """

    @abstractmethod
    def forward(self, tokens: Tensor) -> Tensor:
        """Predictions of shape ``(N, c)`` or ``(N, T, c)`` for tokens of shape ``(N, n, d)``."""

    @abstractmethod
    def decay(self, penalty: str | Penalty | None = None) -> Tensor:
        """Weight decay, a scalar; None is the network's own default."""

    def check_samples(self, samples: Tensor, name: str = "tokens") -> None:
        """Refuse samples that ``forward`` does not take; by default all but tokens like the network's weights.

        Parameters
        ----------
        samples : Tensor of shape (N, n, d)
            The samples, in the precision and on the device of the network.
        name : str, default="tokens"
            What messages call them.

        Raises
        ------
        ValueError
            If the samples are none, or of another shape, precision or device.
        """
        check_tensor(name, samples)
        if samples.ndim != 3 or len(samples) == 0:
            raise ValueError(f"{name} must have shape (n_samples, n_tokens, n_features), got {tuple(samples.shape)}")
        check_like(next(self.parameters()), samples, name)

    def prepared(self, tokens: Tensor) -> tuple[Tensor, ...]:
        """Arguments of ``forward`` for these samples, with all that no training step changes already computed.

        Parameters
        ----------
        tokens : Tensor of shape (N, n, d)
            The samples.

        Returns
        -------
        tuple of Tensor
            Each with one entry per sample, so that ``network(*(part[rows] for part in prepared))`` are predictions
            for some of the samples. The tokens alone by default.
        """
        return (tokens,)

    def objective(
        self,
        tokens: Samples,
        y: Tensor,
        *,
        loss: str | Loss = "squared",
        penalty: str | Penalty | None = None,
        alpha: float,
        sample_weight: ArrayLike | Tensor | None = None,
    ) -> Tensor:
        """Mean loss over samples plus ``alpha`` times the decay.

        Where a convex program is equivalent to the network this is never below the program's certified dual bound.

        Parameters
        ----------
        tokens : Tensor of shape (N, n, d), or pair
            The samples; alone or, as in ``train``, in a pair with a mask or lengths.
        y : Tensor of the shape of the predictions, or (N, T * c) for predictions of shape (N, T, c)
            Targets of the loss; that of a sequence is summed over its positions.
        loss : str or Loss, default="squared"
            As in the program.
        penalty : str or Penalty, optional
            As in the program. Default: the network's own, see ``decay``.
        alpha : float
            Weight of the decay, 0 or more.
        sample_weight : array-like or Tensor of shape (N,), optional
            Non-negative; only ratios matter.

        Returns
        -------
        Tensor
            A scalar with gradients.

        Raises
        ------
        ValueError
            If ``y`` does not fit the predictions, or another argument is not as described.
        """
        check_decay_weight(alpha)
        inputs = inputs_of(self, tokens)
        check_tensor("y", y)
        if sample_weight is None:
            return sample_losses(self(*inputs), y, loss).mean() + alpha * self.decay(penalty)
        share = relative_weight(sample_weight, y)
        counted = share > 0  # the loss of others may be infinite
        losses = sample_losses(self(*(part[counted] for part in inputs)), y[counted], loss)
        return (losses * share[counted]).mean() + alpha * self.decay(penalty)
