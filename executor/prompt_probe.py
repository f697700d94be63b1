"""Predict output lengths of prompts with a linear probe on the activations of a language model.

The model is any Hugging Face directory, for example the policy itself. It reads each prompt once before the run. The
features are activations of one layer: at the last token, and their mean. Ridge regression predicts log lengths from
them. Leave-one-out error selects its penalty.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from streamrl.runfile.reading import DAMAGE_OF_ARRAYS
from streamrl.runfile.result_files import replacing

Floats = npt.NDArray[np.float64]

DEPTH = 2 / 3
"""Relative depth of the layer that is read. Later layers encode the next token, earlier ones the last words."""
PENALTIES = 10.0 ** np.arange(-1, 6)
TOKENS_PER_BATCH = 16_384
MOST_TOKENS = 4096  # only the last tokens of a longer prompt are read
LEAST_PROMPTS = 10

Watch = Callable[[int, int], None]
"""Called with the number of prompts read so far and the total."""


@dataclass(frozen=True)
class PromptProbe:
    """Predicts output tokens of prompts from a model's activations."""

    model: str
    """Directory of the model."""
    means: Floats
    spreads: Floats
    weights: Floats
    intercept: float

    def score(self, texts: Sequence[str], watch: Watch = lambda done, most: None) -> Floats:
        """Return the expected output tokens of prompts."""
        read = (read_activations(self.model, texts, watch) - self.means) / self.spreads
        lengths: Floats = np.exp(self.intercept + read @ self.weights)
        return lengths


def fit_probe(
    model: str, texts: Sequence[str], lengths: Floats, watch: Watch = lambda done, most: None
) -> PromptProbe:
    """Fit a probe of a model to prompts and their mean log tokens.

    Raises:
        ValueError: there are too few prompts, or the directory has no model.
    """
    if len(texts) < LEAST_PROMPTS:
        raise ValueError(
            f"a probe needs at least {LEAST_PROMPTS} prompts to be fitted to, got {len(texts)}"
        )
    read = read_activations(model, texts, watch)
    means, spreads = read.mean(axis=0), read.std(axis=0)
    spreads[spreads == 0] = 1.0
    weights = ridge((read - means) / spreads, lengths - lengths.mean())
    return PromptProbe(model, means, spreads, weights, float(lengths.mean()))


def ridge(columns: Floats, targets: Floats) -> Floats:
    """Return ridge weights with the penalty of the least leave-one-out error (Golub et al. 1979)."""
    left, scales, right = np.linalg.svd(columns, full_matrices=False)
    along = left.T @ targets
    best: tuple[float, Floats] | None = None
    for penalty in PENALTIES:
        shrunk = scales**2 / (scales**2 + penalty)
        rest = targets - left @ (shrunk * along)
        own = 1 - (left**2 @ shrunk) - 1 / len(targets)  # the mean is fitted too
        error = float(np.mean((rest / np.maximum(own, 1e-6)) ** 2))
        if best is None or error < best[0]:
            best = error, right.T @ (scales / (scales**2 + penalty) * along)
    assert best is not None, "there are penalties"
    return best[1]


def read_activations(
    model: str, texts: Sequence[str], watch: Watch = lambda done, most: None
) -> Floats:
    """Return the activations of each prompt at its last token and their mean [prompts, 2 hidden].

    Raises:
        ValueError: the directory has no model that can be loaded.
    """
    import torch

    network, tokenizer = _load(model)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    network.to(device).eval()
    ids = [tokenizer.encode(text)[-MOST_TOKENS:] or [0] for text in texts]
    order = sorted(range(len(ids)), key=lambda index: len(ids[index]))
    found: dict[int, Floats] = {}
    with torch.inference_mode():
        for batch in _batches(order, ids):
            width = len(ids[batch[-1]])
            padded = torch.tensor([ids[i] + [0] * (width - len(ids[i])) for i in batch]).to(device)
            mask = torch.tensor(
                [[1] * len(ids[i]) + [0] * (width - len(ids[i])) for i in batch]
            ).to(device)
            layers = network(
                input_ids=padded, attention_mask=mask, output_hidden_states=True
            ).hidden_states
            hidden = layers[round(DEPTH * (len(layers) - 1))].float()
            last = hidden[torch.arange(len(batch)), mask.sum(1) - 1]
            mean = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
            rows = torch.cat([last, mean], dim=1).double().cpu().numpy()
            found.update(zip(batch, rows, strict=True))
            watch(len(found), len(ids))
    return np.array([found[index] for index in range(len(ids))])


def _load(model: str) -> tuple[Any, Any]:
    from transformers import AutoModel, AutoTokenizer

    if not (Path(model) / "config.json").is_file():
        raise ValueError(f"--lm {model}: no model directory: it has no config.json")
    try:
        return AutoModel.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"--lm {model}: {str(error).splitlines()[0]}") from None


def _batches(order: Sequence[int], ids: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return prompts in order of length, in batches of at most `TOKENS_PER_BATCH` tokens with padding."""
    found: list[list[int]] = []
    for index in order:
        if not found or (len(found[-1]) + 1) * len(ids[index]) > TOKENS_PER_BATCH:
            found.append([])
        found[-1].append(index)
    return found


ARRAYS = ("means", "spreads", "weights")


def write_probe(path: Path, probe: PromptProbe) -> None:
    """Write a probe as numpy arrays, which cannot contain code."""
    arrays = {name: getattr(probe, name) for name in ARRAYS}
    with replacing(path) as partial, partial.open("wb") as file:
        np.savez_compressed(
            file, probe_of=np.array(probe.model), intercept=np.array(probe.intercept), **arrays
        )


def read_probe(path: Path) -> PromptProbe | None:
    """Return the probe in a file, or None if the file has another kind of ranker or is invalid.

    The reader of text rankers reports an invalid file.
    """
    try:
        with np.load(path, allow_pickle=False) as arrays:
            if "probe_of" not in arrays.files:
                return None
            own = {name: arrays[name] for name in ARRAYS}
            return PromptProbe(str(arrays["probe_of"]), intercept=float(arrays["intercept"]), **own)
    except (OSError, *DAMAGE_OF_ARRAYS):
        return None
