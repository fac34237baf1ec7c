"""Decides from the first rows of a CSV file what separates its values, and whether its first row is a header."""

from __future__ import annotations

import codecs
import csv
import gzip
import re
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path

from trainer.core.errors import DataError

_DELIMITERS = ",;\t|"

_MISSING = {"", "-", "?", "na", "n/a", "nan", "null", "none"}  #: lower case

_LINE_END = re.compile("\r+\n|\r")  #: also of files that were written as text twice, on Windows

csv.field_size_limit(1 << 30)  # the first rows may contain long texts

_KINDS = {
    "UUID": re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE),
    "time": re.compile(r"\d{4}[-/]\d\d[-/]\d\d\b.*"),
    "number": re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE),
}


def split_rows(lines: Iterable[str], delimiter: str | None) -> tuple[str, list[list[str]]]:
    """Return the delimiter, and the rows of values without those that are empty lines.

    If ``delimiter`` is None, it is the one of comma, semicolon, tab and bar with which most rows have as many values as
    the first, at least two.
    """
    text = [line.translate({0: None, 13: None}) for line in lines]  # which the reader refuses
    found = {d: [row for row in csv.reader(text, delimiter=d) if row] for d in (delimiter or _DELIMITERS)}
    best = max(found, key=lambda d: _likeliness(found[d]))
    return best, found[best]


def _likeliness(rows: Sequence[Sequence[str]]) -> tuple[bool, float, int]:
    columns = len(rows[0]) if rows else 0
    return columns > 1, sum(len(row) == columns for row in rows) / max(1, len(rows)), columns


def has_header(rows: Sequence[Sequence[str]]) -> bool:
    """Return whether the first of ``rows`` contains names of columns rather than values.

    It does if a cell is not of the kind (number, time, UUID) of all other cells of its column. It does not if a cell is
    of this kind (but consecutive integers may be names: of four columns, or of years), is the text of another row, or
    is such a text with other digits (``u1`` above ``u2``). Without such signs, it is a header.
    """
    if not rows:
        return False
    values, texts, numbers = False, False, []
    for k, cell in enumerate(map(str.strip, rows[0])):
        below = [row[k].strip() for row in rows[1:] if k < len(row) and row[k].strip().lower() not in _MISSING]
        if cell.lower() in _MISSING:
            continue
        kind = next((kind for kind, of in _KINDS.items() if below and all(map(of.fullmatch, below))), None)
        if kind and not _KINDS[kind].fullmatch(cell):
            return True
        if kind == "number" or (not below and _KINDS["number"].fullmatch(cell)):
            numbers.append(cell)
        else:
            digits = re.sub(r"\d+", "9", cell)
            alike = digits != cell and all(re.sub(r"\d+", "9", each) == digits for each in below)
            values |= kind is not None or cell in below or (bool(below) and alike)
            texts = True
    if values or not numbers:
        return not values
    first = int(numbers[0]) if numbers[0].isdigit() else -1
    if first < 0 or numbers != [str(first + k) for k in range(len(numbers))]:
        return False
    return len(numbers) > 3 or (texts and (first < 2 or 1900 <= first <= 2100))


def copy_as_utf8(path: Path, encoding: str, target: Path) -> None:
    """Write the text of a file to ``target`` as UTF-8, with line feeds as line ends.

    Raises ``DataError`` that names the line which is not in the encoding, or if the file cannot be read or unpacked.
    """
    if path.suffix.lower() == ".zst":
        raise DataError(f"{path}: `encoding` is not possible with .zst; unpack the file")
    decoder, line, rest = codecs.getincrementaldecoder(encoding)(), 1, ""
    opened = gzip.open(path, "rb") if path.suffix.lower() == ".gz" else path.open("rb")
    with opened as source, target.open("w", encoding="utf-8", newline="") as out:
        while True:
            try:
                chunk = source.read(1 << 20)
            except (gzip.BadGzipFile, EOFError, zlib.error) as error:
                raise DataError(f"{path}: is no gzip file, or a damaged one ({error}); copy or pack it again") from None
            try:
                text = rest + decoder.decode(chunk, final=not chunk)
            except UnicodeError as error:
                if isinstance(error, UnicodeDecodeError):
                    line += error.object[: error.start].decode(encoding, "replace").count("\n")
                raise DataError(f"{path}, line {line}: is not {encoding}; set `encoding` to that of the file") from None
            rest = text[len(text.rstrip("\r")) :] if chunk else ""  # perhaps a line end that is cut
            text = _LINE_END.sub("\n", text[: len(text) - len(rest)])
            line += text.count("\n")
            out.write(text)
            if not chunk:
                return


