"""Read and write the profiles that `streamrl profile` measures, and check that a profile fits a run.

A profile has the seconds of one machine for one model, by operation. Every `seconds` is [lower quartile,
median, upper quartile] of the repeats. Tables:

| table    | one row is                                                                        |
|----------|-----------------------------------------------------------------------------------|
| decode   | a decode step of `running` rollouts with `context` tokens each                     |
| mixed    | a decode step of `running` rollouts with a mean of `context` and a maximum of `longest` tokens |
| prefill  | a pass that computes `rollouts` prefixes of `tokens` each, and nothing else        |
| join     | a pass that computes prefixes and one decode step, and the decode steps around it  |
| train    | a forward and backward pass over `rollouts` of `tokens` each                       |
| score    | a forward pass over the same                                                       |
| call     | overhead of a call of the trainer without its passes, for `tokens` of rollouts sent |
| optimizer, push, load | an optimizer step; weights out of the trainer; weights into a replica |
| lend, take_back | what a trainer and a replica take to change sides on a device, beside the load: one sleeps, and the other wakes up |
| sharing  | speeds of roles that compute at the same time on one host's cores, relative to alone; with `acting`, beside environments |
| reward   | a call that scores `rollouts` of `tokens` each with the reward model, with its transport |
| turnover | overhead of starting and ending a rollout in a replica, beyond its passes          |
| handling | CPU seconds for each rollout in the controller, the verifier and the server of a replica |
| episode | CPU seconds for each episode beyond a rollout, in the same: its environment starts and answers its last turn |
| action | CPU seconds for each other turn, in the same: an action, its observation, and the call of the next turn |
| serving | the same as turnover for rollouts whose calls arrive one by one, as those of turns do |
| environment_action | CPU seconds for each action in the environment's process |
| environment_start | CPU seconds for each start of an environment, in its process |
| handling_over_ray | the same with Ray actors, with the overhead of actors and of Ray's own processes |
| push_over_ray | a push in a run by relays that are Ray actors on the trainer's machine |
| relay    | encoding a push for the network, and decoding it at the other end |

With `lora_rank`, adapters were trained and pushed. They were merged unless the replica served them unmerged.
"""

from __future__ import annotations

import datetime
import hashlib
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
from msgspec.structs import asdict, replace

from streamrl.hardware.model_shape import ModelShape
from streamrl.hardware.profile_table import ProfileTable
from streamrl.hardware.profiles import load_model
from streamrl.runfile.backend_choice import engine_named
from streamrl.runfile.config import Run
from streamrl.runfile.errors import RunError
from streamrl.runfile.keys import pool_key
from streamrl.runfile.policies_config import SyncMode
from streamrl.runfile.reading import read_toml
from streamrl.runfile.result_files import write_file
from streamrl.runfile.roles_config import Packing, Recompute

DIGEST_LENGTH = 16  # hex digits: 64 bits, enough to exclude equal digests of different shapes

Seconds = tuple[float, float, float]
"""Lower quartile, median and upper quartile."""
Shares = Seconds
"""Lower quartile, median and upper quartile of shares."""


class MeasuredModel(ProfileTable, frozen=True, kw_only=True):
    """The measured model."""

    name: str
    num_parameters: int
    digest: str
    """Digest of its shape (`shape_digest`). Two directories with the same shape take the same seconds."""


class Host(ProfileTable, frozen=True, kw_only=True):
    """The machine that ran the measurement."""

    cpu: str
    cores: int
    threads: int
    """CPU threads of each worker process."""
    device: str
    """Name that the device reports; the CPU's name without a GPU."""


class DecodeRow(ProfileTable, frozen=True, kw_only=True):
    """One point of the decode step."""

    running: int
    context: float
    """Tokens of each running rollout, with its prompt."""
    seconds: Seconds


class MixedRow(ProfileTable, frozen=True, kw_only=True):
    """One point of the decode step with rollouts of different lengths."""

    running: int
    context: float
    """Mean tokens of a running rollout."""
    longest: float
    """Tokens of the longest one."""
    seconds: Seconds


class PrefillRow(ProfileTable, frozen=True, kw_only=True):
    """One forward pass of prefixes alone."""

    rollouts: int
    tokens: int
    """Tokens of each prefix."""
    seconds: Seconds


class JoinRow(ProfileTable, frozen=True, kw_only=True):
    """One forward pass that computed prefixes while other rollouts decoded."""

    rollouts: int
    tokens: int
    """Tokens of each prefix."""
    running: int
    """Rollouts that decoded."""
    context: float
    """Tokens of each of them."""
    step: Seconds
    """Seconds of the decode steps around it, which no rollout joined."""
    seconds: Seconds
    """Seconds of the whole pass."""


