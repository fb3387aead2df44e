"""Patch tokens of images at a layer of a pretrained vision encoder."""

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

from convexformer.optional import required
from convexformer.validation import check_device, check_flag, check_optional_counts
from convexformer_solvers.validation import check_counts

from ._encoders import Arrays, Encoder, is_list_of_layers, run_batches, states_after

_FORMAT = 1
_CLASS_TOKENS = frozenset({"cls_token", "class_embedding"})


@dataclass(frozen=True, eq=False, repr=False)
class PatchActivations:
    """Patch tokens of images after a layer of a pretrained vision encoder.

    Parameters
    ----------
    outputs : ndarray of shape (N, n_tokens, d)
        Hidden states of the patches of each image, row by row from the top left; float32. The class token comes before
        them when it was asked for with ``keep_class_token=True``. So ``n_tokens`` is ``rows * columns``, or one more.
    class_token : ndarray of shape (N, d) or None
        Hidden states of the class token; float32. None when the encoder has no class token.
    grid : tuple of int
        Rows and columns of patches.
    model : str
        Name or folder of the encoder.
    layer : int
        Position of the layer, from 0.

    Examples
    --------
    >>> example = PatchActivations(np.zeros((5, 6, 4), np.float32), np.zeros((5, 4), np.float32), (2, 3), "vit", 7)
    >>> example
    PatchActivations(5 images, 2 x 3 patches, 4 features, layer 7 of 'vit')
    >>> example.sequences.shape
    (5, 6, 4)
    """

    outputs: NDArray[np.float32]
    class_token: NDArray[np.float32] | None
    grid: tuple[int, int]
    model: str
    layer: int

    @property
    def sequences(self) -> NDArray[np.float32]:
        """The tokens as the estimators take them: `outputs`, as all images have the same number of tokens."""
        return self.outputs

    def __len__(self) -> int:
        return len(self.outputs)

    def __repr__(self) -> str:
        n_images, n_tokens, n_features = self.outputs.shape
        rows, columns = self.grid
        extra = "class token and " if n_tokens > rows * columns else ""
        return (
            f"PatchActivations({n_images} images, {extra}{rows} x {columns} patches, {n_features} features, "
            f"layer {self.layer} of {self.model!r})"
        )


