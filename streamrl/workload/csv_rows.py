"""CSV files with comment lines, plain or compressed with gzip (.gz)."""

from __future__ import annotations

import csv
import gzip
from collections.abc import Iterator
from pathlib import Path


def read_csv(path: Path) -> list[dict[str, str]]:
    """Read the rows below the header, lines that begin with # left out.

    Raises:
        ValueError: the file cannot be read; the message begins with its path.
    """
    try:
        return list(csv.DictReader(_lines(path)))
    except (OSError, EOFError) as error:
        raise ValueError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path}: not a CSV file: {error}") from None


def _lines(path: Path) -> Iterator[str]:
    is_compressed = path.suffix == ".gz"
    with gzip.open(path, "rt", newline="") if is_compressed else path.open(newline="") as file:
        for line in file:
            if not line.startswith("#"):
                yield line
