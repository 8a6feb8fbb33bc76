"""Reads the headers of safetensors files, which are JSON, and the index of a folder of them. DCP's
HuggingFace storage writes such folders; if each rank writes separate files, their headers specify the part of
each tensor that a file contains."""

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from dcpbench.core.mismatch import Mismatch, Problem
from dcpbench.formats.audit import Chunk, Entry, Manifest, Shape, Span, reach
from dcpbench.formats.dcp_metadata import DAMAGED, MetadataError, check_shapes
from dcpbench.records import files

SUFFIX = ".safetensors"
INDEX = ".safetensors.index.json"
"""Suffix of the file that lists the file of each key."""

_MOST_OF_HEADER = 100_000_000
"""Limit of readers of safetensors."""
_LENGTH_BYTES = 8
_NUMBERED = re.compile(r"(?!shard-)(.*)-(\d{1,9})-of-(\d{1,6})\.safetensors")
DTYPES = {
    "BOOL": ("bool", 1),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "F8_E8M0": ("float8_e8m0fnu", 1),
    "BF16": ("bfloat16", 2),
    "C64": ("complex64", 8),
    **{f"F{bits}": (f"float{bits}", bits // 8) for bits in (16, 32, 64)},
    **{f"I{bits}": (f"int{bits}", bits // 8) for bits in (8, 16, 32, 64)},
    **{f"U{bits}": (f"uint{bits}", bits // 8) for bits in (8, 16, 32, 64)},
}
"""Dtypes by their names in a header: torch's name, and the bytes of an element."""


def names_in(lengths: Mapping[str, int]) -> list[str]:
    """Return the safetensors files in a folder, without those in folders below."""
    return [name for name in lengths if name.endswith(SUFFIX) and "/" not in name]


def safetensors_manifest(folder: Path, lengths: Mapping[str, int]) -> Manifest:
    """Return the manifest of a folder's safetensors files. Its `found_wrong` lists bytes that belong to no
    tensor, tensors with the wrong number of bytes, and differences from the index.

    Raises:
        OSError, MetadataError: a header cannot be read, or is invalid; the message names its file.
    """
    chunks: defaultdict[str, list[Chunk]] = defaultdict(list)
    dtypes: dict[str, str] = {}
    spans: dict[str, list[Span]] = {}
    named: dict[str, int] = {}
    mismatches: list[Mismatch] = []
    for name in names_in(lengths):
        try:
            header, data_at = _header(folder / name)
            extra = header.pop("__metadata__", {})
            sharding = json.loads(extra.get("DCP_SHARDING_INFO", "null"))
            spans[name] = []
            for key, tensor in header.items():
                sizes: Shape = tuple(tensor["shape"])
                if not all(type(at) is int and at >= 0 for at in tensor["data_offsets"]):
                    raise ValueError(f"{key} has the offsets {tensor['data_offsets']}")
                begin, end = (data_at + at for at in tensor["data_offsets"])
                offsets = tuple(sharding[key]["saved_offsets"]) if sharding else (0,) * len(sizes)
                chunk = Chunk(offsets, sizes, name)
                check_shapes(key, Entry(reach([chunk]), None, (chunk,)))
                dtype, element_bytes = DTYPES.get(tensor["dtype"], (str(tensor["dtype"]), None))
                if any(len(earlier.sizes) != len(sizes) or dtypes[key] != dtype for earlier in chunks[key]):
                    raise ValueError(f"{key} differs from the tensor of this name in {chunks[key][0].file}")
                dtypes[key] = dtype
                if element_bytes and end - begin != math.prod(sizes) * element_bytes:
                    facts = {"elements": math.prod(sizes), "dtype": dtype, "bytes": end - begin, "file": name}
                    mismatches.append(Mismatch(key, Problem.ranges, facts=facts))
                chunks[key].append(chunk)
                spans[name].append(Span(begin, end, key))
        except (*DAMAGED, MetadataError) as error:
            raise MetadataError(f"{name}: not a safetensors file: {error}") from None
        named[name] = max((span.end for span in spans[name]), default=data_at)
        mismatches += _holes(name, data_at, spans[name])
    entries = {key: Entry(reach(parts), f"torch.{dtypes[key]}", (*parts,)) for key, parts in chunks.items()}
    indexes = frozenset(name for name in lengths if name.endswith(INDEX) and "/" not in name)
    mismatches += _against_index(folder, indexes, entries, lengths) if indexes else []
    mismatches += _numbers_missing(named)
    return Manifest(entries, named, lengths, indexes, spans=spans, found_wrong=tuple(mismatches))


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """Return the header of a file, and the offset of its data."""
    with files.open_regular(path) as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        text = file.read(min(length, _MOST_OF_HEADER))
    if len(text) < length or not length:
        raise ValueError(f"its header has {len(text):,} of {length:,} bytes")
    header = json.loads(text)
    if not isinstance(header, dict):
        raise ValueError("its header is not a mapping")
    return header, _LENGTH_BYTES + length


def _holes(name: str, data_at: int, spans: list[Span]) -> Iterator[Mismatch]:
    """Yield a mismatch for bytes of a file before and between tensors."""
    at = data_at
    for span in sorted(spans):
        if span.begin > at:
            yield Mismatch(name, Problem.ranges, facts={"begin": at, "end": span.begin})
        at = max(at, span.end)


def _against_index(
    folder: Path, indices: Iterable[str], entries: Mapping[str, Entry], lengths: Mapping[str, int]
) -> Iterator[Mismatch]:
    """Yield a mismatch for each key that is only in the index, or not in it, and for each missing file."""
    listed: dict[str, str] = {}
    for index in indices:
        try:
            listed |= json.loads(files.read(folder / index))["weight_map"]
            if not all(isinstance(name, str) for name in listed.values()):
                raise ValueError("the name of a file is not a string")
        except DAMAGED as error:
            raise MetadataError(f"{index}: not an index of keys: {error}") from None
    for name, keys in Counter(listed.values()).items():
        if name not in lengths:
            yield Mismatch(name, Problem.files, facts={"found": "no such file", "keys": keys})
    for key, name in listed.items():
        if name in lengths and name not in {chunk.file for chunk in entries.get(key, Entry()).chunks}:
            yield Mismatch(key, Problem.not_stored)
    for key in entries:
        if key not in listed:
            yield Mismatch(key, Problem.unclaimed)


def _numbers_missing(names: Mapping[str, int]) -> Iterator[Mismatch]:
    """Yield a mismatch for each missing file of files numbered 1 of 3; not for files of single ranks, whose
    numbers need not be consecutive."""
    numbered = [match.groups() for name in names if (match := _NUMBERED.fullmatch(name))]
    for stem, digits, of in dict.fromkeys((stem, len(number), of) for stem, number, of in numbered):
        there = {int(this) for other_stem, this, all_of in numbered if (other_stem, all_of) == (stem, of)}
        for missing in range(1, int(of) + 1):
            if missing not in there:
                name = f"{stem}-{missing:0{digits}}-of-{of}{SUFFIX}"
                yield Mismatch(name, Problem.files, facts={"found": "no such file", "last": int(of)})
