"""Read `.eval` files of inspect_ai: zip archives with one JSON file per sample, compressed with zstd or deflate."""

import json
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa

from topr_trl.data import json_documents

SUFFIX = ".eval"
_ZSTD = 93  # compression method in zip files; zipfile does not support it before Python 3.14


# Errors of zipfile, of decompression and of the JSON parser for a damaged or malicious archive.
_DAMAGED = (
    zipfile.BadZipFile, zlib.error, pa.ArrowException, OSError, json.JSONDecodeError, UnicodeError, struct.error,
    RecursionError,
)  # fmt: skip


def read_samples(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the file name and the content of each sample. Add the header's fields `eval` and `plan` to the content.

    Args:
        path (`Path`): `.eval` archive.

    Raises:
        ValueError: the file cannot be read or is damaged, is not an archive of inspect_ai, splits its samples into
            chunks, or has a header or a sample that is longer than `json_documents.LONGEST`.
    """
    with _opened(path) as archive:
        header = _header(archive)
        for member in _members(archive):
            sample = json.loads(_content(archive, member))
            if not isinstance(sample, dict):
                raise zipfile.BadZipFile(f"its member {member.filename} is not a JSON object")
            yield member.filename, {**sample, "eval": header.get("eval"), "plan": header.get("plan")}


def count_samples(path: Path) -> int:
    """Return the number of samples of an archive.

    Raises:
        ValueError: the file cannot be read or is damaged, is not a zip archive, or splits its samples into chunks.
    """
    with _opened(path) as archive:
        return len(_members(archive))


@contextmanager
def _opened(path: Path) -> Iterator[zipfile.ZipFile]:
    """Open an archive. Convert an error of opening or reading to a ValueError with the remedy."""
    try:
        with zipfile.ZipFile(path) as archive:
            yield archive
    except _DAMAGED as error:
        raise ValueError(
            f"{path} cannot be read as a log of inspect_ai: {error}. Copy it again, or write JSON with `inspect log "
            "convert --to json`."
        ) from None


def _members(archive: zipfile.ZipFile) -> list[zipfile.ZipInfo]:
    found = [each for each in archive.infolist() if each.filename.startswith("samples/")]
    if any(each.filename.endswith("/sample.json") for each in found):
        raise zipfile.BadZipFile("its samples are split into chunks")
    return [each for each in found if each.filename.endswith(".json")]


def _header(archive: zipfile.ZipFile) -> dict[str, Any]:
    """Return the header of an archive. The archive of a running or killed evaluation has `start.json` instead."""
    for name in ("header.json", "_journal/start.json"):
        if name in archive.namelist():
            found = json.loads(_content(archive, archive.getinfo(name)))
            return found if isinstance(found, dict) else {}
    raise zipfile.BadZipFile("it has no header.json")


def _content(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> bytes:
    if member.file_size > json_documents.LONGEST:
        raise json_documents.too_long(Path(str(archive.filename)), member.filename)
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, _ZSTD):
        # `zipfile` unpacks bzip2 and LZMA without a limit.
        raise zipfile.BadZipFile(f"{member.filename} is compressed with neither zstd nor deflate")
    if member.compress_type != _ZSTD:
        return archive.read(member)
    file = archive.fp
    assert file is not None
    # Bytes 26 to 29 of a zip file header are the lengths of the file name and the extra field. The data follows both.
    file.seek(member.header_offset + 26)
    name, extra = struct.unpack("<HH", file.read(4))
    file.seek(name + extra, 1)
    packed = pa.BufferReader(file.read(member.compress_size))
    with pa.CompressedInputStream(packed, "zstd") as unpacked:
        content: bytes = unpacked.read(member.file_size + 1)
    if len(content) != member.file_size:
        raise zipfile.BadZipFile(f"{member.filename} is damaged")
    return content