class PassRow(ProfileTable, frozen=True, kw_only=True):
    """One pass of the trainer."""

    rollouts: int
    tokens: int
    """Tokens of each rollout, prompt and output together."""
    seconds: Seconds


class CallRow(ProfileTable, frozen=True, kw_only=True):
    """The overhead of one call of the trainer, without its passes."""

    tokens: int
    """Tokens of the rollouts that the call sends, prompt and output together."""
    seconds: Seconds


class ModelOperation(ProfileTable, frozen=True, kw_only=True):
    """An operation whose size depends only on the model."""

    seconds: Seconds


class WeightTransfer(ProfileTable, frozen=True, kw_only=True):
    """An operation that moves weights or adapters."""

    bytes: int
    seconds: Seconds


class RelayRow(ProfileTable, frozen=True, kw_only=True):
    """The time of relays for one push to another machine, without the network."""

    mode: SyncMode
    bytes: int
    """Encoded bytes that the network would transfer."""
    values: int
    """Number of weights that these bytes encode."""
    encode: Seconds
    decode: Seconds
    """Includes checksums and writing."""


class SharingRow(ProfileTable, frozen=True, kw_only=True, omit_defaults=True):
    """The speeds of roles that compute at the same time, as shares of their speeds alone."""

    generating: int
    """Number of replicas that decode."""
    training: int = 0
    """Number of trainers that train at the same time: 0 or 1."""
    acting: float = 0.0
    """CPU seconds per second of environments that start and act at the same time, and of the process that calls them."""
    generation: Shares
    train: Shares | None = None
    """None without a trainer."""
    action: Shares | None = None
    """Speed of environments by the CPU seconds that they take, relative to those beside one replica; None without any."""


class MeasuredProfile(ProfileTable, frozen=True, kw_only=True):
    """A whole profile."""

    source: str
    """Who measured, and with which program."""
    date: datetime.date
    gpu: str
    """Name in profiles/gpus."""
    tensor_parallel: int
    dtype: str
    backend: str
    """Inference engine of the replica."""
    shares_prefixes: bool
    """Whether the prefix of a group was computed once for the whole group."""
    pads_context: bool
    """Whether the attention of a decode step takes as long as if every rollout had the length of the longest."""
    prefill_tokens: int
    """Maximum prefix tokens of a forward pass, on top of one token of every running rollout."""
    refill_passes: int
    """Number of forward passes between the end of a rollout and the first pass of the next one in the queue."""
    repeats: int
    pace: float | None = None
    """Total seconds of the timed passes, divided by their seconds at the medians (`mean_over_median`). A shared host has
    slow periods. None in profiles of earlier versions of this program."""
    packing: Packing = "padded"
    """Layout of rollouts in the trainer's passes. Earlier versions padded them."""
    recompute: Recompute = "none"
    """Activations that the trainer's passes recomputed."""
    lora_rank: int | None = None
    """Rank of the adapters that were trained and pushed; None if all weights were trained."""
    serves_adapters: bool = False
    """Whether the replica served the adapters unmerged."""
    model: MeasuredModel
    host: Host
    versions: dict[str, str]
    decode: list[DecodeRow]
    prefill: list[PrefillRow]
    join: list[JoinRow]
    train: list[PassRow]
    score: list[PassRow]
    call: list[CallRow]
    optimizer: ModelOperation
    push: WeightTransfer
    load: WeightTransfer
    mixed: tuple[MixedRow, ...] = ()
    """Empty without padded contexts, and in profiles of earlier versions. Then a step with padding is assumed to cost as
    much as if all rollouts had the length of the longest."""
    sharing: tuple[SharingRow, ...] = ()
    """Empty on GPUs, and in profiles of earlier versions."""
    relay: tuple[RelayRow, ...] = ()
    """Empty in profiles of earlier versions."""
    handling: ModelOperation | None = None
    """None in profiles of earlier versions."""
    action: ModelOperation | None = None
    environment_start: ModelOperation | None = None
    """Both None in profiles of earlier versions."""
    episode: ModelOperation | None = None
    """None in profiles of earlier versions, whose `action` is that of a start too."""
    serving: ModelOperation | None = None
    environment_action: ModelOperation | None = None
    """Both None in profiles of earlier versions, whose `action` includes them."""
    handling_over_ray: ModelOperation | None = None
    """None if Ray was not measured."""
    push_over_ray: ModelOperation | None = None
    """None if Ray was not measured, and in profiles of earlier versions."""
    turnover: ModelOperation | None = None
    """None in profiles of earlier versions."""
    lend: ModelOperation | None = None
    take_back: ModelOperation | None = None
    """Both None if the engine cannot sleep without a mode of its own, and in profiles of earlier versions."""
    reward: tuple[PassRow, ...] = ()
    """Empty without a reward model."""
    reward_model: MeasuredModel | None = None
    """The reward model of `reward`."""


