"""Training of networks by gradients, with grids of learning rates at equal budgets."""
