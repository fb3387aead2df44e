"""Students of an attention layer of a pretrained encoder (paper [C], Figs 2 and 3)."""

from .experiment import FILE, run_student_teacher
from .report import format_student_teacher
from .settings import StudentTeacherSettings

__all__ = ["FILE", "StudentTeacherSettings", "format_student_teacher", "run_student_teacher"]
