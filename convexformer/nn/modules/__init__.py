"""Torch modules of attention networks and of networks to compare them with."""
