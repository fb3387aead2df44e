"""Algorithms: each has the contract of ``base.Solver`` and is loaded when first asked for; ``registry`` names them."""
