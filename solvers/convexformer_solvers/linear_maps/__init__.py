"""Linear maps from coefficients to predictions."""
