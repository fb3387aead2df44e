"""Alternating directions in the metric of the data."""
