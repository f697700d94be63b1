"""The real world with scripted roles, for tests of its control."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from streamrl.engine.messages import PushWeights, WeightsPushed
from streamrl.engine.systems import build_policies, build_state
from streamrl.engine.trace import Trace
from streamrl.executor.buffer import RolloutBuffer
from streamrl.executor.environment.episodes import EpisodeRunner
from streamrl.executor.environment.observation_tokens import ObservationEncoder
from streamrl.executor.environment.session import EnvironmentHost
from streamrl.executor.evaluation import (
    HeldOut,
    HeldOutEpisodes,
    held_out_prompts,
    verifier_of,
)
from streamrl.executor.execute import find_kept, forget_lost_episodes
from streamrl.executor.launchers.handles import Handle, InProcess, LocalProcess
from streamrl.executor.launchers.processes import begin_for, fork_from, spawn
from streamrl.executor.prompts import PromptWorkload
from streamrl.executor.record import RunDirectory
from streamrl.executor.roles import (
    Manifest,
    Scoring,
    TransferRole,
    VerifierRole,
    WeightSource,
    WeightTarget,
    Write,
)
from streamrl.executor.subscribers.secondary_records import SecondaryRecords
from streamrl.executor.transfer.direct_transfer import DirectTransfer
from streamrl.executor.world import RealWorld
from streamrl.hardware.resolved import longest_sequence
from streamrl.runfile.config import Run
from streamrl.runfile.roles_config import SecondaryTrainerConfig
from streamrl.workload.prompt_records import Record
from tests.runs import CheckedEngine
from tests.scripted_roles import OBSERVED, VOCABULARY
from tests.verifying import score

REPLICA = "tests.scripted_roles:ScriptedReplica"
REWARD_MODEL = "tests.scripted_roles:ScriptedRewardModel"
TRAINER = "tests.scripted_roles:ScriptedTrainer"
BEGIN = spawn if begin_for("cpu") is spawn else partial(fork_from, ("tests.scripted_roles",))
"""How a role without a model begins: where it can, forked in no time from what has imported no torch."""


class ScriptedTokenizer:
    """A character a token."""

    def encode(self, text: str) -> list[int]:
        return [3 + ord(character) % (VOCABULARY - 3) for character in text]

    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        return "odd" if sum(tokens) % 2 else "even"  # as scripted replicas write


class TurnTokenizer:
    """Shows tokens as numbers, and makes `OBSERVED` of each character."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [OBSERVED] * len(text)

    def decode(self, tokens: list[int], skip_special_tokens: bool = False) -> str:
        return " ".join(map(str, tokens))


class ScriptedVerifier(VerifierRole):
    """Scores in this process: what scripted roles write is trusted."""

    async def start(self) -> None:
        pass

    async def verify(self, completion: str, num_tokens: int | None, record: Record) -> Scoring:
        if "answer" not in record:
            raise RuntimeError("the record has no answer")
        return Scoring(score("exact", completion, record), None)

    def close(self) -> None:
        pass


class LengthsCost(ScriptedVerifier):
    """Takes 9 off every reward in which the length counts."""

    async def verify(self, completion: str, num_tokens: int | None, record: Record) -> Scoring:
        scoring = await super().verify(completion, num_tokens, record)
        return scoring._replace(reward=scoring.reward - 9 * (num_tokens is not None))


class ScriptedTransfer(TransferRole):
    """Brings nothing anywhere: what scripted trainers push has no bytes."""

    def __init__(self, write: Write) -> None:
        self._write = write
        self.manifests: dict[int, Manifest] = {}
        self._held: list[int] = []
        self._pushed: set[int] = set()
        self._is_prepared = False

    def join(self, replica: int, place: str, target: WeightTarget | None = None) -> None:
        pass

    def leave(self, replica: int) -> None:
        pass

    async def prepare(self) -> None:
        self._is_prepared = True

    async def reach(self, replica: int) -> None:
        pass

    async def fetch(self, version: int, replica: int) -> Manifest | None:
        if version not in self.manifests and version in self._pushed:
            raise ConnectionError(f"weights of step {version} are gone")
        return self.manifests.get(version)

    async def close(self) -> None:
        self.stop()

    async def push(self, command: PushWeights) -> WeightsPushed:
        assert self._is_prepared, "a trainer that is up is one that can push"
        manifest = await self._write(command.version, Path(os.devnull))
        self.manifests[command.version] = self.manifests.pop(command.version, manifest)
        self._pushed.add(command.version)
        self._clear()
        return WeightsPushed(command.version, manifest.num_bytes, manifest.checksum)

    def hold(self, version: int) -> None:
        self._held.append(version)

    def release(self, version: int) -> None:
        self._held.remove(version)
        self._clear()

    def stop(self) -> None:
        self.manifests.clear()

    def _clear(self) -> None:
        kept = {*self._held, *list(self.manifests)[-1:]}
        self.manifests = {v: m for v, m in self.manifests.items() if v in kept}


MOST_RANKS = 4
"""Ranks of a trainer that there is room for."""


