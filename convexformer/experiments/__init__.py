"""Experiments of the papers and what they leave open, each one command: ``convexformer reproduce``."""

from .common import finished_seeds
from .grokking import GrokkingSettings, format_grokking, run_grokking
from .student_teacher import StudentTeacherSettings, format_student_teacher, run_student_teacher
from .unfolded import UnfoldedSettings, format_unfolded, run_unfolded

__all__ = [
    "GrokkingSettings",
    "StudentTeacherSettings",
    "UnfoldedSettings",
    "finished_seeds",
    "format_grokking",
    "format_student_teacher",
    "format_unfolded",
    "run_grokking",
    "run_student_teacher",
    "run_unfolded",
]