def load_patch_activations(
    images: NDArray | Sequence[Any],
    *,
    model: str | os.PathLike[str],
    layer: int,
    n_images: int | None = None,
    keep_class_token: bool = False,
    batch_size: int = 32,
    cache: str | os.PathLike[str] | None = None,
    device: str | torch.device | None = None,
    verbose: bool = False,
) -> PatchActivations:
    """Run images through a pretrained vision encoder and keep the patch tokens after one layer.

    The hidden states are the residual stream after the layer. They include what the layer adds to its inputs. They are
    taken before any normalisation at the end of the encoder. Transformers returns the same states as
    ``hidden_states[layer + 1]`` when called with ``output_hidden_states=True``.

    Parameters
    ----------
    images : ndarray of shape (N, H, W) or (N, H, W, 3), or list of PIL images or of such arrays of one image
        Grey images or RGB images. Integers must be uint8. Floats must lie from 0 to 1. They are rounded to the 256
        levels of uint8, since image processors resize images of 8 bits. PIL images must have mode ``"L"`` or ``"RGB"``.
        The one channel of a grey image is used for all three. The image processor of the model
        (``AutoImageProcessor``) then resizes, crops and normalises each image as its settings say. So the encoder may
        not see the borders of an image that is not square. Transformers resizes with torchvision where that is
        installed and else with Pillow; their pixels differ a little. Images of a list may differ in size, provided that
        the processor makes them equal.
    model : str or path-like
        Folder of a vision encoder with its ``preprocessor_config.json``, or its name, which is looked up in the local
        cache first and then at the hub. ViT, DINOv2 with and without registers, CLIP and encoders built alike are
        supported. Of CLIP the vision encoder is used.
    layer : int
        Position of the layer, from 0. The best layer differs from task to task, so there is no default.
    n_images : int, optional
        Take the first so many. Default: all.
    keep_class_token : bool, default=False
        Whether `outputs` has the class token before the patches. By default `outputs` has patches alone, so that a
        token is a place in the image. The class token is in ``class_token`` in both cases.
    batch_size : int, default=32
        Images at once. Results differ by rounding alone.
    cache : str or path-like, optional
        Folder that keeps every finished batch. An interrupted call goes on where it stopped, and a repeated one neither
        loads nor runs the weights. Batches are found again by the contents of the model and of the processed images and
        by `layer` and `batch_size`. Default: nothing is kept.
    device : str or torch.device, optional
        Where to compute. Default: the CPU.
    verbose : bool, default=False
        Whether to show a progress bar.

    Returns
    -------
    PatchActivations
        In the order of the images. Register tokens are left out.

    Raises
    ------
    ModuleNotFoundError
        If the extra ``vision`` is needed and absent.
    OSError
        If the model or its image processor is not found.
    ValueError, TypeError
        If an argument is not as described, the processor leaves images of differing sizes, the model is too small for
        `layer`, has no class token to keep or is not built as supported, or a file of the cache is damaged.
    KeyboardInterrupt
        On Ctrl-C; with `cache` the finished batches are kept.

    Examples
    --------
    >>> data = load_patch_activations(  # doctest: +SKIP
    ...     images, model="facebook/dinov2-small", layer=8, cache="activations"
    ... )
    >>> data  # doctest: +SKIP
    PatchActivations(500 images, 16 x 16 patches, 384 features, layer 8 of 'facebook/dinov2-small')
    >>> probe = ConvexAttentionClassifier().fit(data.sequences, labels)  # doctest: +SKIP

    Arguments are checked before anything is loaded:

    >>> load_patch_activations(np.zeros((2, 8, 8), np.int64), model="facebook/dinov2-small", layer=8)
    Traceback (most recent call last):
    ...
    ValueError: images[0] must hold uint8 numbers, or floats from 0 to 1, got int64
    """
    check_counts(batch_size=batch_size)
    check_optional_counts(n_images=n_images)
    keep_class_token = check_flag(keep_class_token, "keep_class_token")
    place = check_device(device, torch.device("cpu"))
    pictures = _check_images(images, n_images)
    encoder = PatchEncoder(model, layer, keep_class_token, place)
    arrays = run_batches(
        encoder.run,
        lambda start, stop: (encoder.pixels(pictures, start, stop),),
        len(pictures),
        batch_size,
        identity=encoder.identity,
        cache=cache,
        verbose=verbose,
    )
    outputs, class_token = arrays["patches"], arrays.get("class_token")
    if keep_class_token:
        if class_token is None:
            raise encoder.no_class_token()
        outputs = np.concatenate([class_token[:, None], outputs], axis=1)
    return PatchActivations(outputs, class_token, encoder.grid, encoder.name, encoder.layer)


