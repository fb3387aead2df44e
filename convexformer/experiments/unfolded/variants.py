"""Layers whose energies are compared: the guaranteed one, the printed ones, and one with an error."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from convexformer.unfolded import EnergyAttention, InteractionEnergy, UnfoldedTransformer
from convexformer.unfolded.unrolled import tied_attention


class _AsPrinted10(EnergyAttention):
    """Equation (10), which leaves out the regulariser, for the energy that has it."""

    def forward(self, tokens: Tensor, *, anchor: Tensor | None = None, **options: Any) -> Tensor:
        return EnergyAttention("exp", "softmax", step=self.step)(tokens, **options)


class _AsPrinted69(EnergyAttention):
    """Equation (69), the anchored step without the division by the degrees."""

    def forward(
        self,
        tokens: Tensor,
        *,
        projected: Tensor | None = None,
        anchor: Tensor | None = None,
        attention_mask: Any = None,
    ) -> Tensor:
        gamma = InteractionEnergy("exp", attention_mask=attention_mask).weights(
            tokens if projected is None else projected
        )
        total = gamma @ tokens if anchor is None else gamma @ tokens + anchor
        return torch.lerp(tokens, total, self.step)


class _WithoutKeyWeights(EnergyAttention):
    """Usual softmax attention, without the key weights that the energy asks for."""

    def forward(
        self,
        tokens: Tensor,
        *,
        projected: Tensor | None = None,
        anchor: Tensor | None = None,
        attention_mask: Any = None,
    ) -> Tensor:
        keys = tokens if projected is None else projected
        return torch.lerp(tokens, tied_attention(tokens, keys, attention_mask), self.step)


@dataclass(frozen=True)
class Variant:
    """A kind of layer.

    Attributes
    ----------
    name : str
        What tables and figures call it.
    mode, attention : str
        As of ``UnfoldedLayer``.
    damped : bool
        Whether both steps are those of the settings; else they are 1.
    mutant : type or None
        Attention that replaces the right one, whose energy is kept.
    """

    name: str
    mode: str
    attention: str
    damped: bool
    mutant: Callable[..., EnergyAttention] | None = None

    def transformer(self, source: UnfoldedTransformer, *, anchored: bool, step: float) -> UnfoldedTransformer:
        """A transformer of such layers with the weights of another one.

        Parameters
        ----------
        source : UnfoldedTransformer
            Of shared weights.
        anchored : bool
            As of ``UnfoldedTransformer``.
        step : float
            Steps of damped layers.

        Returns
        -------
        UnfoldedTransformer
        """
        layer = source.layers[0]
        step = step if self.damped else 1.0
        steps: dict[str, Any] = {"attention_step": step, "feedforward_step": step}
        width = len(next(source.parameters()))
        network = UnfoldedTransformer(
            width,
            source.n_layers,
            self.mode,  # type: ignore[arg-type]
            anchored=anchored,
            attention=self.attention,
            **steps,
        )
        network.load_state_dict(source.state_dict())
        network.to(next(layer.parameters()))
        if self.mutant is not None:
            network.layers[0].attention = self.mutant("exp", self.attention, step=step)
        return network


VARIANTS = (
    Variant("joint step (guaranteed)", "joint", "jacobi", damped=False),
    Variant("alternating, corrected", "aim", "jacobi", damped=True),
    Variant("alternating, eq. (10) as printed", "aim", "jacobi", damped=True, mutant=_AsPrinted10),
    Variant("alternating, eq. (69) as printed", "aim", "jacobi", damped=True, mutant=_AsPrinted69),
    Variant("alternating, no key weights", "aim", "softmax", damped=True, mutant=_WithoutKeyWeights),
    Variant("layer (20), steps of 1", "aim", "softmax", damped=False),
)
