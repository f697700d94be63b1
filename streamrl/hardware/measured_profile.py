"""A profile that `streamrl profile` measured: read and write it, check that it fits a run, and scale it to the machine's mean speed.

A measured profile: what one machine took for one model, operation by operation, as `streamrl profile` writes it.

Every `seconds` is [lower quartile, median, upper quartile] of the repeats. Tables and their units:

| table    | one row is                                                                        |
|----------|-----------------------------------------------------------------------------------|
| decode   | a decode step of `running` rollouts with `context` tokens each                     |
| mixed    | a decode step of `running` rollouts of `context` tokens on average, `longest` at most |
| prefill  | a pass that computes `rollouts` prefixes of `tokens` each, and nothing else        |
| join     | the same beside a decode step, and the decode steps around it alone                |
| train    | a forward and backward pass over `rollouts` of `tokens` each                       |
| score    | a forward pass over the same                                                       |
| call     | what a call of the trainer takes beside its passes, for `tokens` of rollouts sent  |
| optimizer, push, load | an optimizer step; weights out of the trainer; weights into a replica |
| sharing  | speeds of roles that compute at the same time on one host's cores, as shares of those alone |
| reward   | a call of the reward model's replica that scores `rollouts` of `tokens` each, the way there and back included |
| turnover | what a rollout's coming and going adds to a replica's passes, beyond what the tables say of them |
| handling | CPU seconds that a rollout takes of the process that decides, of the verifier and of what serves calls in replicas |
| handling_over_ray | the same where roles are actors: Ray's own processes too, and what actors take beyond their roles |
| push_over_ray | a push by relays that are actors on the trainer's machine, in a run |
| relay | what relays took to make what is sent of a push, and weights of what arrived |

With `lora_rank` it is adapters that were trained and pushed, and merged where the replica did not compute with them.
"""

from __future__ import annotations

import datetime
import hashlib
import math
import re
import tomllib
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
from streamrl.runfile.roles_config import Packing, Recompute

DIGEST_LENGTH = 16  # hex digits: chance never makes two shapes alike

Seconds = tuple[float, float, float]
"""Lower quartile, median and upper quartile."""
Shares = Seconds
"""The same of shares."""


class MeasuredModel(ProfileTable, frozen=True, kw_only=True):
    """Which model was measured."""

    name: str
    num_parameters: int
    digest: str
    """Of the shape, see `shape_digest`: two directories with one shape take the same seconds."""


class Host(ProfileTable, frozen=True, kw_only=True):
    """Where it ran."""

    cpu: str
    cores: int
    threads: int
    """CPU threads of each worker process."""
    device: str
    """What the device calls itself; the CPU's name where there is no GPU."""


class DecodeRow(ProfileTable, frozen=True, kw_only=True):
    """One point of the decode step."""

    running: int
    context: float
    """Tokens of each running rollout, prompt included."""
    seconds: Seconds


class MixedRow(ProfileTable, frozen=True, kw_only=True):
    """One point of the decode step where rollouts differ in length."""

    running: int
    context: float
    """Tokens of a running rollout, on average."""
    longest: float
    """Tokens of the longest."""
    seconds: Seconds


class PrefillRow(ProfileTable, frozen=True, kw_only=True):
    """One forward pass of prefixes alone."""

    rollouts: int
    tokens: int
    """Of each prefix."""
    seconds: Seconds


class JoinRow(ProfileTable, frozen=True, kw_only=True):
    """One forward pass that computed prefixes while other rollouts decoded."""

    rollouts: int
    tokens: int
    """Of each prefix."""
    running: int
    """Rollouts that decoded."""
    context: float
    """Tokens of each of them."""
    step: Seconds
    """Of the decode steps around it, in which nothing joined."""
    seconds: Seconds
    """Of the whole pass."""


class PassRow(ProfileTable, frozen=True, kw_only=True):
    """One pass of the trainer."""

    rollouts: int
    tokens: int
    """Of each rollout, prompt and output together."""
    seconds: Seconds


class CallRow(ProfileTable, frozen=True, kw_only=True):
    """What one call of the trainer takes beside its passes."""

    tokens: int
    """Of the rollouts that the call sends, prompt and output together."""
    seconds: Seconds


