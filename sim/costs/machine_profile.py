"""Load the costs of a run from a profile that was measured for its model on its machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path

from streamrl.hardware.measured_profile import (
    MeasuredProfile,
    ModelOperation,
    check_fits,
    read_measured,
    scaled_to_mean_speed,
)
from streamrl.hardware.memory import most_running
from streamrl.hardware.parallelism import threads_per_role
from streamrl.hardware.profile_fit import (
    MEDIAN,
    PassFit,
    fit_decode,
    fit_line,
    fit_padded_share,
    fit_passes,
    fit_prefill,
)
from streamrl.hardware.resolved import ResolvedRun, TrainerHardware
from streamrl.hardware.tiers import Provenance
from streamrl.runfile.cluster_config import LinkConfig
from streamrl.runfile.errors import RunError
from streamrl.runfile.policies_config import SyncConfig
from streamrl.runfile.roles_config import Packing
from streamrl.sim.costs.corrections import Corrections, own_step_time
from streamrl.sim.costs.cpu_contention import CoreSharing
from streamrl.sim.costs.curves import DecodeCurve
from streamrl.sim.costs.training.pipeline import SerialSchedule, TrainerSchedule
from streamrl.sim.costs.weight_sync import Payload, SyncCosts, link_hop, sending_time


@dataclass(frozen=True)
class MeasuredPrefill:
    """Seconds that prefixes add to a pass, plus the work to start and end rollouts."""

    fit: PassFit
    turnover: float
    """Seconds for starting and ending a rollout, all counted when it starts."""
    provenance: Provenance

    def time(
        self, num_tokens: int, context_pairs: float, num_running: int, num_rollouts: int
    ) -> float:
        """Return the seconds in addition to `num_running` decoding rollouts; without those, of the whole pass."""
        added = self.fit.added_time(num_rollouts, num_tokens, context_pairs)
        added += self.turnover * num_rollouts
        return added if num_running else added + self.fit.alone


@dataclass(frozen=True, kw_only=True)
class MeasuredTraining:
    """Seconds of a trainer that fills its passes as `executor` does, call by call."""

    train: PassFit
    score: PassFit
    call: tuple[float, float]
    """Seconds of a call of the trainer, and of each token that it sends."""
    optimizer_time: float
    num_scored: int
    """Models that score rollouts before training."""
    num_trained: int
    """Models that a step updates. A critic costs as much as the actor, although its last layer has
    one output.
    """
    informative_share: float
    """Share of rollouts that the passes compute; the others are sent and skipped."""
    trained_group_share: float
    """Share of groups with at least one computed rollout."""
    group_size: int
    max_tokens_per_pass: int
    packing: Packing

    overhead_time: float = 0.0
    """Further seconds per step, if the run file sets them; measured calls already include all
    their work.
    """

    def line(self) -> TrainerSchedule:
        """Return an empty schedule of the trainer's passes; one GPU has no pipeline."""
        return SerialSchedule(self.score_time, self.train_time)

    def train_time(self, lengths: Sequence[int]) -> float:
        """Return the seconds of forward and backward passes over rollouts (prompt + output tokens)."""
        return self._call_time(lengths) + self.num_trained * self._computed(self.train, lengths)

    def score_time(self, lengths: Sequence[int]) -> float:
        """Return the seconds of the scoring passes over rollouts (prompt + output tokens)."""
        return self._call_time(lengths) + self.num_scored * self._computed(self.score, lengths)

    def _call_time(self, lengths: Sequence[int]) -> float:
        fixed, per_token = self.call
        return fixed + per_token * sum(lengths)

    def _computed(self, one: PassFit, lengths: Sequence[int]) -> float:
        """Return the seconds of passes over the computed rollouts; 0 if no group has any."""
        each = passes(lengths, self.max_tokens_per_pass, self.packing)
        share = self.informative_share
        any_taught = 1 - (1 - self.trained_group_share) ** ceil(len(lengths) / self.group_size)
        alone = max(share * len(each), any_taught if share else 0.0)
        return alone * one.alone + share * sum(one.added_time(*size) for size in each)


