"""Lines of text files."""

from __future__ import annotations

import os
from collections.abc import Iterator


def text_lines(path: str | os.PathLike[str], fault: str) -> Iterator[str]:
    r"""Lines of a text file in UTF-8, one at a time and without their ends.

    Only line feeds and carriage returns end a line, not the other characters at which ``str.splitlines`` splits.

    Parameters
    ----------
    path : path-like
        The file.
    fault : str
        What the message says of a file that is not in UTF-8.

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    ValueError
        If it is not in UTF-8.

    Examples
    --------
    >>> import tempfile
    >>> from pathlib import Path
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder) / "text.txt"
    ...     _ = path.write_text("One\u2028line.\nAnother.\n", encoding="utf-8")
    ...     list(text_lines(path, f"{path} must be text in UTF-8"))
    ['One\u2028line.', 'Another.']
    """
    with open(path, encoding="utf-8-sig") as file:
        try:
            for line in file:
                yield line.removesuffix("\n")
        except UnicodeDecodeError as error:
            raise ValueError(f"{fault}: {error}") from error