class ModelOperation(ProfileTable, frozen=True, kw_only=True):
    """An operation whose size is the model's."""

    seconds: Seconds


class WeightTransfer(ProfileTable, frozen=True, kw_only=True):
    """An operation that moves weights, or adapters out of the trainer."""

    bytes: int
    seconds: Seconds


class RelayRow(ProfileTable, frozen=True, kw_only=True):
    """What relays took to bring a push to another place, the network left out."""

    mode: SyncMode
    bytes: int
    """Of what would have crossed it."""
    values: int
    """How many of the weights that tells of."""
    encode: Seconds
    decode: Seconds
    """Checking and writing included."""


class SharingRow(ProfileTable, frozen=True, kw_only=True, omit_defaults=True):
    """What is left of the speeds of roles that compute at the same time, in shares of their speeds alone."""

    generating: int
    """Replicas that decode."""
    training: int = 0
    """Trainers that train beside them: one, or none."""
    generation: Shares
    train: Shares | None = None
    """None where nobody trains."""


class MeasuredProfile(ProfileTable, frozen=True, kw_only=True):
    """A whole profile."""

    source: str
    """Who measured, with what."""
    date: datetime.date
    gpu: str
    """Name in profiles/gpus."""
    tensor_parallel: int
    dtype: str
    backend: str
    """Of the replica."""
    shares_prefixes: bool
    """Whether the prefix of a group was computed once for all of it."""
    pads_context: bool
    """Whether attention of a decode step takes as long as if every rollout were as long as the longest."""
    prefill_tokens: int
    """Prefix tokens that a forward pass takes beside one token of every rollout that may run."""
    refill_passes: int
    """Forward passes from the end of a rollout to the one that the next in the queue joins."""
    repeats: int
    pace: float | None = None
    """What passes took that were timed over what they would at the medians: a shared host is slower in spells. None where
    an earlier version measured."""
    packing: Packing = "padded"
    """How rollouts lay in the trainer's passes; an earlier version padded them."""
    recompute: Recompute = "none"
    """What the trainer's passes computed again."""
    lora_rank: int | None = None
    """Of the adapters that were trained and pushed; None where all weights were."""
    serves_adapters: bool = False
    """Whether the replica computed with these beside its weights, not with weights that they were merged in."""
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
    """Empty where contexts are not padded, or an earlier version measured: then a step that pads costs what it would
    if all were as long as the longest."""
    sharing: tuple[SharingRow, ...] = ()
    """Empty where it was not measured: on GPUs, or by an earlier version."""
    relay: tuple[RelayRow, ...] = ()
    """Empty where an earlier version measured."""
    handling: ModelOperation | None = None
    """None in the same cases."""
    handling_over_ray: ModelOperation | None = None
    """The same where roles are actors of a Ray cluster; None where that was not measured."""
    push_over_ray: ModelOperation | None = None
    """None in the same cases, or where an earlier version measured."""
    turnover: ModelOperation | None = None
    """None where an earlier version measured."""
    reward: tuple[PassRow, ...] = ()
    """Empty where no reward model was measured."""
    reward_model: MeasuredModel | None = None
    """Whose calls those of `reward` are."""


ONCE = (
    *("optimizer", "push", "load", "turnover"),
    *("handling", "handling_over_ray", "push_over_ray"),
)
"""Tables of one row."""

NO_PASSES = ("name", "source", "num_draft_layers")
"""What of a shape changes no pass that was measured."""


def shape_digest(shape: ModelShape) -> str:
    """Tell shapes apart by what they compute, not by what they are called."""
    facts = msgspec.to_builtins(shape)
    numbers = {key: value for key, value in facts.items() if key not in NO_PASSES}
    encoded = msgspec.json.encode(numbers, order="deterministic")
    return hashlib.sha256(encoded).hexdigest()[:DIGEST_LENGTH]


