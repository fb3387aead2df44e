"""Experiments of the paper and what they leave open, each one command: ``convexformer reproduce``."""

from .report import format_report
from .settings import StudentTeacherSettings
from .student_teacher import finished_seeds, run_student_teacher

__all__ = ["StudentTeacherSettings", "finished_seeds", "format_report", "run_student_teacher"]
