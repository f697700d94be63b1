"""Rank prompts by text: words and shape against log length, by ridge regression or boosted trees.

Cross-validation over prompts chooses the method and the strength of the ridge penalty. A fitted
ranker is only arrays, so its file cannot contain code.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from streamrl.runfile.reading import DAMAGE_OF_ARRAYS
from streamrl.runfile.result_files import replacing

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

NUM_TREES, DEPTH, RATE, SHARE = 200, 3, 0.05, 0.7
"""Many small trees with a low rate, each on part of the prompts: the usual choice for few examples (Friedman 2002)."""
LEAF = -1  # scikit-learn's mark of a node without children


@dataclass(frozen=True)
class Trees:
    """Nodes of trees of at most `DEPTH`, [trees, nodes]; a leaf is its own child."""

    feature: Ints
    threshold: Floats
    left: Ints
    right: Ints
    value: Floats

    def predict(self, columns: Floats) -> Floats:
        """Return the sum over trees for each row of `columns` [rows, features]."""
        columns = columns.astype(np.float32)  # scikit-learn compares in float32
        rows = np.arange(len(columns))
        total = np.zeros(len(columns))
        for tree in range(len(self.feature)):
            node = np.zeros(len(columns), dtype=np.int64)
            for _ in range(DEPTH):
                goes_left = columns[rows, self.feature[tree][node]] <= self.threshold[tree][node]
                node = np.where(goes_left, self.left[tree][node], self.right[tree][node])
            total += self.value[tree][node]
        return total


def boost(columns: Floats, targets: Floats) -> tuple[float, Trees]:
    """Fit boosted trees; return the start value and the trees."""
    from sklearn.ensemble import GradientBoostingRegressor

    model = GradientBoostingRegressor(
        n_estimators=NUM_TREES, max_depth=DEPTH, learning_rate=RATE, subsample=SHARE, random_state=0
    ).fit(columns, targets)
    grown = [stage[0].tree_ for stage in model.estimators_]
    size = max(tree.node_count for tree in grown)
    nodes = np.arange(size)
    feature, threshold, left, right, value = [], [], [], [], []
    for tree in grown:
        own = nodes[: tree.node_count]
        is_leaf = tree.children_left == LEAF
        feature.append(_padded(np.where(is_leaf, 0, tree.feature), size))
        threshold.append(_padded(tree.threshold, size))
        left.append(_padded(np.where(is_leaf, own, tree.children_left), size))
        right.append(_padded(np.where(is_leaf, own, tree.children_right), size))
        value.append(_padded(RATE * tree.value[:, 0, 0], size))
    whole = (np.array(feature, dtype=np.int64), np.array(threshold))
    children = np.array(left, dtype=np.int64), np.array(right, dtype=np.int64)
    return float(targets.mean()), Trees(*whole, *children, np.array(value))


def _padded(values: npt.NDArray[np.generic], size: int) -> npt.NDArray[np.generic]:
    return np.pad(values, (0, size - len(values)))


NUMBER = re.compile(r"\d+")
MOST_DIGITS = 15  # of a number in a prompt whose size counts: a float holds it
COUNTED = ("+-*/=^<>", "\\", "\n", "?", ",.;:", "([{", "_$")
"""Sets of characters; the number of each in a prompt is a feature."""
NAMES = ("characters", "words", "numbers", "largest", "last", "sum", "upper", *COUNTED)


def text_features(texts: Sequence[str]) -> Floats:
    """Return the features of prompts [prompts, len(NAMES)], each log(1 + a count or a size)."""
    return np.log1p(
        np.array([_features(text) for text in texts], dtype=np.float64).reshape(-1, len(NAMES))
    )


def _features(text: str) -> list[float]:
    numbers = [float(digits[:MOST_DIGITS]) for digits in NUMBER.findall(text)] or [0.0]
    return [
        len(text),
        len(text.split()),
        len(numbers),
        max(numbers),
        numbers[-1],
        sum(numbers),
        sum(map(str.isupper, text)),
        *(sum(map(text.count, symbols)) for symbols in COUNTED),
    ]


Fit = Callable[["Features", Floats], "Regression"]

FOLDS = 5  # of prompts; a ranker fitted to the others scores each
INNER_FOLDS = 3  # of those, to choose the kind of ranker
PENALTIES = (0.3, 1.0, 3.0, 10.0, 30.0)
MOST_WORDS = 20_000
NUM_TOPICS = 48  # directions of word space for the trees: they need few, dense columns
LEAST_PROMPTS = 2 * FOLDS


@dataclass(frozen=True)
class Features:
    """Features of prompts."""

    words: Any
    """TF-IDF of words and word pairs, a sparse matrix [prompts, words]."""
    shape: Floats
    """Shape features [prompts, shapes], each with mean 0 and standard deviation 1 among the fitted prompts."""

    def of(self, rows: npt.NDArray[np.int64]) -> Features:
        """Return the features of some of the prompts."""
        return Features(self.words[rows], self.shape[rows])


@dataclass(frozen=True)
class Regression:
    """Log tokens from features: linear in words and shape, or trees over topics and shape."""

    intercept: float
    of_words: Floats
    of_shape: Floats
    topics: Floats | None = None
    """[words, topics]."""
    trees: Trees | None = None

    def predict(self, features: Features) -> Floats:
        """Return the expected log tokens of each prompt."""
        found: Floats = (
            self.intercept + features.words @ self.of_words + features.shape @ self.of_shape
        )
        if self.trees is not None:
            found = found + self.trees.predict(
                np.hstack([features.words @ self.topics, features.shape])
            )
        return found


@dataclass(frozen=True)
class TextRanker:
    """Predicts the output tokens of prompts from their texts."""

    words: tuple[str, ...]
    idf: Floats
    means: Floats
    spreads: Floats
    regression: Regression
    kind: str
    """The method that cross-validation chose."""

    def score(self, texts: Sequence[str]) -> Floats:
        """Return the expected output tokens of prompts; needs scikit-learn."""
        found: Floats = np.exp(self.regression.predict(self._features(texts)))
        return found

    def _features(self, texts: Sequence[str]) -> Features:
        shape = (text_features(texts) - self.means) / self.spreads
        return Features(make_vectorizer(self.words, self.idf).transform(texts), shape)


def make_vectorizer(words: Sequence[str] | None = None, idf: Floats | None = None) -> Any:
    """Return scikit-learn's TF-IDF, unfitted, or with the fitted words and weights."""
    text = import_text()
    options = {"ngram_range": (1, 2), "sublinear_tf": True, "token_pattern": r"(?u)\b\w+\b|[^\w\s]"}
    if words is None:
        return text.TfidfVectorizer(min_df=2, max_features=MOST_WORDS, **options)
    vectorizer = text.TfidfVectorizer(
        vocabulary={word: i for i, word in enumerate(words)}, **options
    )
    vectorizer.idf_ = idf
    return vectorizer