class ScriptedLauncher:
    """Starts scripted roles in this process, or in processes of their own."""

    def __init__(
        self, run: Run, directory: RunDirectory, is_local: bool = False, **options: Any
    ) -> None:
        self._directory = directory
        self._is_local = is_local
        self._seed = run.seed
        self._patience = run.execute.patience
        self._options: dict[str, Any] = options
        self.replicas: dict[int, Handle] = {}
        self.trainers: list[Handle] = []
        """The one that is up, after those that were lost."""
        self.sizes: list[int | None] = []
        """Data-parallel ranks of each start and change; None as in the run file."""
        self.models: list[str] = []
        """The directory that each replica loads first."""

    async def replica(self, replica_id: int, kind: int, model: str) -> Handle:
        self.models.append(model)
        self.replicas[replica_id] = handle = await self._start(REPLICA, replica_id)
        return handle

    def join(self, follower: SecondaryTrainerConfig, wanted_replicas: Sequence[int]) -> None:
        pass

    async def trainer(self, number: int, data_parallel: int | None = None) -> Handle:
        self.sizes.append(data_parallel)
        self.trainers.append(await self._start(TRAINER, -1 - number))
        return self.trainers[-1]

    async def resize_trainer(self, handle: Handle, data_parallel: int) -> Handle:
        await handle.call("start_blank", returns=type(None))
        had = self.sizes[-1] or 1
        await handle.call("regroup", data_parallel, had, "nowhere", returns=int)
        self.sizes.append(data_parallel)
        return handle

    def reserve_ranks(self, data_parallel: int, wanted_replicas: Sequence[int]) -> None:
        if data_parallel > MOST_RANKS:
            raise RuntimeError(f"there is room for {MOST_RANKS} ranks")

    def free(self, replica_id: int) -> None:
        self.replicas.pop(replica_id, None)

    def leaving(self) -> dict[int, float]:
        return {}

    def place_of(self, replica_id: int) -> str:
        return "here"

    async def _start(self, role: str, number: int) -> Handle:
        failure_rate = self._options.get("failure_rate", 0.0) if role == REPLICA else 0.0
        config = {
            "seed": self._seed * 1000 + number,
            **self._options,
            "failure_rate": failure_rate,
        }
        if self._is_local:
            log = self._directory.logs / f"{number}.log"
            return await LocalProcess.start(role, config, log, {}, self._patience, BEGIN)
        return InProcess(role, config)


def make_world(
    run: Run,
    launcher_options: dict[str, Any],
    resume: bool = False,
    launcher_class: type[ScriptedLauncher] = ScriptedLauncher,
    verifier_class: Callable[[], VerifierRole] = ScriptedVerifier,
    make_transfer: Callable[[Write], TransferRole] = ScriptedTransfer,
    tokens: Path | None = None,
    **kwargs: Any,
) -> RealWorld:
    """Put a real world of scripted roles together, which write to `tokens`; call it inside the event loop."""
    directory = RunDirectory(Path(run.execute.output))
    checkpoint = directory.open(run, resume)
    records = SecondaryRecords(run.secondary_trainer_names, directory.path)
    records.open(directory.leg, is_resumed=resume)
    if tokens is not None:
        forget_lost_episodes(run.environment, tokens)
    longest = longest_sequence(run.rollout, run.workload, run.environment)
    kept = (
        find_kept(run.algorithm.group_size, longest, tokens, checkpoint)
        if resume and tokens is not None
        else None
    )
    launcher = launcher_class(run, directory, **launcher_options)
    tokenizer = ScriptedTokenizer() if run.environment is None else TurnTokenizer()
    workload, verifier = PromptWorkload(run, tokenizer), verifier_class()
    buffer = RolloutBuffer(
        workload,
        run.num_trainers,
        run.seed if run.execute.deterministic else None,
        tokens,
        kept,
        run.environment,
    )
    turns = None
    if run.environment is not None:
        log = directory.logs / "environment.log"
        host = EnvironmentHost(run.environment, log, run.execute.patience)
        encoder = ObservationEncoder(tokenizer, (), has_chats=False)
        kwargs["episodes"] = EpisodeRunner(run.environment, host, encoder, buffer)
    if run.evaluation is not None:
        prompts = held_out_prompts(run.evaluation, run.workload, workload)
        if run.environment is not None:
            has_scorer = bool(verifier_of(run.evaluation, run.verifier).rewards)
            most = run.rollout.max_tokens
            turns = HeldOutEpisodes(
                run.environment,
                workload,
                prompts,
                most,
                host,
                encoder,
                None,
                has_scorer=has_scorer,
            )
        kwargs["held_out"] = HeldOut(
            run.evaluation,
            run.evaluation.max_tokens or run.rollout.max_tokens,
            prompts,
            verifier,
            None,
            directory.write_evaluated,
            directory.write_evaluation,
            episodes=turns,
        )

    def direct(source: WeightSource) -> TransferRole:
        return DirectTransfer(source, "gloo", run.execute.patience)

    return RealWorld(
        Trace(run, "real", {}, directory.trace_file, leg=directory.leg),
        CheckedEngine(build_state(run), build_policies(run)),
        launcher,  # type: ignore[arg-type]
        buffer,
        verifier,
        direct if run.sync.is_direct else lambda source: make_transfer(source.push),
        directory,
        records,
        checkpoint,
        **kwargs,
    )
