"""Boosted regression trees as arrays: scikit-learn grows them, numpy asks them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

NUM_TREES, DEPTH, RATE, SHARE = 200, 3, 0.05, 0.7
"""Small steps of shallow trees on part of the prompts each: the usual remedy against few examples (Friedman 2002)."""
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
        columns = columns.astype(np.float32)  # as scikit-learn compares them
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
    """Grow trees; return what they start from and the trees."""
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
