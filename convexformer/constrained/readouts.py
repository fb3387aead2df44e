"""Outputs of every layer of an encoder or a causal language model, through one readout that all layers share ([K])."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from convexformer.nn.modules.base import as_arguments, seeded
from convexformer.unfolded.graphs import check_attention_mask
from convexformer.unfolded.unrolled import UnrolledNetwork
from convexformer.validation import check_flag, check_one_of
from convexformer_solvers.validation import check_counts, check_tensor, is_real

from .encoder_parts import End, base_of, first_run, noise_on_embeddings, noisy, patch_sides, sizes

Readout = Literal["first", "mean", "vocabulary", "reconstruction"]
READOUTS = ("first", "mean", "vocabulary", "reconstruction")


def layer_readouts(
    model: nn.Module, n_outputs: int | None = None, *, readout: Readout = "first", freeze: bool = False, seed: int = 0
) -> LayerReadouts:
    r"""Put one linear readout on all layers of a network.

    [K] constrains the losses of all layers, so each must put out what the last does. With the hidden states
    :math:`H_l` of layer ``l`` and a readout that all layers share,

    .. math:: \Phi_l(x) = W \, \mathrm{pool}(\mathrm{norm}(H_l(x))) + b, \qquad l = 1, \dots, L,

    where ``norm`` is the normalisation after the last layer, of models that have one (see Notes). The embedding,
    ``hidden_states[0]``, is no layer.

    Parameters
    ----------
    model : Module
        A Hugging Face encoder or causal model, as ``AutoModel.from_pretrained(folder)`` and
        ``AutoModelForCausalLM.from_pretrained(folder)`` load them from a local folder, or an ``UnrolledTransformer`` or
        ``DUST``. Of a model with a head of its own the head is used for ``"vocabulary"`` alone.
    n_outputs : int, optional
        Outputs of the readout. Needed for ``"first"`` and ``"mean"``. Default of ``"reconstruction"``: pixels of a
        patch times channels, by the model's configuration. Of ``"vocabulary"`` the model decides.
    readout : {"first", "mean", "vocabulary", "reconstruction"}, default="first"
        What is read:

        - ``"first"``: the first token, [CLS] of encoders, as [K] does. In a causal model it sees no other token.
        - ``"mean"``: the mean over tokens, padding left out.
        - ``"reconstruction"``: each token that is a patch of an image, mapped to the pixels of the patch; tokens before
          the patches, as [CLS], are dropped. With ``frame_patches`` of the clean images as targets this is [K]'s
          denoising with a ViT.
        - ``"vocabulary"``: the model's own output embedding, for the next token. See ``LayerReadouts.layer_losses``.
    freeze : bool, default=False
        Whether only the readout is trained: parameters of the model lose ``requires_grad``, and it stays in evaluation
        mode, without dropout.
    seed : int, default=0
        Of the initial readout; torch's global generators are neither used nor changed.

    Returns
    -------
    LayerReadouts
        Which holds `model` itself, not a copy, and has the readout in its precision and on its device.

    Raises
    ------
    TypeError
        If `model` is no network as described.
    ValueError
        If `model` has one layer, or another argument is not as described or does not fit the model.

    Notes
    -----
    Encoders such as BERT normalise within each layer, and their states are read as they are. ViT, GPT-2, Llama and
    others normalise after the last layer alone. The states of all their layers go through this normalisation, so that
    the readout finds the same scale everywhere. It is the module that takes what the last layer puts out, whatever its
    name.

    Examples
    --------
    >>> from transformers import AutoModel, AutoTokenizer  # doctest: +SKIP
    >>> network = layer_readouts(AutoModel.from_pretrained("distilbert/"), 2)  # doctest: +SKIP
    >>> tokenizer = AutoTokenizer.from_pretrained("distilbert/")  # doctest: +SKIP
    >>> batch = tokenizer(["fine", "not fine at all"], padding=True, return_tensors="pt")  # doctest: +SKIP
    >>> network.layer_outputs(**batch).shape  # doctest: +SKIP
    torch.Size([6, 2, 2])

    Networks of this package take tokens:

    >>> from convexformer.unfolded.unrolled import UnrolledTransformer
    >>> network = layer_readouts(UnrolledTransformer(8, n_layers=3), 2, readout="mean")
    >>> network.layer_outputs(tokens=torch.rand(4, 5, 8)).shape
    torch.Size([3, 4, 2])
    """
    check_one_of(READOUTS, readout=readout)
    freeze = check_flag(freeze, "freeze")
    width, _ = sizes(model)
    if readout == "vocabulary":
        if n_outputs is not None:
            raise ValueError(f"n_outputs must be None for readout='vocabulary', which the model has, got {n_outputs!r}")
        if freeze:
            raise ValueError("freeze must be False for readout='vocabulary', which is a part of the model")
        return LayerReadouts(model, None, readout)
    if n_outputs is None and readout == "reconstruction":
        n_outputs = math.prod(patch_sides(model)) * getattr(model.config, "num_channels", 1)
    if n_outputs is None:
        raise ValueError(f"n_outputs must be given for readout={readout!r}")
    check_counts(n_outputs=n_outputs)
    like = next(model.parameters())
    with seeded(seed):
        head = nn.Linear(width, n_outputs, device="cpu")
    return LayerReadouts(model, head.to(like.device, like.dtype), readout, freeze=freeze)


class LayerReadouts(nn.Module):
    """A network with one readout on all of its layers; ``layer_readouts`` makes it and describes it.

    Parameters
    ----------
    model : Module
        The network.
    head : Linear or None
        The readout, from the width of the network's tokens. None: the model's own output embedding.
    readout : {"first", "mean", "vocabulary", "reconstruction"}
        What is read.
    freeze : bool, default=False
        Whether the network is neither trained nor put into training mode.

    Attributes
    ----------
    n_layers : int
        Layers of the network, each of which is read.

    Raises
    ------
    TypeError, ValueError
        If `model` is not as described, or has no such readout.

    Examples
    --------
    >>> from convexformer.unfolded.unrolled import UnrolledTransformer
    >>> network = LayerReadouts(UnrolledTransformer(8), torch.nn.Linear(8, 2), "first", freeze=True)
    >>> [name for name, parameter in network.named_parameters() if parameter.requires_grad]
    ['head.weight', 'head.bias']
    """

    _end: End | None = None  # known from the first run on

    def __init__(self, model: nn.Module, head: nn.Linear | None, readout: Readout, *, freeze: bool = False) -> None:
        super().__init__()
        _, self.n_layers = sizes(model)
        if self.n_layers < 2:
            raise ValueError("model must have at least two layers, as constraints are between layers, got one")
        check_one_of(READOUTS, readout=readout)
        if (head is None) != (readout == "vocabulary"):
            raise ValueError(f"head must be None for readout='vocabulary' alone, got {head!r} for {readout!r}")
        self.model, self.head, self.readout, self.freeze = model, head, readout, check_flag(freeze, "freeze")
        if readout == "reconstruction":
            patch_sides(model)
        if readout == "vocabulary":
            self._check_vocabulary()
        if self.freeze:
            model.requires_grad_(False).eval()

    def extra_repr(self) -> str:
        """The arguments that are no modules, as ``repr`` of the module shows them."""
        return as_arguments(readout=self.readout, freeze=self.freeze)

    def train(self, mode: bool = True) -> LayerReadouts:
        """Set the mode; a frozen model stays in evaluation mode.

        Parameters
        ----------
        mode : bool, default=True
            As in ``torch.nn.Module.train``.

        Returns
        -------
        self
        """
        super().train(mode)
        if self.freeze:
            self.model.eval()
        return self

    def layer_outputs(
        self, *, embedding_noise: float = 0.0, generator: torch.Generator | None = None, **inputs: Any
    ) -> Tensor:
        r"""Outputs of the readout on every layer.

        Parameters
        ----------
        embedding_noise : float, default=0.0
            :math:`\gamma` of the noise that [K] adds to text,

            .. math:: \tilde x = x + \gamma \, \mathrm{sd}(x) \, \varepsilon, \qquad \varepsilon \sim N(0, I),

            with ``x`` the input embeddings of a sample, before positions are added, and ``sd`` their standard deviation
            over tokens, without padding, and features. It is the sample's own, so what a sample is batched with does
            not matter, and is no path of gradients. Embeddings of images are those of patches; an
            ``UnrolledTransformer`` or ``DUST`` gets noise on its tokens.
        generator : torch.Generator, optional
            From which noise is drawn. Default: torch's global one, of the device of the embeddings.
        **inputs
            Arguments of the model: ``input_ids`` and ``attention_mask``, ``pixel_values``, ``tokens``.

        Returns
        -------
        Tensor of shape (n_layers, N, n_outputs), or (n_layers, N, n_patches, n_outputs) for ``"reconstruction"``
            For ``"vocabulary"`` logits of the token after the last one of each sample.

        Raises
        ------
        ValueError
            If an argument is not as described, or the model returns no hidden states.
        """
        states = self._states(inputs, embedding_noise, generator)
        read = self._reader(states[0], inputs)
        return torch.stack([read(state, layer) for layer, state in enumerate(states)])

    def forward(
        self, *, embedding_noise: float = 0.0, generator: torch.Generator | None = None, **inputs: Any
    ) -> Tensor:
        """Outputs of the readout on the last layer.

        Parameters
        ----------
        embedding_noise, generator, **inputs
            As in ``layer_outputs``.

        Returns
        -------
        Tensor of shape (N, n_outputs), or (N, n_patches, n_outputs) for ``"reconstruction"``
        """
        last = self._states(inputs, embedding_noise, generator)[-1]
        return self._reader(last, inputs)(last, self.n_layers - 1)

    def layer_losses(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        chunk_size: int = 1024,
        embedding_noise: float = 0.0,
        generator: torch.Generator | None = None,
        **inputs: Any,
    ) -> Tensor:
        """Mean cross-entropy of the next tokens, for every layer of a causal model.

        Logits of all layers, samples and tokens are never in memory together: they are computed for a chunk of tokens
        at a time, and again in the backward pass.

        Parameters
        ----------
        input_ids : Tensor of shape (N, T)
            The samples.
        attention_mask : Tensor of shape (N, T), optional
            1 for tokens, 0 for padding, which is neither predicted nor predicts. Default: no padding.
        chunk_size : int, default=1024
            Tokens at once; changes results by rounding alone. Logits of the default and 32000 words take 131 MB in
            float32.
        embedding_noise, generator
            As in ``layer_outputs``.
        **inputs
            Further arguments of the model.

        Returns
        -------
        Tensor of shape (n_layers, N)
            In at least float32.

        Raises
        ------
        TypeError
            If `input_ids` or the mask is no tensor.
        ValueError
            If the readout is not ``"vocabulary"``, an argument is not as described, or a sample has no next token.
        """
        if self.readout != "vocabulary":
            raise ValueError(f"readout must be 'vocabulary' for losses of next tokens, got {self.readout!r}")
        check_counts(chunk_size=chunk_size)
        chunk_size = int(chunk_size)
        check_tensor("input_ids", input_ids)
        if input_ids.ndim != 2:
            raise ValueError(f"input_ids must have shape (n_samples, n_tokens), got {tuple(input_ids.shape)}")
        present = check_attention_mask(attention_mask, (*input_ids.shape, 1))
        if present is None:
            present = torch.ones_like(input_ids, dtype=torch.bool)
        followed = present[:, :-1] & present[:, 1:]
        counts = followed.sum(1)
        if not bool(counts.all()):
            raise ValueError("input_ids must hold at least two tokens of every sample, padding left out")
        targets = input_ids[:, 1:][followed].split(chunk_size)
        inputs = {**inputs, "input_ids": input_ids}
        if attention_mask is not None:
            inputs["attention_mask"] = attention_mask
        losses = []
        for layer, state in enumerate(self._states(inputs, embedding_noise, generator)):
            chunks = state[:, :-1][followed].split(chunk_size)
            parts = [self._token_losses(*pair, layer) for pair in zip(chunks, targets, strict=True)]
            by_token = torch.cat(parts)
            losses.append(by_token.new_zeros(followed.shape).masked_scatter(followed, by_token).sum(1) / counts)
        return torch.stack(losses)

    def _token_losses(self, states: Tensor, targets: Tensor, layer: int) -> Tensor:
        """Cross-entropy of each of some tokens, whose logits are not kept for the backward pass."""

        def losses(states: Tensor) -> Tensor:
            logits = self._logits(states, layer)
            wide = torch.promote_types(logits.dtype, torch.float32)
            return F.cross_entropy(logits.to(wide), targets, reduction="none")

        if not torch.is_grad_enabled():
            return losses(states)
        return checkpoint(losses, states, use_reentrant=False, preserve_rng_state=False)

    def _reader(self, state: Tensor, inputs: dict[str, Any]) -> Callable[[Tensor, int], Tensor]:
        """Function that reads the states of a layer, and are all of one shape."""
        if self.readout == "reconstruction":
            n_patches = self._count_patches(state, inputs)
            return lambda state, layer: self._head(self._normed(state[:, -n_patches:], layer))
        present = check_attention_mask(inputs.get("attention_mask"), tuple(state.shape))
        if self.readout == "first":
            if present is not None and not bool(present[:, 0].all()):
                raise ValueError("attention_mask must be 1 at the first token, which is read: pad on the right")
            return lambda state, layer: self._head(self._normed(state[:, 0], layer))
        if self.readout == "vocabulary":
            places = torch.arange(state.shape[1], device=state.device)
            last = places[-1:] if present is None else (places * present).argmax(1)
            rows = torch.arange(len(state), device=state.device)
            return lambda state, layer: self._logits(state[rows, last], layer)
        if present is None:
            return lambda state, layer: self._head(self._normed(state, layer).mean(1))
        weight = (present / present.sum(1, keepdim=True)).to(state.dtype)[:, None]
        return lambda state, layer: self._head((weight @ self._normed(state, layer))[:, 0])

    def _head(self, pooled: Tensor) -> Tensor:
        return self.head(pooled)  # type: ignore[misc]

    def _logits(self, states: Tensor, layer: int) -> Tensor:
        return self.model.get_output_embeddings()(self._normed(states, layer))  # type: ignore[operator]

    def _normed(self, state: Tensor, layer: int) -> Tensor:
        """States of a layer as the network's last normalisation leaves them, which those of the last layer have had."""
        if layer == self.n_layers - 1 or isinstance(self.model, UnrolledNetwork):
            return state
        if self._end is None:
            raise ValueError("the network must have run once before it is exported: call it on any batch")
        return state if self._end.norm is None else base_of(self.model).get_submodule(self._end.norm)(state)

    def _count_patches(self, state: Tensor, inputs: dict[str, Any]) -> int:
        (rows, columns), (height, width) = patch_sides(self.model), inputs["pixel_values"].shape[-2:]
        n_patches = (height // rows) * (width // columns)
        if not 0 < n_patches <= state.shape[1]:
            raise ValueError(
                f"readout='reconstruction' needs a model with a token for each of {n_patches} patches, "
                f"got one with {state.shape[1]} tokens"
            )
        return n_patches

    def _states(self, inputs: dict[str, Any], noise: float, generator: torch.Generator | None) -> list[Tensor]:
        """Hidden states of every layer, of the last one as the network returns them."""
        if not (is_real(noise) and 0 <= noise < math.inf):
            raise ValueError(f"embedding_noise must be a finite number from 0, got {noise!r}")
        if self.readout == "reconstruction" and getattr(inputs.get("pixel_values"), "ndim", 0) != 4:
            raise ValueError("pixel_values of shape (N, channels, height, width) are needed for a reconstruction")
        mask = inputs.get("attention_mask")
        if isinstance(self.model, UnrolledNetwork):
            if noise and "tokens" in inputs:
                inputs = {**inputs, "tokens": noisy(inputs["tokens"], mask, noise, generator)}
            return list(self.model.layer_outputs(**inputs))
        base = base_of(self.model)
        if noise and inputs.get("inputs_embeds") is not None:
            inputs = {**inputs, "inputs_embeds": noisy(inputs["inputs_embeds"], mask, noise, generator)}
            noise = 0.0
        if "use_cache" in inspect.signature(base.forward).parameters:
            inputs = {"use_cache": False, **inputs}  # keys and values for tokens to come, which none asks for
        inputs = {**inputs, "output_hidden_states": True, "return_dict": True}
        with noise_on_embeddings(base, mask, noise, generator):
            if self._end is None and not torch.compiler.is_exporting():
                output, self._end = first_run(base, self.n_layers, inputs)
            else:
                output = base(**inputs)
        hidden, last = (getattr(output, name, None) for name in ("hidden_states", "last_hidden_state"))
        if hidden is None or last is None:
            raise ValueError(
                "model must return hidden_states and last_hidden_state when called with output_hidden_states=True, as "
                f"encoders and causal models do; {type(base).__name__} does not"
            )
        if len(hidden) != self.n_layers + 1:
            raise ValueError(
                f"model must return hidden states of its embedding and {self.n_layers} layers, got {len(hidden)}"
            )
        first = 1 if self._end is None else self._end.first
        return [*hidden[first : first + self.n_layers - 1], last]

    @torch.no_grad()
    def _check_vocabulary(self) -> None:
        """Raise unless the output embedding of the last layer's states gives the logits of the model itself."""
        model: Any = self.model
        getter = getattr(model, "get_output_embeddings", None)
        if getter is None or getter() is None:
            raise ValueError(
                "readout='vocabulary' needs a model with an output embedding, as "
                "AutoModelForCausalLM.from_pretrained(folder) loads one"
            )
        probe = torch.zeros(1, 1, dtype=torch.long, device=next(model.parameters()).device)
        training = {module: module.training for module in model.modules()}
        try:
            model.eval()
            expected = model(input_ids=probe).logits[:, -1]
            logits = self.layer_outputs(input_ids=probe)[-1]
        finally:
            for module, mode in training.items():
                module.training = mode
        tolerance = torch.finfo(expected.dtype).eps ** 0.5  # what rounding and no other step explains
        if logits.shape != expected.shape or (logits - expected).norm() > tolerance * expected.norm():
            raise ValueError(
                "readout='vocabulary' needs a model whose logits are its output embedding of the last hidden states; "
                f"those of {type(model).__name__} are scaled, capped or transformed besides"
            )
