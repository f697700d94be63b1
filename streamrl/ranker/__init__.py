"""Rank prompts by expected output length from their text: fit, evaluate on held-out prompts, save.

Read these files first:

- `text_ranker.py`: `TextRanker`: features, ridge regression and boosted trees, and its file.
- `evaluation.py`: recall and rank correlation of rankers on held-out prompts, with trivial rankers for comparison.
- `score_files.py`: read lengths and scores from CSV files and from directories of executed runs.

Rules:

- Lengths are fitted as logarithms of tokens. A score is higher for a longer expected output.
- Every figure is on prompts that the ranker was not fitted to.
- A figure of all families together makes a ranker look better that only distinguishes families. Compare by family.
- A ranker's file has only arrays and JSON, so that it cannot contain code.
- scikit-learn is needed to fit and to score. `import_text` raises an error that names the extra to install.
"""
