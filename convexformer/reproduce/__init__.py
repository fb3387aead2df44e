"""Experiments of the paper and what they leave open, each one command: ``convexformer reproduce``."""

from .common import finished_seeds
from .student_teacher import StudentTeacherSettings, format_student_teacher, run_student_teacher

__all__ = ["StudentTeacherSettings", "finished_seeds", "format_student_teacher", "run_student_teacher"]