class PatchEncoder(Encoder):
    """One layer of a pretrained vision encoder; its weights load when it first runs."""

    instead = (
        "pass model= a local folder with config.json, preprocessor_config.json and weights, or the name of a vision "
        "encoder at the Hugging Face hub, which is looked up in the local cache first"
    )
    supported = (
        "it must have one list of vision layers, a patch_size, and tokens that are at most one class token, then the "
        "registers, then one for each patch; ViT, DINOv2 with and without registers and CLIP do"
    )

    def __init__(
        self, model: str | os.PathLike[str], layer: int, needs_class_token: bool, device: torch.device
    ) -> None:
        super().__init__(model, layer, device)
        self.needs_class_token = needs_class_token
        size = getattr(self.part_of(self.config), "patch_size", None)
        if size is None:
            raise self.unsupported()
        self.patch: tuple[int, int] = (size, size) if isinstance(size, int) else tuple(size)
        self.processor: Any = self._load("AutoImageProcessor")
        self.size: tuple[int, int] | None = None  # of the images after processing, once one was

    def part_of(self, config: Any) -> Any:
        """Settings of the vision encoder of a model of images and text."""
        return getattr(config, "vision_config", config)

    def no_class_token(self) -> ValueError:
        """The error for a class token that was asked for and is not there."""
        return ValueError(f"keep_class_token=True, but model {self.name!r} has no class token; leave it False")

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches, once an image was processed."""
        assert self.size is not None
        return self.size[0] // self.patch[0], self.size[1] // self.patch[1]

    def identity(self) -> dict[str, Any]:
        """What the activations of given pixels depend on, for keys of a cache."""
        return {"format": _FORMAT, "kind": "patches", "model": self.fingerprint(), "layer": self.layer}

    def pixels(self, images: Sequence[Any], start: int, stop: int) -> NDArray[np.float32]:
        """Images from a position up to another as the encoder takes them, of shape ``(B, 3, H, W)``."""
        parts = []
        for i in range(start, stop):
            picture = _to_rgb(images[i])
            (part,) = self.processor(images=[picture], return_tensors="np")["pixel_values"]
            if self.size is None:
                self.size = part.shape[1:]
            if part.shape[1:] != self.size:
                raise ValueError(
                    f"images[{i}] has {' x '.join(map(str, part.shape[1:]))} pixels after the image processor of model "
                    f"{self.name!r}, but images[0] has {' x '.join(map(str, self.size))}; crop or resize them to one "
                    "shape first"
                )
            parts.append(part)
        return np.asarray(parts, dtype=np.float32)

    @torch.inference_mode()
    def run(self, pixels: NDArray[np.float32]) -> Arrays:
        """Patches and class token of one batch of processed images."""
        network, (block,) = self._network_and_layers
        states = states_after(network, block, pixel_values=torch.as_tensor(pixels, device=self.device))
        n_patches = self.grid[0] * self.grid[1]
        n_registers = getattr(self.part_of(self.config), "num_register_tokens", 0)
        has_class = any(name.rpartition(".")[2] in _CLASS_TOKENS for name, _ in network.named_parameters())
        if states is None or states.shape[1] != has_class + n_registers + n_patches:
            raise self.unsupported(network)
        if self.needs_class_token and not has_class:
            raise self.no_class_token()
        found = {"patches": states[:, -n_patches:]}
        if has_class:
            found["class_token"] = states[:, 0]
        return {name: values.float().numpy(force=True) for name, values in found.items()}

    @cached_property
    def _network_and_layers(self) -> tuple[nn.Module, list[nn.Module]]:
        network = self._load("AutoModel")
        if self.part_of(self.config) is not self.config:
            network = getattr(network, "vision_model", None) or network
        return self.cut(network, is_list_of_layers)


def _check_images(images: Any, n_images: int | None) -> Any:
    """The images to use, each of which can be converted."""
    if not isinstance(images, (np.ndarray, Sequence)) or isinstance(images, (str, bytes)):
        raise TypeError(f"images must be an array or a list of PIL images or arrays, got {type(images).__name__}")
    if isinstance(images, np.ndarray) and images.ndim not in (3, 4):
        raise ValueError(f"images must have shape (N, H, W) or (N, H, W, 3), got {images.shape}")
    if len(images) == 0:
        raise ValueError("images must hold at least one image, got none")
    if n_images is not None and n_images > len(images):
        raise ValueError(f"n_images={n_images}, but only {len(images)} images are given; ask for fewer")
    chosen = images[:n_images]
    for i, image in enumerate(chosen):
        _check_image(image, f"images[{i}]")
    return chosen


def _check_image(image: Any, name: str) -> None:
    if isinstance(image, _pillow().Image):
        if image.mode not in ("L", "RGB"):
            raise ValueError(
                f"{name} must have mode 'L' or 'RGB', got {image.mode!r}; convert it yourself with .convert('RGB')"
            )
        return
    if not isinstance(image, np.ndarray):
        raise TypeError(f"{name} must be an array or a PIL image, got {type(image).__name__}")
    if image.shape[2:] not in ((), (3,)) or image.ndim < 2 or image.size == 0:
        raise ValueError(f"{name} must have shape (H, W) or (H, W, 3), channels last, got {image.shape}")
    if image.dtype == np.uint8:
        return
    if not np.issubdtype(image.dtype, np.floating):
        raise ValueError(f"{name} must hold uint8 numbers, or floats from 0 to 1, got {image.dtype}")
    if not (image.min() >= 0 and image.max() <= 1):  # so written, NaN is refused as well
        raise ValueError(
            f"{name} must hold floats from 0 to 1, got some from {image.min():g} to {image.max():g}; rescale them, or "
            "pass uint8"
        )


def _to_rgb(image: Any) -> Any:
    """A PIL image of three channels from an image that was checked."""
    pillow = _pillow()
    if isinstance(image, np.ndarray):
        levels = image if image.dtype == np.uint8 else np.rint(image.astype(np.float64) * 255).astype(np.uint8)
        image = pillow.fromarray(np.ascontiguousarray(levels))
    return image.convert("RGB")


def _pillow() -> Any:
    return required("PIL.Image", "images of encoders", "pillow", "'convexformer[vision]'")
