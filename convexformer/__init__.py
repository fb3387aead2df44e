"""Convexformer."""