ONCE = (
    *("optimizer", "push", "load", "turnover"),
    *("handling", "episode", "action", "serving", "environment_action", "environment_start"),
    *("handling_over_ray", "push_over_ray", "lend", "take_back"),
)
"""Tables of one row."""

NO_PASSES = ("name", "source", "num_draft_layers", "num_vision_parameters")
"""Fields of a shape that change no measured pass."""


LATER_FIELDS = {
    *("values_dim", "has_value_projection", "window_heads", "qk_norm_spans_heads", "has_gated_mlp"),
    *("num_unmixed_layers", "num_bare_layers", "indexer", "kind", "has_gate", "latent_size"),
    *("has_head_gates", "has_mlp_bias", "is_parallel", "has_wide_gate", "block_size"),
    *("layer_inputs", "num_shared_full", "num_shared_windowed"),
}
"""Fields that shapes did not have when the first profiles were measured. A digest has them only if they are set."""


def _stated(table: msgspec.Struct) -> dict[str, Any]:
    """Return the fields of a table, without later ones at their default."""
    fields = {each.name: each.default for each in msgspec.structs.fields(table)}
    stated = {}
    for name, default in fields.items():
        value = getattr(table, name)
        if name in LATER_FIELDS and value == default:
            continue
        stated[name] = _stated(value) if isinstance(value, msgspec.Struct) else value
    return stated


def shape_digest(shape: ModelShape) -> str:
    """Return a digest of what a shape computes, without its name."""
    facts = _stated(shape)
    numbers = {key: value for key, value in facts.items() if key not in NO_PASSES}
    encoded = msgspec.json.encode(numbers, order="deterministic")
    return hashlib.sha256(encoded).hexdigest()[:DIGEST_LENGTH]


def read_measured(path: Path) -> MeasuredProfile:
    """Return the measured profile in a file.

    Raises:
        ValueError: the file is not a valid profile. The text has the file, table, row (from 1) and key.
    """
    try:
        table = read_toml(path)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not a TOML file: {error}") from None
    try:
        profile = msgspec.convert(table, MeasuredProfile)
    except msgspec.ValidationError as error:
        raise ValueError(f"{path}: {_reword(str(error))}") from None
    for problem in find_problems(profile):
        raise ValueError(f"{path}: {problem}")
    return profile


def find_problems(profile: MeasuredProfile) -> Iterator[str]:
    """Yield a text with table, row and key for each value that no measurement can have."""
    for key in ("source", "gpu", "dtype", "backend"):
        if not getattr(profile, key).strip():
            yield f"{key} is empty"
    for key in ("tensor_parallel", "prefill_tokens", "repeats"):
        if getattr(profile, key) < 1:
            yield f"{key} must be at least 1, got {getattr(profile, key)}"
    if profile.pace is not None and not (math.isfinite(profile.pace) and profile.pace > 0):
        yield f"pace must be positive and finite, got {profile.pace}"
    if profile.lora_rank is not None and profile.lora_rank < 1:
        yield f"lora_rank must be at least 1, got {profile.lora_rank}"
    if (profile.lora_rank is None) == any(row.mode == "lora" for row in profile.relay):
        yield "lora_rank and a row of relay with mode lora must both be there, or neither"
    for number, relay in enumerate(profile.relay, start=1):
        yield from _relay_problems(f"relay row {number}", relay)
    if profile.refill_passes < 0:
        yield f"refill_passes must be 0 or more, got {profile.refill_passes}"
    for name in ("decode", "prefill", "join", "train", "score", "call"):
        rows = getattr(profile, name)
        if not rows:
            yield f"{name} has no rows"
        for number, row in enumerate(rows, start=1):
            yield from _row_problems(f"{name} row {number}", row)
    for name in ONCE:
        if (once := getattr(profile, name)) is not None:
            yield from _row_problems(name, once)
    for number, mixed in enumerate(profile.mixed, start=1):
        yield from _row_problems(f"mixed row {number}", mixed)
        if mixed.longest < mixed.context:
            yield f"mixed row {number}: longest must be at least context={mixed.context}, got {mixed.longest}"
    for number, call in enumerate(profile.reward, start=1):
        yield from _row_problems(f"reward row {number}", call)
    if bool(profile.reward) != (profile.reward_model is not None):
        yield "reward and reward_model must both be there, or neither"
    for number, shared in enumerate(profile.sharing, start=1):
        yield from _sharing_problems(f"sharing row {number}", shared, profile.host.cores)


