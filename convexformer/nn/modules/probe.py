"""Linear probes of tokens that are pooled by a dictionary of fixed weightings."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn

from convexformer.optional import required
from convexformer.validation import as_tensor, check_finite

from .base import check_tokens_for, masked
from .token_weights import TOKEN_WEIGHTS, JoinedWeights, TokenWeights

_FILE, _CONFIG = "model.safetensors", "config.json"
_FORMAT = 1


class TokenPooler(nn.Module):
    r"""Standardised tokens, pooled by each weighting of a dictionary.

    .. math:: T_j(X) = f_j \sum_k a_j(\tilde X)_k \, \tilde x_k, \qquad \tilde x = (x - m) / s

    Weightings may weight each feature by itself, as ``MaxWeights``.

    Parameters
    ----------
    parts : sequence of TokenWeights
        The weightings, one after the other.
    mean, scale : array-like of shape (d,), optional
        The :math:`m` and :math:`s` of each feature. Default: tokens are taken as they are.
    factors : array-like of shape (h,), optional
        The :math:`f_j`. Default: ones.

    Raises
    ------
    ValueError
        If there are no weightings, an array is of another shape, or ``scale`` is not positive.

    Examples
    --------
    >>> from convexformer.nn import GateWeights, MeanWeights
    >>> pooler = TokenPooler([MeanWeights(), GateWeights([[1.0]], [0.0])])
    >>> pooler(torch.tensor([[[2.0], [-4.0]]]))
    tensor([[[-1.],
             [ 1.]]])
    """

    mean: Tensor | None
    scale: Tensor | None
    factors: Tensor | None

    def __init__(
        self,
        parts: Sequence[TokenWeights],
        mean: ArrayLike | Tensor | None = None,
        scale: ArrayLike | Tensor | None = None,
        factors: ArrayLike | Tensor | None = None,
    ) -> None:
        super().__init__()
        self.joined = JoinedWeights(parts)
        for name, values in (("mean", mean), ("scale", scale), ("factors", factors)):
            tensor = None if values is None else as_tensor(values, name=name).detach().to(torch.float64, copy=True)
            if tensor is not None:
                check_finite(name, tensor)
            self.register_buffer(name, tensor)
        if self.scale is not None and not bool((self.scale > 0).all()):
            raise ValueError("scale must be positive")
        widths = self.widths()
        if len(widths) > 1:
            raise ValueError(f"parts, mean and scale must be for tokens of one width, got {sorted(widths)}")
        if self.factors is not None and self.factors.shape != (self.n_weightings,):
            raise ValueError(f"factors must have shape ({self.n_weightings},), got {tuple(self.factors.shape)}")

    def widths(self) -> set[int]:
        """Widths of tokens that its arrays are for; none where it takes any."""
        return self.joined.widths() | {len(array) for array in (self.mean, self.scale) if array is not None}

    @property
    def weightings(self) -> list[TokenWeights]:
        """The parts, in their order."""
        return self.joined.flattened()

    @property
    def n_weightings(self) -> int:
        """Weightings ``h`` of all parts."""
        return self.joined.n_weightings

    def standardized(self, tokens: Tensor) -> Tensor:
        """Tokens less their means, in units of their scales."""
        if self.mean is not None:
            tokens = tokens - self.mean.to(tokens)
        return tokens if self.scale is None else tokens / self.scale.to(tokens)

    def weights(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Weights ``(B, h, n)`` of tokens that are standardised, the factors among them."""
        weights: Tensor = self.joined(tokens, mask)
        return weights if self.factors is None else weights * self.factors.to(weights.dtype)[:, None]

    def by_feature(self, tokens: Tensor, mask: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Weightings that weight each feature by itself: which they are, and their weights ``(B, ., n, d)``."""
        for rows, weights in self.joined.each_by_feature(tokens, mask):
            yield rows, weights if self.factors is None else weights * self.factors.to(weights)[rows, None, None]

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """Pooled tokens.

        Parameters
        ----------
        tokens : Tensor of shape (B, n, d)
            Samples, in float32 or float64.
        mask : Tensor of bool of shape (B, n), optional
            Which tokens are real. Default: all.

        Returns
        -------
        Tensor of shape (B, h, d)
            Zero for a sample without a real token.
        """
        tokens, mask = self.prepared(tokens, mask)
        pooled = self.weights(tokens, mask) @ tokens
        for rows, weights in self.by_feature(tokens, mask):
            pooled[:, rows] = (weights * tokens[:, None]).sum(2)
        return pooled

    def prepared(self, tokens: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Standardised tokens, zero where none is, and their mask; a sample without tokens has these as its own."""
        if mask is None:
            mask = torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device)
        return masked(self.standardized(tokens), mask)

    def extended(self, parts: Sequence[TokenWeights], factors: Tensor | None) -> TokenPooler:
        """The dictionary with further weightings, behind those that there are, and their factors."""
        if self.factors is not None and factors is not None:
            factors = torch.cat([self.factors, factors.to(self.factors)])
        return TokenPooler([*self.weightings, *parts], self.mean, self.scale, factors)

    def described(self) -> list[dict[str, Any]]:
        """Kinds and settings of the parts, as JSON holds them; ``state_dict`` has their arrays.

        Raises
        ------
        TypeError
            If a part is of a class that is not in ``TOKEN_WEIGHTS``.
        """
        names = {cls: name for name, cls in TOKEN_WEIGHTS.items()}
        unknown = [type(part).__name__ for part in self.weightings if type(part) not in names]
        if unknown:
            raise TypeError(f"{unknown} cannot be saved: enter the class in TOKEN_WEIGHTS, here and where it is loaded")
        return [{"kind": names[type(part)], **part.settings()} for part in self.weightings]

    @classmethod
    def rebuilt(cls, descriptions: Sequence[dict[str, Any]], arrays: Mapping[str, Any]) -> TokenPooler:
        """The dictionary of ``described`` and the entries of its ``state_dict``."""
        parts = []
        for number, description in enumerate(descriptions):
            settings = dict(description)
            kind = TOKEN_WEIGHTS[settings.pop("kind")]
            parts.append(kind(**{name: arrays[f"joined.parts.{number}.{name}"] for name in kind.arrays}, **settings))
        return cls(parts, arrays.get("mean"), arrays.get("scale"), arrays.get("factors"))


