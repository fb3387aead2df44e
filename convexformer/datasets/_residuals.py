"""Residual streams of texts at a layer of a pretrained language model."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from convexformer.validation import check_device, check_flag, check_optional_counts
from convexformer_solvers.validation import check_counts

from ._encoders import Arrays, TextEncoder, fill, is_list_of_layers, run_batches, states_after
from ._sentences import check_texts

_FORMAT = 1


@dataclass(frozen=True, eq=False, repr=False)
class ResidualActivations:
    """Residual streams of texts after a layer of a pretrained language model.

    Parameters
    ----------
    outputs : ndarray of shape (N, n_tokens, d)
        Hidden states of the tokens kept of each text; float32. Rows from the length of a text on are zero.
    lengths : ndarray of int of shape (N,)
        Tokens kept of each text.
    tokens : list of list of str
        These tokens, as the tokenizer writes them.
    model : str
        Name or folder of the language model.
    layer : int
        Position of the layer, from 0.

    Examples
    --------
    >>> outputs = np.zeros((2, 3, 4), np.float32)
    >>> example = ResidualActivations(outputs, np.array([3, 1]), [["a", "b", "c"], ["d"]], "gpt2", 6)
    >>> example
    ResidualActivations(2 texts, 1 to 3 tokens, 4 features, layer 6 of 'gpt2')
    >>> X, lengths = example.sequences
    >>> X.shape, lengths.tolist()
    ((2, 3, 4), [3, 1])
    """

    outputs: NDArray[np.float32]
    lengths: NDArray[np.int64]
    tokens: list[list[str]]
    model: str
    layer: int

    @property
    def sequences(self) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """The tokens as the estimators take them: the pair of `outputs` and `lengths`."""
        return self.outputs, self.lengths

    def __len__(self) -> int:
        return len(self.outputs)

    def __repr__(self) -> str:
        n_texts, _, n_features = self.outputs.shape
        return (
            f"ResidualActivations({n_texts} texts, {self.lengths.min()} to {self.lengths.max()} tokens, "
            f"{n_features} features, layer {self.layer} of {self.model!r})"
        )


def load_residual_activations(
    texts: Sequence[str],
    *,
    model: str | os.PathLike[str],
    layer: int,
    last_tokens: int | None = None,
    n_tokens: int | None = None,
    add_special_tokens: bool = True,
    batch_size: int = 8,
    cache: str | os.PathLike[str] | None = None,
    device: str | torch.device | None = None,
    verbose: bool = False,
) -> ResidualActivations:
    """Run texts through a pretrained causal language model and keep the residual stream after one layer.

    The hidden states include what the layer adds to its inputs. They are taken before the normalisation at the end of
    the model. Transformers returns the same states as ``hidden_states[layer + 1]`` when called with
    ``output_hidden_states=True``, except for the last layer, where most of its models return normalised states.

    Parameters
    ----------
    texts : list of str
        The texts. They are tokenised exactly as given: no chat template is applied and nothing is stripped.
    model : str or path-like
        Folder of a causal language model with its tokenizer, or its name, which is looked up in the local cache first
        and then at the hub. Every decoder that ``AutoModelForCausalLM`` or ``AutoModel`` loads and that has one list of
        layers is supported, among them models like GPT-2 and Llama.
    layer : int
        Position of the layer, from 0. The best layer differs from task to task, so there is no default.
    last_tokens : int, optional
        Keep only the last so many tokens of each text, or all of a text that has fewer. The model still reads the whole
        text. Default: all tokens are kept.
    n_tokens : int, optional
        Tokens of a text that the model reads, special ones included. Of longer texts only the first so many are read,
        and `last_tokens` counts from the end of these. Default: all tokens are read; a text with more tokens than the
        model takes is an error.
    add_special_tokens : bool, default=True
        Whether the tokenizer adds its special tokens, for example ``<s>`` at the start with Llama. Texts that a chat
        template has made have these tokens already, so pass False for them.
    batch_size : int, default=8
        Texts at once. Texts are filled up on the right to the longest of their batch, and a mask keeps the filling out
        of the attention. Results differ by rounding alone. The default is smaller than that of the other loaders, since
        language models are larger.
    cache : str or path-like, optional
        Folder that keeps every finished batch. An interrupted call goes on where it stopped, and a repeated one neither
        loads nor runs the weights. Batches are found again by the contents of model and tokens and by `layer`,
        `last_tokens` and `batch_size`. Default: nothing is kept.
    device : str or torch.device, optional
        Where to compute, in float32. Weights up to the layer need 4 bytes each there, whatever the precision of the
        files. Default: the CPU.
    verbose : bool, default=False
        Whether to show a progress bar.

    Returns
    -------
    ResidualActivations
        In the order of the texts.

    Raises
    ------
    ModuleNotFoundError
        If the extra ``bert`` is absent.
    OSError
        If the model or its tokenizer is not found.
    ValueError, TypeError
        If an argument is not as described, a text has no token or more tokens than the model takes, the model is too
        small for `layer` or not built as supported, or a file of the cache is damaged.
    KeyboardInterrupt
        On Ctrl-C; with `cache` the finished batches are kept.

    Examples
    --------
    >>> data = load_residual_activations(  # doctest: +SKIP
    ...     texts, model="gpt2", layer=6, last_tokens=16, cache="activations"
    ... )
    >>> data  # doctest: +SKIP
    ResidualActivations(500 texts, 9 to 16 tokens, 768 features, layer 6 of 'gpt2')
    >>> data.sequences[0].shape  # doctest: +SKIP
    (500, 16, 768)

    Arguments are checked before anything is loaded:

    >>> load_residual_activations("One text.", model="gpt2", layer=6)
    Traceback (most recent call last):
    ...
    TypeError: texts must be a list of str, got str; put a single text into a list
    """
    check_counts(batch_size=batch_size)
    check_optional_counts(last_tokens=last_tokens, n_tokens=n_tokens)
    add_special_tokens = check_flag(add_special_tokens, "add_special_tokens")
    place = check_device(device, torch.device("cpu"))
    checked = check_texts(texts, "texts", "a list of str", "text")
    encoder = LanguageModel(model, layer, last_tokens, place)
    token_ids = [ids[:n_tokens] for ids in encoder.tokenize(checked, add_special_tokens=add_special_tokens)]
    encoder.check_lengths(token_ids)
    kept = [ids[-last_tokens:] if last_tokens else ids for ids in token_ids]
    lengths = np.array([len(ids) for ids in kept])
    arrays = run_batches(
        encoder.run,
        lambda start, stop: fill(token_ids[start:stop], encoder.padding),
        len(token_ids),
        batch_size,
        identity=encoder.identity,
        cache=cache,
        verbose=verbose,
        n_tokens=int(lengths.max()),
    )
    tokens = [encoder.tokenizer.convert_ids_to_tokens(ids) for ids in kept]
    return ResidualActivations(arrays["outputs"], lengths, tokens, encoder.name, encoder.layer)


class LanguageModel(TextEncoder):
    """One layer of a pretrained language model; its weights load when it first runs."""

    instead = (
        "pass model= a local folder with config.json, tokenizer files and weights, or the name of a causal language "
        "model at the Hugging Face hub, which is looked up in the local cache first"
    )
    supported = "it must have one list of decoder layers that hand on hidden states; models like GPT-2 and Llama do"

    def __init__(
        self, model: str | os.PathLike[str], layer: int, last_tokens: int | None, device: torch.device
    ) -> None:
        super().__init__(model, layer, device)
        if getattr(self.config, "is_encoder_decoder", False):
            raise self.unsupported()
        self.last_tokens = None if last_tokens is None else int(last_tokens)

    def part_of(self, config: Any) -> Any:
        """Settings of the language model of a model of text and images."""
        return config.get_text_config()

    def check_lengths(self, token_ids: list[list[int]]) -> None:
        """Refuse texts without tokens and those with more than the model takes."""
        for i, ids in enumerate(token_ids):
            if not ids:
                raise ValueError(f"texts[{i}] has no tokens; leave it out")
            if len(ids) > self.limit:
                raise ValueError(
                    f"texts[{i}] has {len(ids)} tokens, more than the {self.limit} that model {self.name!r} takes; "
                    f"shorten it, or read only the first ones with n_tokens={self.limit}"
                )

    def identity(self) -> dict[str, Any]:
        """What the activations of given tokens depend on, for keys of a cache."""
        return {
            "format": _FORMAT,
            "kind": "residuals",
            "model": self.fingerprint(),
            "layer": self.layer,
            "last_tokens": self.last_tokens,
        }

    @torch.inference_mode()
    def run(self, ids: NDArray[np.int64], mask: NDArray[np.bool_]) -> Arrays:
        """States of the tokens kept of one batch of texts, from the first row on; the other rows are zero."""
        network, (block,) = self._network_and_layers
        self.check_positions(ids.shape[1])
        states = states_after(
            network,
            block,
            input_ids=torch.as_tensor(ids, device=self.device),
            attention_mask=torch.as_tensor(mask, device=self.device).long(),
        )
        if states is None or states.shape[:2] != ids.shape:
            raise self.unsupported(network)
        lengths = mask.sum(1, keepdims=True)
        n_kept = np.minimum(lengths, self.last_tokens or ids.shape[1])
        rows = np.arange(n_kept.max()) + lengths - n_kept
        kept = np.arange(n_kept.max()) < n_kept
        chosen = states.float().numpy(force=True)[np.arange(len(ids))[:, None], np.where(kept, rows, 0)]
        return {"outputs": np.where(kept[:, :, None], chosen, np.float32(0))}

    @cached_property
    def _network_and_layers(self) -> tuple[nn.Module, list[nn.Module]]:
        # Each class reads its own files without a report of weights that are left over.
        whole = any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in self.config.architectures or ())
        network = self._load("AutoModelForCausalLM" if whole else "AutoModel")
        network.config.use_cache = False  # keys and values are for generating text
        return self.cut(network.base_model, is_list_of_layers)
