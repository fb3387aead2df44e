"""Arrays in files: where their numbers begin, and rows of them as tensors."""

from __future__ import annotations

import json
import mmap
import os
import struct
import zipfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from convexformer.validation import as_tensor, check_not_empty, is_integer
from convexformer_solvers.io.npz import npy_header, parsed

# Types of safetensors that are floats or integers of torch.
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
}
CODES = {dtype: code for code, dtype in DTYPES.items()}
RESERVED = "__metadata__"  # in a header of safetensors it is the name of no array
SUFFIXES = (".npy", ".npz", ".safetensors")
# Where the system can, pages are mapped at once, and read ahead, by the thread that reads.
_MAPPING: dict[str, int] = (
    {"flags": mmap.MAP_SHARED | mmap.MAP_POPULATE, "prot": mmap.PROT_READ}
    if hasattr(mmap, "MAP_POPULATE")
    else {"access": mmap.ACCESS_READ}
)
NUMBERS = "floats of 16, 32 or 64 bits or integers"


@dataclass(frozen=True)
class FileArray:
    """An array that lies in a file as one run of numbers.

    Rows that are read are mapped to memory until they are no longer used: a copy would take as long as a product.
    """

    path: str
    place: str  # what messages call it
    offset: int  # bytes before the first number
    shape: tuple[int, ...]  # rows first
    dtype: torch.dtype
    writable: bool = False  # whether a map to memory, which the system may still write, lets the numbers change
    _opened: list[int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        wanted = self.offset + prod(self.shape) * self.dtype.itemsize
        status = os.stat(self.path)
        if status.st_size < wanted:
            raise ValueError(
                f"{self.place} is truncated: by its header it has {wanted} bytes or more, but there are "
                f"{status.st_size}; copy or write it again"
            )
        object.__setattr__(self, "_opened", state_of(status))

    def read(self, start: int, stop: int) -> Tensor:
        """Rows from a position up to another; not to be written to."""
        values = self._mapped(start, stop, _MAPPING)
        if start < stop and (self.offset + start * values.shape[1]) % self.dtype.itemsize:
            values = values.clone()  # torch reads numbers at multiples of their size alone
        return values.view(self.dtype).view(stop - start, *self.shape[1:])

    def take(self, places: Tensor) -> Tensor:
        """Rows at sorted positions; a copy, for which no other rows are read."""
        first, end = int(places[0]), int(places[-1]) + 1
        values = self._mapped(first, end, {"access": mmap.ACCESS_READ}).index_select(0, places - first)
        return values.view(self.dtype).view(len(places), *self.shape[1:])

    def _mapped(self, start: int, stop: int, how: dict[str, int]) -> Tensor:
        """Bytes of the rows from a position up to another, shape ``(n, bytes of a row)``."""
        width = prod(self.shape[1:]) * self.dtype.itemsize
        if start >= stop:
            return torch.empty((0, width), dtype=torch.uint8)
        begin = self.offset + start * width
        page = begin // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        length = self.offset + stop * width - page
        with open(self.path, "rb", buffering=0) as file:
            status = os.fstat(file.fileno())
            if status.st_size < page + length:
                raise OSError(f"{self.place} has become shorter since it was opened; write it again")
            if not self.writable and state_of(status) != self._opened:
                raise changed(self.place)
            mapped = mmap.mmap(file.fileno(), length, offset=page, **how)
        return as_tensor(np.frombuffer(mapped, np.uint8, offset=begin - page)).view(stop - start, width)

    @property
    def fingerprint(self) -> list[Any]:
        """Name, size, time of the last change, and place in the file."""
        return [os.path.basename(self.path), *state_of(os.stat(self.path)), self.offset]


def state_of(status: os.stat_result) -> list[int]:
    """Size and time of the last change of a file."""
    return [status.st_size, status.st_mtime_ns]


def changed(place: str) -> OSError:
    """The error of samples that are no longer those which were opened."""
    return OSError(f"{place} has changed since it was opened; open it, or fit, again once it is no longer written to")


def find_array(path: str, name: str | None, place: str) -> FileArray:
    """The array of that name in a file with one of the `SUFFIXES`."""
    if not os.path.isfile(path):
        raise FileNotFoundError(f"{place} is no file")
    kind = Path(path).suffix
    with checked(place):
        if kind == ".npz":
            return _in_npz(path, name, place)
        if kind == ".safetensors":
            header, begin = read_header(path, place)
            header.pop(RESERVED, None)
            return stored(path, header, begin, choose(header, name, place), place)
        if name is not None:
            raise ValueError(f"{place} holds one array without a name; leave out ':{name}'")
        with open(path, "rb") as file:
            return _in_npy(file, path, place)


@contextmanager
def checked(place: str) -> Iterator[None]:
    """Errors about what a file holds become ``ValueError``: those who read it do not check that, and raise any."""
    try:
        yield
    except (OSError, MemoryError, ValueError):
        raise
    except Exception as error:
        raise ValueError(f"{place} is damaged: {type(error).__name__}: {error}") from error


def choose(names: Collection[str], name: str | None, place: str) -> str:
    """A name that is there: by default ``X``, or the only one."""
    if name is None:
        name = "X" if "X" in names else next(iter(names)) if len(names) == 1 else None
    if name is None:
        raise ValueError(f"{place} must hold one array or one called 'X', got {sorted(names)}; add ':' and a name")
    if name not in names:
        raise ValueError(f"{place} has no array {name!r}, but {sorted(names)}")
    return name


def torch_dtype(dtype: Any, place: str) -> torch.dtype:
    """The precision of stored numbers; ``ValueError`` if they are no floats or integers that torch has."""
    integers = "; uint8 holds True and False as 1 and 0"
    if isinstance(dtype, torch.dtype):
        if dtype not in CODES:
            hint = integers if dtype is torch.bool else ""
            raise ValueError(f"{place} must hold {NUMBERS}, got {str(dtype).removeprefix('torch.')}{hint}")
        return dtype
    kind = np.dtype(dtype)
    if kind.kind not in "fiu" or kind.itemsize > 8:
        hints = {"V": "; numpy has no bfloat16: store it as .safetensors", "b": integers}
        hint = hints.get(kind.kind, "")
        raise ValueError(f"{place} must hold {NUMBERS}, got {kind.name}{hint}")
    if not kind.isnative:
        raise ValueError(
            f"{place} has the byte order of another kind of processor ({kind.str}); store X.astype({kind.name!r})"
        )
    return torch.from_numpy(np.empty(0, kind)).dtype


def token_shape(shape: tuple[int, ...], place: str) -> tuple[int, ...]:
    """The shape ``(N, n_tokens, d)`` of samples; with two dimensions their tokens have width 1."""
    if len(shape) not in (2, 3):
        raise ValueError(f"{place} must have 2 or 3 dimensions (samples, tokens[, features]), got shape {tuple(shape)}")
    check_not_empty(place, shape)
    return (*shape, 1) if len(shape) == 2 else tuple(shape)


# NumPy


def _in_npy(file: BinaryIO, path: str, place: str) -> FileArray:
    """The array whose header begins where the file stands."""
    try:
        shape, fortran, dtype = npy_header(file)
    except ValueError as error:
        raise ValueError(f"{place} is damaged or no array of NumPy: {error}") from error
    if dtype.hasobject:
        raise ValueError(f"{place} holds Python objects, which are not read; store X.astype(float)")
    kind = torch_dtype(dtype, place)
    if fortran:
        raise ValueError(f"{place} is in Fortran order, with rows far apart; store np.ascontiguousarray(X)")
    return FileArray(path, place, file.tell(), shape, kind)


def _in_npz(path: str, name: str | None, place: str) -> FileArray:
    try:
        with zipfile.ZipFile(path) as archive:
            found = {entry.filename.removesuffix(".npy"): entry for entry in archive.infolist()}
    except zipfile.BadZipFile as error:
        raise ValueError(f"{place} is truncated, damaged or no archive of NumPy: {error}") from error
    name = choose(found, name, place)
    entry = found[name]
    if entry.compress_type != zipfile.ZIP_STORED:
        raise ValueError(
            f"{place} is compressed, so that no rows of {name!r} can be read by themselves; "
            "store it with numpy.savez in place of numpy.savez_compressed"
        )
    with open(path, "rb") as file:
        # Name and extra field of the entry, before its content, may be longer than in the directory of the archive.
        file.seek(entry.header_offset + 26)
        file.seek(sum(struct.unpack("<HH", file.read(4))), os.SEEK_CUR)
        return _in_npy(file, path, f"array {name!r} of {place}")


# safetensors


def read_header(path: str | os.PathLike[str], place: str) -> tuple[dict[str, Any], int]:
    """What a file of safetensors holds, and how many bytes say so."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        actual = os.fstat(file.fileno()).st_size
        if actual < 8 + length or length == 0:
            raise ValueError(
                f"{place} is truncated or no file of safetensors: its header is to end at byte {8 + length}, but there "
                f"are {actual}"
            )
        try:
            return dict(parsed(file.read(length))), 8 + length
        except (TypeError, ValueError) as error:
            raise ValueError(f"{place} is damaged or no file of safetensors: {error}") from error


def extent(entry: Mapping[str, Any], place: str) -> tuple[tuple[int, ...], int, int]:
    """Shape, begin and end of an array by its entry in a header of safetensors."""
    shape, offsets, dtype = entry["shape"], entry["data_offsets"], DTYPES.get(entry["dtype"])
    if all(is_integer(number, 0) for number in (*shape, *offsets)) and len(offsets) == 2:
        begin, end = offsets
        if end - begin == (prod(shape) * dtype.itemsize if dtype else max(0, end - begin)):
            return tuple(shape), begin, end
    raise ValueError(f"{place} is damaged: its header has {entry!r:.200}")


def stored(path: str, header: Mapping[str, Any], begin: int, name: str, place: str) -> FileArray:
    """An array by its entry in the header of a file of safetensors."""
    entry = header[name]
    with checked(place):
        if entry["dtype"] not in DTYPES:
            raise ValueError(f"array {name!r} of {place} must hold {NUMBERS}, got {entry['dtype']}")
        shape, first, _ = extent(entry, place)
        return FileArray(path, place, begin + first, shape, DTYPES[entry["dtype"]])


def bytes_of(values: Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    numbers: Any = values.view(-1).view(torch.uint8).numpy()
    return memoryview(numbers)


def layout(arrays: Mapping[str, Tensor]) -> tuple[dict[str, Any], list[memoryview]]:
    """Entries of the header of safetensors for contiguous arrays, and their bytes in order."""
    entries: dict[str, Any] = {}
    parts, offset = [], 0
    # Wide numbers first, so that each lies at a multiple of its width.
    for name, values in sorted(arrays.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])):
        end = offset + values.nbytes
        entries[name] = {"dtype": CODES[values.dtype], "shape": list(values.shape), "data_offsets": [offset, end]}
        parts.append(bytes_of(values))
        offset = end
    return entries, parts


def encode_header(entries: Mapping[str, Any], metadata: str) -> bytes:
    """The header of a file of safetensors, to be followed by the bytes of the arrays."""
    text = json.dumps({RESERVED: {"convexformer": metadata}, **entries}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
