"""Linear algebra that several algorithms share."""
