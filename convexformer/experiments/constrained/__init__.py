"""Descent-constrained training on text and on video ([K]), beside unconstrained training and deep supervision."""