def _relay_problems(where: str, row: RelayRow) -> Iterator[str]:
    for key in ("bytes", "values"):
        if getattr(row, key) < 0:
            yield f"{where}: {key} must be 0 or more, got {getattr(row, key)}"
    for key in ("encode", "decode"):
        yield from _seconds_problems(f"{where}: {key}", getattr(row, key), may_be_zero=True)


def _sharing_problems(where: str, row: SharingRow, cores: int) -> Iterator[str]:
    if row.generating < 1:
        yield f"{where}: generating must be at least 1, got {row.generating}"
    if row.training not in (0, 1):
        yield f"{where}: training must be 0 or 1, got {row.training}"
    elif (row.train is None) == bool(row.training):
        yield f"{where}: train must be there if training is 1, and only then"
    if not 0 <= row.acting < cores:
        yield f"{where}: acting must be at least 0 and below host.cores={cores}, got {row.acting}"
    elif (row.action is None) == bool(row.acting):
        yield f"{where}: action must be there if acting is positive, and only then"
    yield from _seconds_problems(f"{where}: generation", row.generation)
    for key in ("train", "action"):
        if (shares := getattr(row, key)) is not None:
            yield from _seconds_problems(f"{where}: {key}", shares)


def _row_problems(where: str, row: ProfileTable) -> Iterator[str]:
    for key in row.__struct_fields__:
        value = getattr(row, key)
        if isinstance(value, tuple):
            yield from _seconds_problems(f"{where}: {key}", value)
        elif not (math.isfinite(value) and value > 0):
            yield f"{where}: {key} must be positive and finite, got {value}"


def _seconds_problems(where: str, seconds: Seconds, *, may_be_zero: bool = False) -> Iterator[str]:
    if not all(math.isfinite(value) and value >= 0 for value in seconds) or (
        0 in seconds and not may_be_zero
    ):
        least = "0 or more" if may_be_zero else "positive"
        yield f"{where} must be {least} and finite, got {list(seconds)}"
    elif list(seconds) != sorted(seconds):
        yield f"{where} must be quartiles in rising order, got {list(seconds)}"


def _reword(error: str) -> str:
    """Return a msgspec error with `decode row 3: seconds` in place of `$.decode[2].seconds`."""
    what, _, path = error.partition(" - at `$")
    parts = path.rstrip("`").lstrip(".")
    for index in re.findall(r"\[(\d+)\]", parts)[:1]:
        parts = parts.replace(f"[{index}]", f" row {int(index) + 1}", 1)
    where = parts.replace(".", ": ", 1) if " row " in parts else parts
    return f"{where}: {what}" if where else what


def write_measured(profile: MeasuredProfile, path: Path) -> None:
    """Write a profile as TOML: first the facts, then the rows with one line each, then the tables."""
    whole: dict[str, Any] = msgspec.to_builtins(profile, builtin_types=(datetime.date,))
    facts = {key: value for key, value in whole.items() if value is not None}
    tables = {key: value for key, value in facts.items() if isinstance(value, dict)}
    lines = [f"{key} = {_toml(value)}" for key, value in facts.items() if key not in tables]
    for key, table in tables.items():
        lines += ["", f"[{key}]", *(f"{name} = {_toml(value)}" for name, value in table.items())]
    write_file(path, "\n".join(lines) + "\n")


def _toml(value: object) -> str:
    match value:
        case bool():
            return str(value).lower()
        case float():
            return repr(float(f"{value:.6g}"))
        case [dict(), *_]:
            return "".join(["[\n", *(f"  {_toml(row)},\n" for row in value), "]"])
        case list() | tuple():
            return f"[{', '.join(map(_toml, value))}]"
        case dict():
            return f"{{ {', '.join(f'{key} = {_toml(inner)}' for key, inner in value.items())} }}"
        case str():
            return msgspec.json.encode(value).decode()
        case _:
            return str(value)


