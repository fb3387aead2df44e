"""The default solver."""