#: first bytes of a file -> what it is, and what to do
_MAGIC = {
    b"PAR1": "a Parquet file; give it a name that ends in .parquet",
    b"\x1f\x8b": "a gzip file; give it a name that ends in .csv.gz",
    b"\x28\xb5\x2f\xfd": "a Zstandard file; give it a name that ends in .csv.zst",
    b"PK\3\4": "a zip archive or a spreadsheet; unpack it, or save it as CSV",
    b"\xd0\xcf\x11\xe0": "a spreadsheet; save it as CSV",
    b"BZh": "a bzip2 file; unpack it",
    b"\xfd7zXZ": "an xz file; unpack it",
    b"\xff\xfe\0\0": "in UTF-32; set `encoding: utf-32`",
    b"\xff\xfe": "in UTF-16; set `encoding: utf-16`",
    b"\xfe\xff": "in UTF-16; set `encoding: utf-16`",
}


def check_magic(path: Path) -> None:
    """Raise ``DataError`` if a file's first bytes are those of something else than a CSV file in UTF-8."""
    if path.suffix.lower() == ".gz":
        return
    with path.open("rb") as file:
        head = file.read(8)
    found = next((what for magic, what in _MAGIC.items() if head.startswith(magic)), "")
    if not found and len(head) > 1 and 0 in head[:2]:
        found = f"in UTF-16; set `encoding: utf-16-{'le' if head[0] else 'be'}`"
    if found:
        raise DataError(f"{path} is {found}")


def guessed_encoding(path: Path) -> str | None:
    """Return an encoding in which a CSV file can be read; None for UTF-8, and for damaged and .zst files."""
    if path.suffix.lower() == ".zst":
        return None
    opened = gzip.open(path, "rb") if path.suffix.lower() == ".gz" else path.open("rb")
    wrong: set[str] = set()
    decoders = {name: codecs.getincrementaldecoder(name)() for name in ("utf-8", "cp1252")}
    with opened as source:
        try:
            head = source.read(2)
            if head in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
                return "utf-16"
            if 0 in head:
                return f"utf-16-{'le' if head[0] else 'be'}"
            chunk = head
            while chunk and wrong < decoders.keys():
                for name in decoders.keys() - wrong:
                    try:
                        decoders[name].decode(chunk)
                    except UnicodeDecodeError:
                        wrong.add(name)
                chunk = source.read(1 << 20)
        except (gzip.BadGzipFile, EOFError, zlib.error):
            return None
    return None if "utf-8" not in wrong else "latin-1" if "cp1252" in wrong else "cp1252"


def check_zst(path: Path) -> None:
    """Raise ``DataError`` if a .zst file is cut off: DuckDB would read the rows that are there without an error.

    Reads the headers of all blocks only (RFC 8878).
    """
    with path.open("rb") as file:
        size, place = path.stat().st_size, 0
        while place < size:
            file.seek(place)
            head = file.read(18)
            magic, then = int.from_bytes(head[:4], "little"), int.from_bytes(head[4:8], "little")
            if magic & 0xFFFFFFF0 == 0x184D2A50:  # a frame to be skipped
                place += 8 + then
                continue
            if magic != 0xFD2FB528:
                raise DataError(f"{path}: is no .zst file, or a damaged one; copy or pack it again")
            flags = then & 255
            single = flags >> 5 & 1
            place += 5 + (1 - single) + (0, 1, 2, 4)[flags & 3] + (single, 2, 4, 8)[flags >> 6]
            is_last = False
            while not is_last and place < size:
                file.seek(place)
                block = int.from_bytes(file.read(3), "little")
                is_last = bool(block & 1)
                place += 3 + (1 if block >> 1 & 3 == 1 else block >> 3)
            place += 4 * (flags >> 2 & 1)
            if not is_last:
                place = size + 1
        if place != size:
            raise DataError(f"{path}: is cut off, its end is missing; copy it again")
