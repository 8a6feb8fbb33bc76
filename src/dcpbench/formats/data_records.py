"""Verifies the checksums of the data in a DCP checkpoint, without torch. Each tensor and each value is a zip
archive written by `torch.save`, whose checksums `torch.load` ignores."""

import math
import os
import struct
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from dcpbench.core.mismatch import Mismatch, Problem
from dcpbench.formats.audit import Manifest, Shape, Span
from dcpbench.formats.dcp_metadata import place_name
from dcpbench.formats.safetensors_headers import DTYPES
from dcpbench.records import files

_BEGINS = b"PK\x03\x04"
_BLOCK = 2**20
_ELEMENT_BYTES = {f"torch.{name}": size for name, size in DTYPES.values()}
_UNREADABLE = (
    zipfile.BadZipFile,
    *(EOFError, LookupError, MemoryError, NotImplementedError, OverflowError),
    *(RuntimeError, ValueError, struct.error, zlib.error),
)
"""Exceptions of reading invalid archives; zipfile raises NotImplementedError for an unknown compression."""


def damaged_records(folder: Path, manifest: Manifest) -> Iterator[Mismatch]:
    """Yield a mismatch for data that cannot be read, has a wrong checksum, or has the wrong number of bytes
    for its dtype and size. Files of a wrong length, and data that an extension of the writer transformed, are
    not read.

    Raises:
        OSError: a file cannot be read.
    """
    stored = {
        place_name(key, chunk.offsets): (key, entry.dtype, chunk.sizes)
        for key, entry in manifest.entries.items()
        for chunk in entry.chunks
    }
    for path, spans in sorted(manifest.spans.items()):
        if manifest.found.get(path) != manifest.named[path]:
            continue
        with files.open_regular(Path(os.path.realpath(folder / path))) as file:
            for span in sorted(spans):
                key, dtype, sizes = stored.get(span.name, (span.name, None, ()))
                if not span.transformed and (why := _damage(file, span, dtype, sizes)):
                    yield Mismatch(key, Problem.unreadable, facts={"file": path, "error": why})


def _damage(file: BinaryIO, span: Span, dtype: str | None, sizes: Shape) -> str | None:
    """Return why these bytes are not a tensor of this dtype and size, or a value; None if they are."""
    file.seek(span.begin)
    begins = file.read(len(_BEGINS))
    if dtype is None and begins != _BEGINS and any(begins):
        return None  # a custom planner can store values in its own format
    try:
        with zipfile.ZipFile(files.FilePart(file, span.begin, span.end)) as archive:
            for record in archive.infolist():
                _check(archive, record)
            data = [record.file_size for record in archive.infolist() if "/data/" in record.filename]
    except _UNREADABLE as error:
        return str(error) or type(error).__name__
    if dtype is None:
        return None
    elements, element = math.prod(sizes), _ELEMENT_BYTES.get(dtype)
    # A tensor subclass can consist of several records.
    if (elements and not sum(data)) or (element and len(data) == 1 and data[0] != elements * element):
        return f"{sum(data)} bytes for {elements} elements of {dtype}"
    return None


def _check(archive: zipfile.ZipFile, record: zipfile.ZipInfo) -> None:
    if record.compress_type != zipfile.ZIP_STORED:
        raise zipfile.BadZipFile(f"{record.filename} is compressed, which torch.save never does")
    if not record.CRC:
        record.CRC = None  # type: ignore[assignment] # torch.save can leave it out
    with archive.open(record) as content:
        while content.read(_BLOCK):
            pass
