"""Algorithms: each has the contract of ``base.Solver``; ``convexformer_solvers.registry`` names those for users."""