def passes(
    lengths: Sequence[int], max_tokens: int, packing: Packing
) -> list[tuple[int, int, float]]:
    """Return (rollouts, tokens, pairs of tokens) of each pass: longest first, up to `max_tokens` per pass.

    Padded rollouts count with the length of the longest one in their pass.
    """
    found: list[tuple[int, int, float]] = []
    longest = 0
    for length in sorted(lengths, reverse=True):
        count, tokens, pairs = found[-1] if found else (0, 0, 0.0)
        taken = length if packing == "packed" or not count else longest
        if count and tokens + taken <= max_tokens:
            found[-1] = (count + 1, tokens + taken, pairs + taken * taken / 2)
        else:
            longest = length
            found.append((1, length, length * length / 2))
    return found


@dataclass(frozen=True, kw_only=True)
class MachineCosts:
    """The costs from a machine's profile, in fields that `Costs` has too."""

    decode: DecodeCurve
    prefill: MeasuredPrefill
    sync: SyncCosts
    training: MeasuredTraining
    padded_share: float
    tokens_per_pass: float
    refill_passes: int
    sharing: CoreSharing | None
    handling_time: float
    episode_time: float
    action_time: float
    serving_time: float
    environment_action_time: float
    environment_start_time: float
    provenance: Provenance
    """Source of every operation except `decode`, which has its own."""

    @classmethod
    def load(cls, resolved: ResolvedRun, path: Path) -> MachineCosts:
        """Read the seconds of every operation of a run from a profile.

        Raises:
            RunError: the file is no profile, or its model, GPU, dtype, backend or parallelism
                differs.
        """
        try:
            as_measured = read_measured(path)
        except ValueError as error:
            raise RunError("costs.profile", str(path), text=f"costs.profile: {error}") from None
        run = resolved.run
        check_fits(as_measured, run, path)
        profile = scaled_to_mean_speed(as_measured)
        measured = Provenance.of("measured", [_source(as_measured, path)])
        generated = Provenance.of(
            "measured", [*measured.sources, *_extrapolations(profile, resolved)]
        )
        corrections = Corrections.of(resolved)
        push = _Push(
            payload=Payload.of(resolved.replica, run.sync),
            num_parameters=resolved.model.num_parameters,
            sync=run.sync,
            link=resolved.link,
            is_over_ray=run.execute.launcher == "ray",
        )
        overhead = own_step_time(run.framework, corrections, str(path))
        fit = fit_decode(profile.decode, most_running(resolved.replica))
        return cls(
            decode=DecodeCurve(
                base=fit.base, per_context_token=fit.per_context_token, provenance=generated
            ),
            prefill=MeasuredPrefill(
                fit_prefill(profile.prefill, profile.join), _once(profile.turnover), measured
            ),
            sync=_sync(profile, push, path, measured).calibrated(corrections),
            training=_training(
                profile,
                resolved.trainer,
                factors=corrections.training_factors,
                computed_share=run.computed_share,
                trained_group_share=run.trained_group_share,
                overhead_time=overhead.seconds,
            ),
            padded_share=_padded_share(profile),
            tokens_per_pass=profile.prefill_tokens + run.rollout.max_running,
            refill_passes=profile.refill_passes,
            sharing=CoreSharing.of(profile.sharing, profile.host),
            handling_time=_handling_time(profile, push.is_over_ray),
            episode_time=_once(profile.episode or profile.action),
            action_time=_action_time(profile),
            serving_time=max(0.0, _once(profile.serving) - _once(profile.turnover)),
            environment_action_time=_once(profile.environment_action),
            environment_start_time=_once(profile.environment_start),
            provenance=measured,
        )


def switch_times(path: Path) -> tuple[float, float]:
    """Return the seconds in a profile that GPUs take to change sides: to the replica, beside its load, and back.

    Raises:
        ValueError: the file is no profile.
    """
    profile = scaled_to_mean_speed(read_measured(path))
    return _once(profile.lend), _once(profile.take_back)


def _once(measured: ModelOperation | None) -> float:
    return 0.0 if measured is None else measured.seconds[MEDIAN]


def _handling_time(profile: MeasuredProfile, is_over_ray: bool) -> float:
    if is_over_ray and profile.handling_over_ray is not None:
        return _once(profile.handling_over_ray)
    return _once(profile.handling)


def _action_time(profile: MeasuredProfile) -> float:
    """Return the CPU seconds of a turn beside passes; the replica's server keeps these waiting for the rest.

    Profiles of earlier versions have the rest apart.
    """
    waited = 0.0 if profile.episode is None else _once(profile.serving)
    return max(0.0, _once(profile.action) - waited)


