"""What objective, datasets, solvers and scripts of this benchmark share."""
