"""Rows of results as text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

Row = TypeVar("Row")


def format_rows(rows: Sequence[Row], columns: Sequence[tuple[str, str, Callable[[Row], str]]]) -> str:
    """Lay rows out as a text table.

    Parameters
    ----------
    rows : sequence
        The lines.
    columns : sequence of (title, alignment, function)
        The function makes the cell of a row; the alignment is "<" or ">".

    Returns
    -------
    str

    Examples
    --------
    >>> print(format_rows([1, 22], [("number", ">", str), ("square", "<", lambda row: str(row**2))]))
    number  square
    --------------
         1  1
        22  484
    """
    lines = [[title for title, _, _ in columns]] + [[show(row) for _, _, show in columns] for row in rows]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    aligns = [align for _, align, _ in columns]
    text = ["  ".join(f"{cell:{a}{w}}" for cell, a, w in zip(line, aligns, widths, strict=True)) for line in lines]
    rule = "-" * len(text[0])
    return "\n".join(line.rstrip() for line in [text[0], rule, *text[1:]])
