"""Check that the files of a run file exist: model directory, prompts, lengths, measured profile."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from streamrl.hardware.calibration_file import named_calibration
from streamrl.hardware.cost_model import cost_model_digest
from streamrl.hardware.hugging_face import read_positions, weight_problems
from streamrl.record.assumed import assumed_of_model
from streamrl.runfile.cluster_config import ModelConfig
from streamrl.runfile.config import CostsConfig
from streamrl.runfile.errors import RunError
from streamrl.runfile.findings import Finding, Level
from streamrl.runfile.reading import read_json
from streamrl.runfile.workload_config import WorkloadConfig
from streamrl.workload.stated_lengths import DRAWN, described
from streamrl.workload.workload import RecordedGroups, load_source

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")
"""File names of a tokenizer's vocabulary that transformers reads; one of them is enough."""
USUAL_PROMPT = 400
"""Proposed tokens of a prompt if the run file has none, as `workload.lengths.prompt_tokens`."""


def find(
    model: ModelConfig, workload: WorkloadConfig, costs: CostsConfig, longest: int
) -> Iterator[Finding]:
    """Find missing files, and report those that exist; the longest sequence has `longest` tokens."""
    yield from _find_model(model, workload.max_prompt_tokens, longest)
    yield from _find_lengths(workload)
    if costs.profile is not None:
        yield _there(
            "costs.profile",
            Path(costs.profile),
            "streamrl profile MODEL -o PROFILE.toml writes one",
        )
    if costs.calibration is not None:
        yield _there(
            "costs.calibration",
            Path(costs.calibration),
            "streamrl calibrate RUN.toml MEASURED -o CALIBRATION.toml writes one",
        )
        yield from _find_outdated(costs.calibration, model)


def _find_outdated(named: str, model: ModelConfig) -> Iterator[Finding]:
    """Warn of a calibration whose factors belong to another version of the cost model."""
    try:
        calibration = named_calibration(named, model)
    except RunError:
        return  # it is missing, or simulations refuse it
    if calibration is not None and calibration.is_outdated:
        text = f"costs.calibration: {named} was fitted with cost model {calibration.cost_model}, and this one is {cost_model_digest()}"
        yield _finding("warning", "costs.calibration", text, "run `streamrl calibrate` again")


def _find_model(model: ModelConfig, max_prompt_tokens: int, longest: int) -> Iterator[Finding]:
    """Check the model's directory without loading anything."""
    if model.path is None:
        yield _finding(
            "ok",
            "model",
            f"model.name={model.name}: plan and simulate need no files, execute needs model.path",
        )
        return
    path = Path(model.path)
    config = _read_json(path / "config.json")
    if config is None:
        return  # without it there is no model at all, which `fix_profile_names` reports
    problems = list(weight_problems(path))
    if not any((path / name).is_file() for name in TOKENIZERS):
        problems.insert(0, "has no tokenizer (tokenizer.json)")
    if problems:
        yield _finding(
            "error",
            "model",
            f"model.path: {path} {', '.join(problems)}",
            "save model and tokenizer there with save_pretrained, weights as safetensors",
        )
    else:
        size = sum(file.stat().st_size for file in path.glob("*.safetensors"))
        text = f"model.path: {path} has config.json, a tokenizer and {size / 1e9:.3g} GB of safetensors"
        yield _finding("ok", "model", text)
    yield from _find_positions(path, max_prompt_tokens, longest)


def find_assumptions(model: ModelConfig, dtype: str | None) -> Iterator[Finding]:
    """Find what a simulation assumes about a model directory; `streamrl model show` lists it too."""
    for each in assumed_of_model(model, dtype):
        yield _finding("ok", "model-assumed", f"{each.key}: {each.text}")


def _find_positions(path: Path, max_prompt_tokens: int, longest: int) -> Iterator[Finding]:
    """Find sequences longer than the model's trained positions."""
    most = read_positions(path)
    if most is None or longest <= most:
        return
    room = most - max_prompt_tokens
    fix = f"set rollout.max_tokens={room}" if room > 0 else "lower workload.max_prompt_tokens"
    yield Finding(
        level="warning",
        topic="files",
        name="positions",
        text=f"workload.max_prompt_tokens + rollout.max_tokens = {longest:,}, but the model has "
        f"{most:,} positions (max_position_embeddings)",
        fix=fix,
        changes={"rollout.max_tokens": room} if room > 0 else {},
    )


def _find_lengths(workload: WorkloadConfig) -> Iterator[Finding]:
    lengths = workload.lengths
    if lengths is None:
        yield _finding(
            "warning",
            "lengths",
            "workload.lengths is missing: execute does not need it, plan and simulate do",
            "add [workload.lengths] kind = 'histogram', source = 'streamrl-codemath-20k', "
            f"prompt_tokens = {min(USUAL_PROMPT, workload.max_prompt_tokens)}",
        )
        return
    try:
        source = load_source(lengths)
    except ValueError as error:
        yield _finding(
            "error",
            "lengths",
            str(error),
            "name an existing file, or a profile of profiles/lengths",
        )
    else:
        text = f"workload.lengths: {lengths.kind} {lengths.source}"
        if not isinstance(source, RecordedGroups):
            drawn, _ = source.sample(np.random.default_rng(0), DRAWN, 1)
            scaled = np.maximum(1, np.rint(drawn * lengths.scale)).astype(np.int64)
            text += f": {described(scaled)}"
        yield _finding("ok", "lengths", text)
    if lengths.ranker_scores is not None:
        yield _there(
            "workload.lengths.ranker_scores",
            Path(lengths.ranker_scores),
            "name a CSV file with columns score and output_tokens",
        )


def _there(key: str, path: Path, otherwise: str) -> Finding:
    if path.is_file():
        return _finding("ok", key, f"{key}: {path}")
    return _finding("error", key, f"{key}: {path} does not exist", otherwise)


def _read_json(path: Path) -> dict[str, Any] | None:
    """Return the JSON object of a file; None if there is none."""
    try:
        found = read_json(path)
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _finding(level: Level, name: str, text: str, fix: str = "") -> Finding:
    return Finding(level=level, topic="files", name=name, text=text, fix=fix)
