"""Recovered heads put on a pretrained text encoder: one torch module from sentences to outputs."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from convexformer.validation import is_one_of

from .datasets._activations import Site, fill
from .datasets._sentences import read_sentences
from .datasets._teacher import Teacher
from .heads.attention import Heads
from .nn.modules.probe import ProbeNetwork
from .validation import check_device, check_optional_counts

__all__ = ["EncoderWithHeads"]

Sentences = Sequence[str] | Sequence[Sequence[int]] | Tensor


class EncoderWithHeads(nn.Module):
    r"""A pretrained encoder, cut after one of its layers, with the heads of a certified solution on top.

    .. math:: s \; \mapsto \; X(s) \in R^{n \times d} \; \mapsto \;
              b + \sum_j g_j(X(s)) \, (w_{1j}^\top X(s) \, w_{2j}) \, w_{3j}

    with :math:`X(s)` the activations of sentence :math:`s` as ``load_attention_activations(..., short="pad")`` gives
    them in ``outputs``: the first ``n`` tokens, special ones included, and zero rows where the sentence is shorter. So
    the module's outputs are the predictions of the heads on these activations (``decision_function`` of a classifier,
    except of two outputs on two classes, of which that is the difference), and the certificate of the fit holds for it.

    A probe takes the place of the heads by its module, which sees which tokens are real.

    Parameters
    ----------
    heads : Heads or ProbeNetwork
        ``heads_`` of an estimator fitted to such activations, whose number of tokens is that of the sentences; or
        ``to_torch()`` of a probe.
    model : str or path-like, optional
        Encoder, as in ``load_attention_activations``. Default: all-MiniLM-L6-v2.
    layer : int
        Layer after which the encoder is cut, from 0; must be that of the activations, which only the caller knows.
    site : {"attention", "layer"}
        Where in the layer the activations were taken; likewise.
    n_tokens : int, optional
        Tokens of a sentence to use at most, with a probe. Default: as many as the encoder takes. Heads have a number of
        their own.
    device : str or torch.device, optional
        Where to compute. Default: the CPU. The module moves as others do, by ``to``.

    Attributes
    ----------
    encoder : Module
        The encoder up to the layer, in float32. It is frozen: no parameter has ``requires_grad``, and ``train`` leaves
        it in evaluation mode, since dropout would change the activations that the heads were fitted to.
        ``module.encoder.requires_grad_()`` thaws it.
    head : ConvexAttention or ProbeNetwork
        The heads, in the precision of their fit, to which activations are converted. They alone are trained when
        ``module.parameters()`` are handed to an optimiser, starting from the certified optimum.
    n_tokens : int
        Tokens of a sentence that are used.

    Raises
    ------
    ModuleNotFoundError
        If the extra ``bert`` or the package of the default model is needed and absent.
    OSError
        If the model is not found.
    ValueError, TypeError
        If an argument is not as described, the encoder has another width than the heads, takes fewer tokens, has no
        such layer or is not built as supported.

    Notes
    -----
    Sentences are run together as they are given; how they are batched changes results by rounding alone. A gate may
    then still open or close for a sentence on its very boundary. ``state_dict`` holds encoder and heads. It loads into
    a module of the same encoder, layer and number of heads.

    Examples
    --------
    >>> data = load_attention_activations(texts, layer=5, site="layer", short="pad")  # doctest: +SKIP
    >>> model = ConvexAttentionClassifier().fit(data.outputs, labels)  # doctest: +SKIP
    >>> network = EncoderWithHeads(model.heads_, layer=5, site="layer")  # doctest: +SKIP
    >>> network(["A first sentence.", "And a second one."]).shape  # doctest: +SKIP
    torch.Size([2, 3])

    Arguments are checked before anything is loaded:

    >>> coef = torch.zeros(32, 384, 3)
    >>> EncoderWithHeads(Heads.from_coef(coef, alpha=0.1), layer=5, site="head")
    Traceback (most recent call last):
    ...
    ValueError: site must be 'attention' or 'layer', got 'head'
    """

    def __init__(
        self,
        heads: Heads | ProbeNetwork,
        *,
        model: str | os.PathLike[str] | None = None,
        layer: int,
        site: Site,
        n_tokens: int | None = None,
        device: str | torch.device | None = None,
    ) -> None:
        super().__init__()
        own_tokens, n_features = _sizes(heads)
        if not is_one_of(site, ("attention", "layer")):
            raise ValueError(f"site must be 'attention' or 'layer', got {site!r}")
        place = check_device(device, torch.device("cpu"))
        self._teacher = Teacher(model, layer, site, place)
        check_optional_counts(n_tokens=n_tokens)
        if own_tokens is not None and n_tokens not in (None, own_tokens):
            raise ValueError(f"n_tokens must be that of the heads, {own_tokens}, or None, got {n_tokens}")
        self.n_tokens: int = own_tokens or n_tokens or int(self._teacher.limit)
        self._teacher.check_n_tokens(self.n_tokens)
        width = self._teacher.config.hidden_size
        if n_features != width:
            raise ValueError(
                f"heads are for {n_features} features per token, but the layers of model {self._teacher.name!r} have "
                f"{width}; fit them to activations of this model"
            )
        self.encoder = self._teacher.network.requires_grad_(False)
        self.head: nn.Module = (heads.to_torch() if isinstance(heads, Heads) else copy.deepcopy(heads)).to(place)
        self._reads_masks = own_tokens is None

    def train(self, mode: bool = True) -> EncoderWithHeads:
        """Set the mode of the head; the encoder stays in evaluation mode.

        Parameters
        ----------
        mode : bool, default=True
            As in ``torch.nn.Module.train``.

        Returns
        -------
        self
        """
        super().train(mode)
        self.encoder.eval()
        return self

    def activations(self, sentences: Sentences) -> Tensor:
        """What the heads read: activations of sentences at the layer.

        Parameters
        ----------
        sentences : list of str, or list of list of int
            Sentences, or the tokens of each as the tokenizer numbers them, with special tokens and without padding.

        Returns
        -------
        Tensor of shape (N, n_tokens, d)
            In float32, with gradients where parameters of the encoder require them. Rows after the last token of a
            short sentence are zero; of a long one the first `n_tokens` tokens are used.

        Raises
        ------
        ValueError, TypeError
            If `sentences` is empty or not as described.
        """
        return self._activations_and_mask(sentences)[0]

    def _activations_and_mask(self, sentences: Sentences) -> tuple[Tensor, Tensor]:
        """Activations, and which of them are of tokens."""
        token_ids = [ids[: self.n_tokens] for ids in self._token_ids(sentences)]
        ids, mask = fill(token_ids, self._teacher.padding, None if self._reads_masks else self.n_tokens)
        real = torch.as_tensor(mask, device=next(self.encoder.parameters()).device)
        (seen,) = self._teacher.passing(torch.as_tensor(ids, device=real.device), real)
        return seen[self._teacher.site] * real[:, :, None], real

    def forward(self, sentences: Sentences) -> Tensor:
        """Outputs of the heads.

        Parameters
        ----------
        sentences : list of str, or list of list of int
            As in ``activations``.

        Returns
        -------
        Tensor of shape (N, n_outputs)
            Raw outputs, as of ``Heads.predict``: logits for a classifier.
        """
        tokens, mask = self._activations_and_mask(sentences)
        tokens = tokens.to(next(self.head.parameters()).dtype)
        return self.head(tokens, mask) if self._reads_masks else self.head(tokens)

    def _token_ids(self, sentences: Any) -> list[list[int]]:
        """Token ids of whole sentences."""
        if isinstance(sentences, (str, os.PathLike)) or not isinstance(sentences, Iterable):
            raise TypeError(f"sentences must be a list of str or of lists of token ids, got {sentences!r}")
        items = [item.tolist() if isinstance(item, (Tensor, np.ndarray)) else item for item in sentences]
        if not items or isinstance(items[0], str):
            return self._teacher.tokenize(read_sentences(items))
        size = self._teacher.config.vocab_size
        for i, ids in enumerate(items):
            some = isinstance(ids, Sequence) and len(ids) > 0
            if not some or not all(isinstance(token, Integral) and 0 <= int(token) < size for token in ids):
                raise ValueError(
                    f"sentences[{i}] must be a str, or one or more token ids from 0 to {size - 1}; all must be of one "
                    f"kind, got {ids!r}"
                )
        return items


def _sizes(heads: Any) -> tuple[int | None, int]:
    """Tokens, where they have a number, and features that heads or a probe read."""
    if isinstance(heads, Heads):
        return heads.w1.shape[1], heads.w2.shape[1]
    if isinstance(heads, ProbeNetwork):
        return None, heads.coef.shape[1]
    raise TypeError(
        f"heads must be Heads, the attribute heads_ of an estimator, got {type(heads).__name__}; of a probe give what "
        "its to_torch() returns"
    )
