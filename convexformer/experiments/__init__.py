"""Experiments of the paper and what they leave open, each one command: ``convexformer reproduce``."""

from .common import finished_seeds
from .grokking import GrokkingSettings, format_grokking, run_grokking
from .student_teacher import StudentTeacherSettings, format_student_teacher, run_student_teacher

__all__ = [
    "GrokkingSettings",
    "StudentTeacherSettings",
    "finished_seeds",
    "format_grokking",
    "format_student_teacher",
    "run_grokking",
    "run_student_teacher",
]