def check_fits(profile: MeasuredProfile, run: Run, path: Path) -> None:
    """Raise `RunError` with the run file's key if the profile was measured with other settings than the run has."""
    shape = load_model(run.model)
    model_key = "model.name" if run.model.path is None else "model.path"
    pools, rollout, trainer = run.cluster.pools, run.rollout, run.trainer
    # vLLM's prefixes were measured one by one, so the profile fits with and without shared prefixes
    shares = (
        run.shares_prefixes
        if engine_named(profile.backend).shares_prefixes
        else profile.shares_prefixes
    )
    ours = (
        (pool_key(rollout.pool, "gpu"), pools[rollout.pool].gpu, profile.gpu),
        (pool_key(trainer.pool, "gpu"), pools[trainer.pool].gpu, profile.gpu),
        ("model.dtype", run.model.dtype, profile.dtype),
        ("rollout.dtype", rollout.dtype or profile.dtype, profile.dtype),
        ("rollout.kv_dtype", rollout.kv_dtype or profile.dtype, profile.dtype),
        ("trainer.dtype", trainer.dtype or profile.dtype, profile.dtype),
        ("rollout.backend", rollout.backend, profile.backend),
        ("rollout.tensor_parallel", rollout.tensor_parallel, profile.tensor_parallel),
        ("rollout.speculative", rollout.drafts, None),
        ("rollout.shares_prefixes", run.shares_prefixes, shares),
        ("trainer GPUs", trainer.num_gpus, 1),
    )
    if shape_digest(shape) != profile.model.digest:
        text = (
            f"costs.profile: {path} was measured for {profile.model.name} "
            f"({profile.model.num_parameters} parameters), but {model_key} has the shape of "
            f"{shape.name} ({shape.num_parameters} parameters)"
        )
        raise RunError("costs.profile", str(path), None, text, (model_key,))
    for key, value, measured in ours:
        if value != measured:
            text = f"costs.profile: {path} was measured with {key} {measured!r}, but here it is {value!r}"
            raise RunError("costs.profile", str(path), None, text)
    if profile.lora_rank is not None and run.sync.mode != "lora":
        text = (
            f"costs.profile: {path} was measured with adapters of rank {profile.lora_rank}, "
            f"but sync.mode is {run.sync.mode!r}"
        )
        raise RunError("costs.profile", str(path), None, text, ("sync.mode",))
    if profile.lora_rank is not None and run.algorithm.has_critic:
        text = (
            f"costs.profile: {path} was measured with adapters of rank {profile.lora_rank}, "
            f"but a critic of algorithm.name {run.algorithm.name!r} trains all its weights"
        )
        raise RunError("costs.profile", str(path), None, text, ("algorithm.name",))


TIMED = (
    "decode",
    "mixed",
    "prefill",
    "join",
    "train",
    "score",
    "reward",
    "call",
    "optimizer",
    "push",
    "load",
    "relay",
    "turnover",
    "handling",
    "episode",
    "action",
    "serving",
    "environment_action",
    "environment_start",
    "handling_over_ray",
    "push_over_ray",
    "lend",
    "take_back",
)
"""Tables of seconds that `scaled_to_mean_speed` scales. `turnover` is one of them, although each of its measurements lasts
a second: slow periods last several seconds, so its median excludes them too."""


def mean_over_median(readings: Iterable[Mapping[Any, Sequence[float]]]) -> float:
    """Return the total seconds of all readings, divided by their total at the medians of their points.

    A shared host has slow periods, which medians exclude. The readings of one point are too few to measure
    how frequent these are, but all readings together are enough. The first reading of each point is left
    out, because it loads code and data that later readings reuse.

    Args:
        readings: for each operation, the seconds by point.
    """
    points = [seconds for table in readings for seconds in table.values() if len(seconds) > 1]
    usual = sum((len(seconds) - 1) * median(seconds) for seconds in points)
    return sum(sum(seconds[1:]) for seconds in points) / usual if usual else 1.0


def scaled_to_mean_speed(profile: MeasuredProfile) -> MeasuredProfile:
    """Return a profile with its seconds scaled to the machine's mean speed; the same profile if `pace` is None."""
    if profile.pace is None:
        return profile
    tables = {name: _scaled(getattr(profile, name), profile.pace) for name in TIMED}
    scaled: MeasuredProfile = replace(profile, pace=1.0, **tables)
    return scaled


def _scaled(table: Any, pace: float) -> Any:
    """Return a row or rows with all seconds multiplied by `pace`; None for a missing table."""
    if table is None:
        return None
    if not isinstance(table, ProfileTable):
        return type(table)(_scaled(row, pace) for row in table)
    seconds = {key: value for key, value in asdict(table).items() if isinstance(value, tuple)}
    longer = {key: tuple(pace * one for one in value) for key, value in seconds.items()}
    return replace(table, **longer)
