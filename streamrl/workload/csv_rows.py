"""CSV files with comment lines, plain or compressed with gzip (.gz)."""

from __future__ import annotations

import csv
import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path


def read_csv(path: Path) -> list[dict[str, str]]:
    """Read the rows below the header, lines that begin with # left out.

    Raises:
        ValueError: the file cannot be read; the message begins with its path.
    """
    try:
        rows = list(csv.DictReader(_lines(path)))
    except (OSError, EOFError) as error:
        raise ValueError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    except (UnicodeDecodeError, csv.Error, zlib.error) as error:
        raise ValueError(f"{path}: not a CSV file: {error}") from None
    for number, row in enumerate(rows, start=1):
        if None in row:
            raise ValueError(f"{path}: row {number} has more columns than the header")
    return rows


def _lines(path: Path) -> Iterator[str]:
    open_text = gzip.open if path.suffix == ".gz" else open
    with open_text(path, "rt", newline="", encoding="utf-8-sig") as file:
        for line in file:
            if not line.startswith("#"):
                yield line
