"""A fitted ranker on disk: numpy arrays and a line of JSON, which can hold nothing that runs."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import numpy as np

from streamrl.ranker.text_ranker import Regression, TextRanker
from streamrl.ranker.trees import Trees

FORMAT = 1
ARRAYS = ("idf", "means", "spreads", "of_words", "of_shape")
TREES = ("feature", "threshold", "left", "right", "value")


def write_ranker(path: Path, ranker: TextRanker) -> None:
    """Write a ranker to a file, whatever its name ends in."""
    regression = ranker.regression
    arrays = {name: getattr(ranker, name, None) for name in ARRAYS[:3]}
    arrays |= {name: getattr(regression, name) for name in ARRAYS[3:]}
    if regression.trees is not None:
        arrays |= {name: getattr(regression.trees, name) for name in TREES}
        arrays["topics"] = regression.topics
    header = {
        "format": FORMAT,
        "kind": ranker.kind,
        "intercept": regression.intercept,
        "words": ranker.words,
    }
    text = np.frombuffer(json.dumps(header).encode(), dtype=np.uint8)
    with path.open("wb") as file:
        np.savez_compressed(file, header=text, **arrays)  # type: ignore[arg-type]  # arrays by name


def read_ranker(path: Path) -> TextRanker:
    """Read what `write_ranker` wrote.

    Raises:
        ValueError: naming the file, and what is wrong with it.
    """
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return _read({name: arrays[name] for name in arrays.files})
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, EOFError, AttributeError, zipfile.BadZipFile) as error:
        raise ValueError(
            f"{path}: not a ranker that `streamrl ranker fit` wrote: {error}"
        ) from None


def _read(arrays: dict[str, np.ndarray[tuple[int, ...], np.dtype[np.float64]]]) -> TextRanker:
    header = json.loads(arrays["header"].tobytes())
    if header["format"] != FORMAT:
        raise ValueError(f"of format {header['format']!r}, not {FORMAT}")
    words = tuple(map(str, header["words"]))
    if not len(words) == len(arrays["idf"]) == len(arrays["of_words"]):
        raise ValueError("words and weights differ in number")
    trees = Trees(*(arrays[name] for name in TREES)) if "topics" in arrays else None  # type: ignore[arg-type]  # whole numbers among them
    regression = Regression(
        float(header["intercept"]),
        arrays["of_words"],
        arrays["of_shape"],
        arrays.get("topics"),
        trees,
    )
    idf, means, spreads = (arrays[name] for name in ARRAYS[:3])
    return TextRanker(words, idf, means, spreads, regression, str(header["kind"]))
