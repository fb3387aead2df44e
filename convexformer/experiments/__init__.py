"""Experiments of the papers and what they leave open, each one command: ``convexformer reproduce``."""

from .common import finished_seeds
from .constrained import (
    ConstrainedTextSettings,
    ConstrainedVideoSettings,
    format_constrained_text,
    format_constrained_video,
    run_constrained_text,
    run_constrained_video,
)
from .grokking import GrokkingSettings, format_grokking, run_grokking
from .probes import ProbesSettings, format_probes, run_probes
from .student_teacher import StudentTeacherSettings, format_student_teacher, run_student_teacher
from .unfolded import UnfoldedSettings, format_unfolded, run_unfolded

__all__ = [
    "ConstrainedTextSettings",
    "ConstrainedVideoSettings",
    "GrokkingSettings",
    "ProbesSettings",
    "StudentTeacherSettings",
    "UnfoldedSettings",
    "finished_seeds",
    "format_constrained_text",
    "format_constrained_video",
    "format_grokking",
    "format_probes",
    "format_student_teacher",
    "format_unfolded",
    "run_constrained_text",
    "run_constrained_video",
    "run_grokking",
    "run_probes",
    "run_student_teacher",
    "run_unfolded",
]
