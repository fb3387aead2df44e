"""Certified probes on frozen features beside probes that are in use, for several budgets of labels."""

from .experiment import FILE, run_probes
from .report import format_probes
from .settings import ProbesSettings

__all__ = ["FILE", "ProbesSettings", "format_probes", "run_probes"]
