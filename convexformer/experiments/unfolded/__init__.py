"""Alternating inexact minimisation: where it descends, and a run of it."""
