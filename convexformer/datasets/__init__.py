"""Data sets as token arrays; none of them is downloaded."""

from ._digits import load_digit_tokens

__all__ = ["load_digit_tokens"]