def _padded_share(profile: MeasuredProfile) -> float:
    if not profile.mixed:
        return float(profile.pads_context)
    most = max(row.running for row in profile.mixed)
    return fit_padded_share(profile.mixed, fit_decode(profile.decode, most))


def _source(profile: MeasuredProfile, path: Path) -> str:
    made_of = f"{profile.source}, {profile.host.device}, {profile.backend}, {profile.date}"
    return f"{path}: {made_of}" + (f", pace {profile.pace:.3f}" if profile.pace else "")


def _extrapolations(profile: MeasuredProfile, resolved: ResolvedRun) -> list[str]:
    """List the ways in which a run goes beyond the measurements."""
    run, wanted = resolved.run, resolved.replica.longest_sequence
    most = max(row.running for row in profile.decode)
    longest = max(row.context for row in profile.decode)
    notes = []
    if (running := most_running(resolved.replica)) > most:
        notes.append(f"decode extrapolated from {most} to {running} rollouts")
    if wanted > longest:
        notes.append(f"decode extrapolated from {longest:.0f} to {wanted} tokens of a rollout")
    roles = run.rollout.num_replicas + run.num_trainers
    roles += run.verifier.workers if run.verifier.reward_model is not None else 0
    threads = run.execute.threads or threads_per_role(profile.host.cores, roles)
    if run.trainer.packing != profile.packing:
        notes.append(f"training measured {profile.packing}, not {run.trainer.packing}")
    if profile.gpu != "cpu" and run.trainer.recompute != profile.recompute:
        notes.append(
            f"training measured with recompute {profile.recompute}, not {run.trainer.recompute}"
        )
    if run.sync.mode == "lora" and profile.lora_rank != run.sync.lora_rank:
        measured = "of all weights" if profile.lora_rank is None else f"of rank {profile.lora_rank}"
        ours = f"adapters of rank {run.sync.lora_rank}"
        notes.append(f"training and pushes measured {measured}, not with {ours}")
    if profile.lora_rank is not None and run.serves_adapters != profile.serves_adapters:
        how = "beside weights" if profile.serves_adapters else "merged"
        notes.append(f"replicas measured with adapters {how}, here they are not")
    if profile.lora_rank is not None and run.algorithm.has_reference:
        notes.append("passes of the reference measured with adapters, which it has not")
    if run.sync.is_direct:
        notes.append("pushes measured through shared memory, not from process to process")
    if profile.pace is None:
        notes.append(
            "as if every second were one of its usual pace, as slower spells were not measured"
        )
    if profile.gpu == "cpu" and threads != profile.host.threads:
        notes.append(f"measured with {profile.host.threads} threads a role, not {threads}")
    if profile.gpu == "cpu" and not profile.sharing and roles > 1:
        notes.append(f"{roles} roles as if none slowed another down, which was not measured")
    if profile.gpu == "cpu" and profile.handling is None:
        notes.append("as if those who decide and reward took no core, which was not measured")
    if profile.gpu == "cpu" and run.environment is not None and profile.action is None:
        notes.append("as if actions of environments took no core, which was not measured")
    is_over_ray = profile.gpu == "cpu" and run.execute.launcher == "ray"
    if is_over_ray and profile.handling_over_ray is None:
        notes.append("as if Ray itself took no core, which was not measured")
    if is_over_ray and profile.relay and profile.push_over_ray is None:
        notes.append("as if calls of a push over Ray took nothing, which was not measured")
    return notes


HANDSHAKES = 4
"""One-way latencies of a push to a relay, in addition to its bytes: send, acknowledge, unpack
command, reply.
"""
OBJECT_BYTES, OBJECT_WAYS = 100 * 1024, 4
"""Larger messages become objects in Ray's store, which the remote node looks up and requests
(Ray's `max_direct_call_object_size`, and its object manager). Second value: one-way latencies for
this.
"""
CALLS, CALLS_IN_PLACE = 5, 3
"""Calls of a push over a link: the trainer writes, and relays pack, read, receive and unpack.
Second value: calls on one machine, where nothing is read or received.
"""


@dataclass(frozen=True, kw_only=True)
class _Push:
    """How a run sends weights."""

    payload: Payload
    num_parameters: int
    """Parameters of the model."""
    sync: SyncConfig
    link: LinkConfig | None
    """Link between replicas and trainer; None within one pool."""
    is_over_ray: bool