def import_text() -> Any:
    """Return `sklearn.feature_extraction.text`; raise `ValueError` if it is not installed."""
    try:
        from sklearn.feature_extraction import text
    except ImportError:
        raise ValueError("scikit-learn not installed: pip install 'streamrl[ranker]'") from None
    return text


def fit_text(texts: Sequence[str], lengths: Floats, seed: int = 0) -> TextRanker:
    """Fit a ranker to prompts and their mean log tokens.

    Raises:
        ValueError: there are too few prompts, or scikit-learn is missing.
    """
    vectorizer, features, means, spreads = _read_texts(texts)
    fits = {f"ridge {penalty:g}": _ridge(penalty) for penalty in PENALTIES} | {
        "boosting": _boosting
    }
    errors = {name: _error(fit, features, lengths, seed) for name, fit in fits.items()}
    kind = min(errors, key=lambda name: errors[name])
    words = tuple(vectorizer.get_feature_names_out().tolist())
    return TextRanker(words, vectorizer.idf_, means, spreads, fits[kind](features, lengths), kind)


def held_out(texts: Sequence[str], lengths: Floats, seed: int = 0) -> Floats:
    """Return the expected log tokens of each prompt, by rankers that were fitted without it."""
    found = np.empty(len(texts))
    for fold, rest in folds(len(texts), seed):
        ranker = fit_text([texts[i] for i in rest], lengths[rest], seed)
        found[fold] = np.log(ranker.score([texts[i] for i in fold]))
    return found