def read_measured(path: Path) -> MeasuredProfile:
    """Read a measured profile.

    Raises:
        ValueError: naming the file, the table, the row (from 1) and the key that is wrong.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not a TOML file: {error}") from None
    try:
        profile = msgspec.convert(table, MeasuredProfile)
    except msgspec.ValidationError as error:
        raise ValueError(f"{path}: {_say(str(error))}") from None
    for problem in find_problems(profile):
        raise ValueError(f"{path}: {problem}")
    return profile


def find_problems(profile: MeasuredProfile) -> Iterator[str]:
    """Yield what no measurement can be, each with table, row and key."""
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
        yield from _sharing_problems(f"sharing row {number}", shared)


def _relay_problems(where: str, row: RelayRow) -> Iterator[str]:
    for key in ("bytes", "values"):
        if getattr(row, key) < 0:
            yield f"{where}: {key} must be 0 or more, got {getattr(row, key)}"
    for key in ("encode", "decode"):
        yield from _seconds_problems(f"{where}: {key}", getattr(row, key), may_be_zero=True)


def _sharing_problems(where: str, row: SharingRow) -> Iterator[str]:
    if row.generating < 1:
        yield f"{where}: generating must be at least 1, got {row.generating}"
    if row.training not in (0, 1):
        yield f"{where}: training must be 0 or 1, got {row.training}"
    elif (row.train is None) == bool(row.training):
        yield f"{where}: train must be there if training is 1, and only then"
    yield from _seconds_problems(f"{where}: generation", row.generation)
    if row.train is not None:
        yield from _seconds_problems(f"{where}: train", row.train)


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


def _say(error: str) -> str:
    """Put msgspec's words in ours: `decode row 3: seconds`, not `$.decode[2].seconds`."""
    what, _, path = error.partition(" - at `$")
    parts = path.rstrip("`").lstrip(".")
    for index in re.findall(r"\[(\d+)\]", parts)[:1]:
        parts = parts.replace(f"[{index}]", f" row {int(index) + 1}", 1)
    where = parts.replace(".", ": ", 1) if " row " in parts else parts
    return f"{where}: {what}" if where else what


def write_measured(profile: MeasuredProfile, path: Path) -> None:
    """Write a profile as TOML: facts, then rows, a line each, then the tables."""
    whole: dict[str, Any] = msgspec.to_builtins(profile, builtin_types=(datetime.date,))
    facts = {key: value for key, value in whole.items() if value is not None}
    tables = {key: value for key, value in facts.items() if isinstance(value, dict)}
    lines = [f"{key} = {_toml(value)}" for key, value in facts.items() if key not in tables]
    for key, table in tables.items():
        lines += ["", f"[{key}]", *(f"{name} = {_toml(value)}" for name, value in table.items())]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


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
    """Raise `RunError` where the profile is of something else than the run, with the run's key."""
    shape = load_model(run.model)
    model_key = "model.name" if run.model.path is None else "model.path"
    pools, rollout, trainer = run.cluster.pools, run.rollout, run.trainer
    # vLLM's prefixes were measured one by one, and one for a whole group is one of those
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
    "handling_over_ray",
    "push_over_ray",
)
"""Tables of seconds. Streams, which `turnover` is of, last a second and spells several: their median has the usual pace too."""


def mean_over_median(readings: Iterable[Mapping[Any, Sequence[float]]]) -> float:
    """Return what all readings took over what they would have at the medians of their points.

    A host that others use as well is slower in spells, which medians leave out; readings of one point are too few to say
    how often, all of them together are not. The first reading of a point is left out: it loads what no later one does.

    Args:
        readings: seconds by point, of each operation.
    """
    points = [seconds for table in readings for seconds in table.values() if len(seconds) > 1]
    usual = sum((len(seconds) - 1) * median(seconds) for seconds in points)
    return sum(sum(seconds[1:]) for seconds in points) / usual if usual else 1.0


def scaled_to_mean_speed(profile: MeasuredProfile) -> MeasuredProfile:
    """Return a profile whose seconds are those of the machine's mean pace; as it is where that was not measured."""
    if profile.pace is None:
        return profile
    tables = {name: _scaled(getattr(profile, name), profile.pace) for name in TIMED}
    found: MeasuredProfile = replace(profile, pace=1.0, **tables)
    return found


def _scaled(table: Any, pace: float) -> Any:
    """Return a row, or rows, with all that is in seconds so many times as long; None of what was not measured."""
    if table is None:
        return None
    if not isinstance(table, ProfileTable):
        return type(table)(_scaled(row, pace) for row in table)
    seconds = {key: value for key, value in asdict(table).items() if isinstance(value, tuple)}
    longer = {key: tuple(pace * one for one in value) for key, value in seconds.items()}
    return replace(table, **longer)