def _sync(profile: MeasuredProfile, push: _Push, path: Path, measured: Provenance) -> SyncCosts:
    """Return the costs of a push, to the directory that all replicas read or to relays.

    Raises:
        RunError: the profile has no relay measurements.
    """
    if push.sync.mode != "full" or push.link is not None:
        return _relayed(profile, push, path, measured)
    return SyncCosts(
        wire_bytes=profile.push.bytes,
        fill_time=profile.push.seconds[MEDIAN] + _over_ray(profile, push),
        wire_time=0.0,
        drain_time=0.0,
        load_time=profile.load.seconds[MEDIAN],
        tier=measured.tier,
        sources=measured.sources,
    )


def _relayed(profile: MeasuredProfile, push: _Push, path: Path, measured: Provenance) -> SyncCosts:
    """Return the costs of a push over relays: encode, cross the link, decode to weights.

    If adapters were not measured, merging them is assumed as fast as copying and checking whole
    weights.
    """
    mode, link = push.sync.mode, push.link
    rows = {row.mode: row for row in profile.relay}
    row = rows.get(mode) or (rows.get("full") if mode == "lora" else None)
    if row is None:
        text = f"costs.profile: {path} has no relays for sync.mode {mode!r}: streamrl profile measures them"
        raise RunError("costs.profile", str(path), None, text, ("sync.mode",))
    payload = push.payload.num_bytes
    if mode == "full":
        payload = row.bytes
    elif row.mode == "lora" and profile.lora_rank is not None:
        payload = round(row.bytes / profile.lora_rank * push.sync.lora_rank)
    elif mode == "delta" and row.values:
        payload = round(row.bytes / row.values * push.num_parameters * push.sync.changed_share)
    latency = 0.0 if link is None else link.latency
    brings = push.is_over_ray and push.sync.wire != "gloo"
    ways = HANDSHAKES + (OBJECT_WAYS if brings and payload > OBJECT_BYTES else 0)
    return SyncCosts(
        wire_bytes=payload,
        fill_time=profile.push.seconds[MEDIAN] + row.encode[MEDIAN],
        wire_time=0.0
        if link is None
        else sending_time(payload, link_hop(link).bandwidth, 2 * link.latency),
        drain_time=ways * latency + _calls_over_ray(profile, push),
        unpack_time=row.decode[MEDIAN],
        load_time=profile.load.seconds[MEDIAN],
        tier=measured.tier if row.mode == mode else "composed",
        sources=measured.sources,
    )


def _over_ray(profile: MeasuredProfile, push: _Push) -> float:
    """Return the extra seconds of a push on one machine if roles are Ray actors: relays and their calls."""
    if not push.is_over_ray or profile.push_over_ray is None:
        return 0.0
    return max(0.0, profile.push_over_ray.seconds[MEDIAN] - profile.push.seconds[MEDIAN])


def _calls_over_ray(profile: MeasuredProfile, push: _Push) -> float:
    """Return the seconds of a push's calls over relays if roles are actors, beyond the work that they request."""
    pushed = "full" if profile.lora_rank is None else "lora"
    row = next((row for row in profile.relay if row.mode == pushed), None)
    if row is None:
        return 0.0
    calls = max(0.0, _over_ray(profile, push) - row.decode[MEDIAN])
    return calls if push.link is None else calls * CALLS / CALLS_IN_PLACE


def _training(
    profile: MeasuredProfile,
    trainer: TrainerHardware,
    *,
    factors: tuple[float, float],
    computed_share: float,
    trained_group_share: float,
    overhead_time: float,
) -> MeasuredTraining:
    algorithm, num_trained = trainer.algorithm, trainer.num_trained_models
    call = fit_line(
        [row.tokens for row in profile.call], [row.seconds[MEDIAN] for row in profile.call]
    )
    score, train = factors
    return MeasuredTraining(
        train=fit_passes(profile.train).at(train),
        score=fit_passes(profile.score).at(score),
        call=call,
        optimizer_time=call[0] + num_trained * profile.optimizer.seconds[MEDIAN] / train,
        num_scored=algorithm.num_scored,
        num_trained=num_trained,
        informative_share=computed_share,
        trained_group_share=trained_group_share,
        group_size=algorithm.group_size,
        max_tokens_per_pass=trainer.config.max_tokens_per_pass,
        packing=trainer.config.packing,
        overhead_time=overhead_time,
    )