def folds(
    num: int, seed: int, num_folds: int = FOLDS
) -> list[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
    """Return pairs of (held-out prompts, other prompts), each in order."""
    fold_of = np.random.default_rng(seed).permutation(num) % num_folds
    return [(np.flatnonzero(fold_of == k), np.flatnonzero(fold_of != k)) for k in range(num_folds)]


def _read_texts(texts: Sequence[str]) -> tuple[Any, Features, Floats, Floats]:
    """Return the vectorizer, the features of prompts, and the means and standard deviations of their shapes."""
    if len(texts) < LEAST_PROMPTS:
        raise ValueError(
            f"a ranker needs at least {LEAST_PROMPTS} prompts with known lengths, got {len(texts)}"
        )
    vectorizer = make_vectorizer()
    try:
        words = vectorizer.fit_transform(texts)
    except ValueError:  # no word is in two prompts
        vectorizer = make_vectorizer([""], np.ones(1))
        words = vectorizer.transform(texts)
    shape = text_features(texts)
    means, spreads = shape.mean(axis=0), shape.std(axis=0)
    spreads[spreads == 0] = 1.0
    return vectorizer, Features(words, (shape - means) / spreads), means, spreads


def _error(fit: Fit, features: Features, lengths: Floats, seed: int) -> float:
    """Return the mean squared error of log tokens on held-out prompts."""
    errors = []
    for fold, rest in folds(len(lengths), seed, INNER_FOLDS):
        found = fit(features.of(rest), lengths[rest]).predict(features.of(fold))
        errors.append((found - lengths[fold]) ** 2)
    return float(np.concatenate(errors).mean())


def _ridge(penalty: float) -> Fit:
    def fit(features: Features, lengths: Floats) -> Regression:
        from scipy import sparse
        from sklearn.linear_model import Ridge

        model = Ridge(alpha=penalty).fit(
            sparse.hstack([features.words, features.shape]).tocsr(), lengths
        )
        return Regression(
            float(model.intercept_), model.coef_[: -len(NAMES)], model.coef_[-len(NAMES) :]
        )

    return fit


def _boosting(features: Features, lengths: Floats) -> Regression:
    from sklearn.decomposition import TruncatedSVD

    num_topics = min(NUM_TOPICS, min(features.words.shape) - 1)
    topics = np.zeros((features.words.shape[1], 0))
    if num_topics > 0:
        topics = TruncatedSVD(num_topics, random_state=0).fit(features.words).components_.T
    columns = np.hstack([features.words @ topics, features.shape])
    start, trees = boost(columns, lengths)
    zeros = np.zeros(features.words.shape[1]), np.zeros(len(NAMES))
    return Regression(start, *zeros, topics, trees)


FORMAT = 1
ARRAYS = ("idf", "means", "spreads", "of_words", "of_shape")
TREES = ("feature", "threshold", "left", "right", "value")


def write_ranker(path: Path, ranker: TextRanker) -> None:
    """Write a ranker to a file; the suffix can be any."""
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
    with replacing(path) as partial, partial.open("wb") as file:
        np.savez_compressed(file, header=text, **arrays)  # type: ignore[arg-type]  # arrays by name


def read_ranker(path: Path) -> TextRanker:
    """Read a ranker that `write_ranker` wrote.

    Raises:
        ValueError: the file is wrong; the message names it and the reason.
    """
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return _read_arrays({name: arrays[name] for name in arrays.files})
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from None
    except DAMAGE_OF_ARRAYS as error:
        raise ValueError(
            f"{path}: not a ranker that `streamrl ranker fit` wrote: {error}"
        ) from None


def _read_arrays(
    arrays: dict[str, np.ndarray[tuple[int, ...], np.dtype[np.float64]]],
) -> TextRanker:
    header = json.loads(arrays["header"].tobytes())
    if header["format"] != FORMAT:
        raise ValueError(f"its format is {header['format']!r}, not {FORMAT}")
    words = tuple(map(str, header["words"]))
    if not len(words) == len(arrays["idf"]) == len(arrays["of_words"]):
        raise ValueError("it has different numbers of words and weights")
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