class ProbeNetwork(nn.Module):
    r"""A probe with fixed weightings of tokens and trained coefficients.

    .. math:: f(X) = b + \sum_j T_j(X)^\top Z_j

    Parameters
    ----------
    pooler : TokenPooler
        Makes the :math:`T_j(X) \in R^d`. Its arrays are buffers, which no optimiser trains.
    coef : array-like of shape (h, d, c)
        The :math:`Z_j`, a parameter.
    bias : array-like of shape (c,)
        The :math:`b`, a parameter.

    Raises
    ------
    ValueError
        If the shapes disagree.

    Examples
    --------
    >>> from convexformer.nn import MeanWeights
    >>> network = ProbeNetwork(TokenPooler([MeanWeights()]), torch.ones(1, 2, 1), torch.zeros(1))
    >>> tokens, mask = torch.ones(1, 3, 2), torch.tensor([[True, True, False]])
    >>> network(tokens, mask)
    tensor([[2.]], grad_fn=<AddBackward0>)
    >>> network.contributions(tokens, mask)[0, :, 0].tolist()
    [1.0, 1.0, 0.0]
    """

    def __init__(self, pooler: TokenPooler, coef: ArrayLike | Tensor, bias: ArrayLike | Tensor) -> None:
        super().__init__()
        coef, bias = (
            part if part.is_floating_point() else part.double()
            for part in (as_tensor(coef, name="coef"), as_tensor(bias, name="bias"))
        )
        width = next(iter(pooler.widths()), None)
        fits = coef.ndim == 3 and len(coef) == pooler.n_weightings and width in (None, coef.shape[1])
        if not fits or bias.shape != coef.shape[2:]:
            raise ValueError(
                f"coef must have shape ({pooler.n_weightings}, {width or 'n_features'}, n_outputs) and bias "
                f"(n_outputs,), got {tuple(coef.shape)} and {tuple(bias.shape)}"
            )
        self.pooler = pooler
        self.coef = nn.Parameter(coef.detach().clone())
        self.bias = nn.Parameter(bias.detach().clone())

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """Scores.

        Parameters
        ----------
        tokens : Tensor of shape (B, n, d)
            Samples, in the precision of ``coef``.
        mask : Tensor of bool of shape (B, n), optional
            Which tokens are real. Default: all.

        Returns
        -------
        Tensor of shape (B, c)
            The bias for a sample without a real token, which estimators refuse.
        """
        check_tokens_for(self.coef, tokens, None, self.coef.shape[1])
        return self.pooler(tokens, mask).flatten(1) @ self.coef.flatten(0, 1) + self.bias

    def contributions(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        r"""What each token adds to the scores: :math:`\sum_j f_j \, a_j(X)_k \, \tilde x_k^\top Z_j`.

        Parameters
        ----------
        tokens, mask
            As of ``forward``.

        Returns
        -------
        Tensor of shape (B, n, c)
            The sum over tokens and the bias are the scores. Zero for tokens that are not real.
        """
        check_tokens_for(self.coef, tokens, None, self.coef.shape[1])
        tokens, mask = self.pooler.prepared(tokens, mask)
        weights = self.pooler.weights(tokens, mask)
        h, d, c = self.coef.shape
        values = (tokens @ self.coef.transpose(0, 1).reshape(d, h * c)).unflatten(2, (h, c))
        found = torch.einsum("bhn,bnhc->bnc", weights, values)
        for rows, own in self.pooler.by_feature(tokens, mask):
            # In place of the same weights for all features.
            found = found + torch.einsum("bhnd,bnd,hdc->bnc", own - weights[:, rows, :, None], tokens, self.coef[rows])
        return found

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write ``model.safetensors`` and ``config.json``, which hold no code.

        Parameters
        ----------
        folder : path-like
            Made where it is not there.

        Raises
        ------
        ModuleNotFoundError
            If the package safetensors is absent.
        TypeError
            If a weighting is of a class that is not in ``TOKEN_WEIGHTS``.
        """
        config = {
            "format": _FORMAT,
            "dtype": str(self.coef.dtype).removeprefix("torch."),
            "parts": self.pooler.described(),
        }
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in self.state_dict().items()}
        _safetensors().save_file(tensors, path / _FILE)
        (path / _CONFIG).write_text(json.dumps(config, indent=1) + "\n")

    @classmethod
    def from_pretrained(cls, folder: str | os.PathLike[str]) -> ProbeNetwork:
        """Load what ``save_pretrained`` wrote.

        Parameters
        ----------
        folder : path-like
            The folder.

        Returns
        -------
        ProbeNetwork
            On the CPU.

        Raises
        ------
        FileNotFoundError
            If a file is not there.
        ModuleNotFoundError
            If the package safetensors is absent.
        ValueError
            If the files are not of ``save_pretrained``, or of a later version.

        Examples
        --------
        >>> import tempfile
        >>> from convexformer.nn import QueryWeights
        >>> pooler = TokenPooler([QueryWeights([[1.0, 0.0]], temperature=2.0)])
        >>> network = ProbeNetwork(pooler, torch.ones(1, 2, 1), torch.zeros(1))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     network.save_pretrained(folder)
        ...     again = ProbeNetwork.from_pretrained(folder)
        >>> tokens = torch.randn(4, 3, 2)
        >>> bool((again(tokens) == network(tokens)).all())
        True
        """
        path = Path(folder)
        for name in (_CONFIG, _FILE):
            if not (path / name).is_file():
                raise FileNotFoundError(f"no {name} in {os.fspath(folder)!r}; give a folder of save_pretrained")
        load_file, damaged = _safetensors().load_file, import_module("safetensors").SafetensorError
        try:
            config = json.loads((path / _CONFIG).read_text(encoding="utf-8"))
            if config["format"] <= _FORMAT:
                tensors = load_file(path / _FILE)
                of_pooler = {name.removeprefix("pooler."): tensor for name, tensor in tensors.items()}
                return cls(TokenPooler.rebuilt(config["parts"], of_pooler), tensors["coef"], tensors["bias"])
        except (AttributeError, KeyError, TypeError, ValueError, damaged) as error:
            raise ValueError(f"{os.fspath(folder)!r} holds no probe of save_pretrained: {error!r}") from error
        raise ValueError(f"the probe in {os.fspath(folder)!r} was saved by a later version of convexformer")


def _safetensors() -> Any:
    return required("safetensors.torch", "folders of probes", "safetensors", "'convexformer[bert]'")
