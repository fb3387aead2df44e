"""Torch modules of attention networks and their rivals."""
