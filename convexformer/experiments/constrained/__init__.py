"""Descent-constrained training on text and on video ([K]), beside unconstrained training and deep supervision."""

from .text import run_constrained_text
from .text_report import format_constrained_text
from .text_settings import ConstrainedTextSettings
from .video import FILE as VIDEO_FILE
from .video import run_constrained_video
from .video_report import format_constrained_video
from .video_settings import ConstrainedVideoSettings

__all__ = [
    "VIDEO_FILE",
    "ConstrainedTextSettings",
    "ConstrainedVideoSettings",
    "format_constrained_text",
    "format_constrained_video",
    "run_constrained_text",
    "run_constrained_video",
]
