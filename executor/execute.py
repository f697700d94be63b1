"""Execute a run file: check it, start the processes, run the engine, handle Ctrl-C, and write the run directory."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import importlib.util
import logging
import os
import platform
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec.structs import replace

from streamrl.engine.messages import Event
from streamrl.engine.state import State
from streamrl.engine.systems import build_dispatch, build_engine
from streamrl.engine.trace import Entry, Trace, read_trace
from streamrl.engine.world import RunInterruptedError
from streamrl.executor.checksums import find_damage
from streamrl.executor.chosen_classes import check_chosen_classes
from streamrl.executor.directory_lock import readable_by
from streamrl.executor.launchers.placement import PlacedRoles, claim_gpus
from streamrl.executor.monitoring import MODULES, LiveTrace
from streamrl.executor.run_guard import PlannedStep, RunGuard, StageWatch
from streamrl.executor.subscribers.attach_requests import with_attached
from streamrl.executor.verifier.reward_checks import (
    check_prompts,
    check_reward_model,
)
from streamrl.hardware.hugging_face import weight_problems
from streamrl.hardware.profiles import load_model
from streamrl.hardware.resolved import longest_sequence
from streamrl.record.charges import PaidGpus
from streamrl.record.chrome_trace import ChromeReader
from streamrl.record.decode_efficiency import FullBatches, measured_yield
from streamrl.record.prompt_tokens import check_prompt_tokens, digest_of
from streamrl.record.run_directory import TRACE, read_rollouts
from streamrl.runfile.backend_choice import engine_named, training_backend_named
from streamrl.runfile.cluster_config import ClusterConfig
from streamrl.runfile.config import CheckpointsConfig, ExecuteConfig, Run
from streamrl.runfile.environment_config import EnvironmentConfig
from streamrl.runfile.errors import RunError
from streamrl.runfile.escaping import visible
from streamrl.runfile.policies_config import SyncConfig
from streamrl.targets.execute_limits import check_back_ends, uses_relays

if TYPE_CHECKING:
    from streamrl.executor.checkpoints import Checkpoint
    from streamrl.executor.launchers.launcher import Launcher
    from streamrl.executor.launchers.role_configs import RoleConfigs
    from streamrl.executor.record import RunDirectory
    from streamrl.executor.roles import TransferRole, WeightSource
    from streamrl.executor.subscribers.secondary_records import SecondaryRecords
    from streamrl.executor.token_files import KeptTokens

logger = logging.getLogger(__name__)

LAST_TIME = 8.0
"""Seconds from the end of commands after a signal to the end of this process, of which workers take `CLOSE_TIME`."""
NAMES = {
    signal.SIGINT: "Ctrl-C",
    signal.SIGTERM: "terminated",
    signal.SIGHUP: "the terminal was closed",
    signal.SIGQUIT: "Ctrl-\\",
}
"""Signals that end a run. A signal that this process was started to ignore, as with nohup, stays ignored."""


class ExportError(RuntimeError):
    """The run has all its steps, but its checkpoint could not be exported."""


class Ending(NamedTuple):
    """Functions to end a running job; all except `ask` may be called while its event loop hangs."""

    loop: asyncio.AbstractEventLoop
    ask: Callable[[str], None]
    """Ends the run soon; call it on the run's event loop."""
    abandon: Callable[[], None]
    """Kills all processes and removes shared memory."""
    stop_time: float
    """Seconds that running commands have to end."""
    say: Callable[[], str]
    """Returns the last step, the saved step and how to resume, as text that follows the name of the signal."""


class Interruption:
    """A context that handles the signals of `NAMES`; call `watch_over` when the run exists."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        """The first signal received."""
        self._ending: Ending | None = None
        self._last: threading.Timer | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interruption:
        for number in NAMES:
            if signal.getsignal(number) != signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._obey)
        return self

    def __exit__(self, *error: object) -> None:
        if self._last is not None:
            self._last.cancel()
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def watch_over(self, ending: Ending) -> None:
        """Set the run that a signal ends.

        Raises:
            RunInterruptedError: a signal came before, and a library has hidden its error.
        """
        if self.signal is not None:
            raise self.error
        self._ending = ending

    @property
    def error(self) -> RunInterruptedError:
        """The error to raise after a signal has ended the run."""
        assert self.signal is not None, "no signal was received"
        said = ": nothing was begun" if self._ending is None else self._ending.say()
        return RunInterruptedError(f"{NAMES[self.signal]}{said}", self.signal)

    def _obey(self, number: int, frame: FrameType | None) -> None:
        self.signal = self.signal or signal.Signals(number)
        if self._ending is None:
            raise self.error
        if self._ending.loop.is_closed():
            return  # the run has ended
        self._ending.loop.call_soon_threadsafe(self._ending.ask, NAMES[self.signal])
        if self._last is None:
            self._last = threading.Timer(self._ending.stop_time + LAST_TIME, self._end)
            self._last.daemon = True
            self._last.start()

    def _end(self) -> None:
        """End this process although its event loop hangs; print which step is saved."""
        assert self._ending is not None and self.signal is not None
        try:
            self._ending.abandon()
        finally:
            with contextlib.suppress(OSError):
                print(visible(f"streamrl: {self.error}"), file=sys.stderr, flush=True)
            os._exit(128 + self.signal)


BACKENDS = ("torch", "transformers", "safetensors", "tokenizers")

Watch = Callable[[Event, State, float], None]
"""Called with each event, the state after it, and the seconds since the start of the run."""
Take = Callable[[Mapping[str, object]], None]
"""Called with each line of metrics.jsonl."""


def check_output(path: Path) -> None:
    """Raise `RunError` if a run directory cannot be made because its path is a link to nothing."""
    if path.is_symlink() and not path.exists():
        text = f"execute.output: {path} is a link to {path.readlink()}, which does not exist; create it, or remove the link"
        raise RunError("execute.output", str(path), text=text)


def check_executable(run: Run) -> None:
    """Raise `ValueError` if this machine cannot execute the run file."""
    from streamrl.executor.evaluation import check_held_out

    if run.environment is not None and run.environment.implementation is None:
        text = (
            "environment.implementation is missing: a simulation needs no environment, but execute does; "
            'set it to a class, such as "python:environment.py:Game"'
        )
        raise RunError("environment.implementation", None, text=text)
    roles = PlacedRoles.of(run)
    build_dispatch(run.policies, run.rollout, run.seed)
    check_installed(BACKENDS, "executor")
    for trainer in run.trainers:
        backend = training_backend_named(trainer.backend)
        check_installed(backend.modules, backend.extra)
    for number in range(run.num_trainers):
        if run.as_seen_by(number).algorithm.optimizer.is_from_bitsandbytes:
            check_installed(("bitsandbytes",), "bitsandbytes")
    if run.execute.launcher == "ray":
        check_installed(("ray",), "ray")
    if run.sync.mode == "lora":
        check_installed(("peft",), "lora")
    for own in run.rollout.kinds:
        engine = engine_named(own.backend)
        check_installed(engine.modules, engine.extra_of(roles.device_of(own.pool)))
    for name in run.execute.trackers:
        check_installed(MODULES[name], name)
    if run.model.path is None:
        raise ValueError(
            f"model.path is missing: model.name={run.model.name!r} has no weights here "
            "(--set model.path=DIRECTORY)"
        )
    priced = replace(run, cluster=price_local_cores_at_zero(run.cluster))
    if run.execute.budget is not None and not PaidGpus.of(priced).dollars_per_second:
        raise ValueError(
            f"execute.budget is {run.execute.budget:g}, but the pools of this run cost nothing; "
            "set cluster.pools.NAME.price, or execute.deadline instead"
        )
    load_model(run.model)
    if run.merges_adapters and not any(Path(run.model.path).glob("model*.safetensors")):
        raise ValueError(
            f"sync.mode 'lora' merges adapters with weights, but {run.model.path} has no model*.safetensors"
        )
    if damage := find_damage(Path(run.model.path), reads_all=True):
        raise ValueError(f"model.path: {run.model.path}: {damage}; copy the directory again")
    for problem in weight_problems(Path(run.model.path)):
        raise ValueError(f"model.path: {run.model.path} {problem}")
    if not run.workload.sources or not (run.verifier.rewards or run.environment):
        raise ValueError(
            "workload.prompts and verifier.scorer are missing: nothing to generate from"
        )
    if run.verifier.rewards:
        check_prompts(run.verifier, run.workload)
    if run.evaluation is not None:
        check_held_out(run.evaluation, run.verifier, run.workload)
    check_reward_model(run.verifier)
    check_back_ends(run)
    check_chosen_classes(run)
    if run.execute.launcher != "ray":
        claim_gpus(roles)


def check_installed(modules: Sequence[str], extra: str) -> None:
    """Raise `ValueError` if modules of an extra are not installed; import nothing."""
    missing = [name for name in modules if not is_installed(name)]
    if missing:
        raise ValueError(f"{', '.join(missing)} not installed: pip install 'streamrl[{extra}]'")


def is_installed(name: str) -> bool:
    """Return whether a module is installed; import nothing but its parent packages."""
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # of a parent package
        return False


def execute(
    run: Run,
    resume: bool = False,
    watch: Watch = lambda event, state, now: None,
    how_to_resume: str = "streamrl execute RUN.toml --resume",
    take: Take = lambda line: None,
    planned: PlannedStep | None = None,
) -> Trace:
    """Execute a run and return its trace; see `carry_out`."""
    carry_out(run, resume, watch, how_to_resume, take, planned)
    return read_trace(Path(run.execute.output) / TRACE)


def carry_out(
    run: Run,
    resume: bool = False,
    watch: Watch = lambda event, state, now: None,
    how_to_resume: str = "streamrl execute RUN.toml --resume",
    take: Take = lambda line: None,
    planned: PlannedStep | None = None,
) -> None:
    """Execute a run; a signal ends it within `execute.grace` and eight seconds. Without steps it only evaluates.

    Raises:
        ValueError: the run file cannot be executed, or its output directory is in use.
        RuntimeError: the run stopped before its last step.
        RunInterruptedError: a signal stopped the run; the message includes `how_to_resume`.
        ExportError: the run has all its steps, but its checkpoint could not be exported.
    """
    if resume:
        run = with_attached(run, Path(run.execute.output))
    check_executable(run)
    check_output(Path(run.execute.output))
    if run.execute.checkpoints.export is not None:
        from streamrl.executor.checkpoint_export import check_export

        check_export(run.execute.checkpoints, Path(run.execute.output))
    run = replace(run, cluster=price_local_cores_at_zero(run.cluster))
    files = readable_by(run.execute.readers, Path(run.execute.output))
    with files, joined(PlacedRoles.of(run)), Interruption() as interruption:
        try:
            asyncio.run(_execute(run, resume, watch, how_to_resume, take, interruption, planned))
        except Exception:  # libraries replace what a signal raises while they are imported
            if interruption.signal is None:
                raise
            raise interruption.error from None
        if interruption.signal is not None and not run.algorithm.steps:
            raise interruption.error  # an evaluation has no step that could be missing
    if run.execute.checkpoints.export is not None:
        with readable_by(run.execute.readers, Path(run.execute.output)):
            export_at_end(Path(run.execute.output), run.execute.checkpoints)


def export_at_end(directory: Path, config: CheckpointsConfig) -> None:
    """Export a checkpoint of a run that has all its steps; raise `ExportError` if that fails."""
    from streamrl.executor.checkpoint_export import (
        choose_checkpoint,
        export_checkpoint,
        say_choice,
    )

    assert config.export is not None, "the caller has checked it"
    step = "last"
    try:
        checkpoint = choose_checkpoint(directory, config.choice)
        step = str(checkpoint.version)
        logger.info(f"the run is complete; exporting step {step} to {config.export}")
        place = export_checkpoint(checkpoint, config.export, config.adapters)
        reason = say_choice(directory, config.choice, checkpoint.version)
    except (ValueError, RuntimeError, OSError) as error:
        words = ["streamrl", "checkpoint", "export", str(directory), "--step", step]
        how = shlex.join([*words, "--adapters", config.adapters, "-o", "DIR"])
        raise ExportError(
            f"execute.checkpoints.export: {error}; the run is complete, export it again with: {how}"
        ) from error
    logger.info(f"step {checkpoint.version} is exported to {place}: {reason}")


def joined(roles: PlacedRoles) -> AbstractContextManager[None]:
    """Return a context that joins the run's Ray cluster, if it has one; raise `ValueError` if that fails."""
    if roles.execute.launcher != "ray":
        return contextlib.nullcontext()
    from streamrl.executor.launchers.ray_cluster import joined_cluster

    return joined_cluster(roles)


def price_local_cores_at_zero(cluster: ClusterConfig) -> ClusterConfig:
    """Return the cluster with price 0 for CPU pools without a price, because local cores cost nothing."""
    pools = {
        name: replace(pool, price=0.0) if pool.gpu == "cpu" and pool.price is None else pool
        for name, pool in cluster.pools.items()
    }
    return replace(cluster, pools=pools)


def _tell(listeners: Sequence[Callable[[Entry], None]], entry: Entry) -> None:
    for listen in listeners:
        listen(entry)


async def _execute(
    run: Run,
    resume: bool,
    watch: Watch,
    how_to_resume: str,
    take: Take,
    interruption: Interruption,
    planned: PlannedStep | None,
) -> None:
    from streamrl.executor.record import RunDirectory
    from streamrl.executor.subscribers.secondary_records import SecondaryRecords

    path = Path(run.execute.output)
    most_ranks = run.trainer.largest.data_parallel  # a budget must hold whenever ranks are added
    dollars = PaidGpus.of(run, num_ranks=most_ranks).dollars_per_second
    guard = RunGuard(run.execute, run.algorithm.steps, dollars, planned)

    def take_both(line: Mapping[str, object]) -> None:
        take(line)
        guard.take(line)

    with (
        contextlib.closing(RunDirectory(path, take_both)) as directory,
        contextlib.closing(SecondaryRecords(run.secondary_trainer_names, path)) as records,
    ):
        directory.find_checkpoint(run, resume)
        if resume:
            records.check(directory.recorded)
        await _execute_in(
            directory, records, run, resume, watch, how_to_resume, interruption, guard
        )


async def _execute_in(
    directory: RunDirectory,
    records: SecondaryRecords,
    run: Run,
    resume: bool,
    watch: Watch,
    how_to_resume: str,
    interruption: Interruption,
    guard: RunGuard,
) -> None:
    from streamrl.executor.buffer import RolloutBuffer
    from streamrl.executor.environment.episodes import EpisodeRunner
    from streamrl.executor.environment.observation_tokens import ObservationEncoder
    from streamrl.executor.environment.session import EnvironmentHost, with_tool_format
    from streamrl.executor.evaluation import (
        HeldOut,
        HeldOutEpisodes,
        held_out_prompts,
        verifier_of,
    )
    from streamrl.executor.launchers.role_configs import (
        RoleConfigs,
        received_copies,
        weights_room,
    )
    from streamrl.executor.prompts import PromptWorkload, load_tokenizer
    from streamrl.executor.record import rollback_to
    from streamrl.executor.tokens import decode_ids
    from streamrl.executor.verifier.verifier import Verifier, bounds_of
    from streamrl.executor.world import RealWorld

    assert run.model.path is not None, "check_executable requires weights"
    configs = RoleConfigs(run, lambda: directory.leg)
    launcher = make_launcher(PlacedRoles.of(run), directory, configs)
    tokenizer = load_tokenizer(run.model.path)
    host = None
    if run.environment is not None:
        environment = with_tool_format(run.environment, tokenizer)
        log = directory.logs / "environment.log"
        host = EnvironmentHost(environment, log, run.execute.patience)
    tools = [] if host is None else await host.describe()
    workload = PromptWorkload(run, tokenizer, tools)
    for note in workload.notes:
        logger.warning(note)
    configs.end_rollouts_at(workload.end_tokens)
    workload.check_vocabulary(load_model(run.model).vocab_size)
    verifier = Verifier(run.verifier, directory.logs / "verifier.log", launcher.reward_model)
    has_seeds = run.execute.deterministic or run.rollout.seed_rollouts
    seed = run.seed if has_seeds else None
    encoder: ObservationEncoder | None = None
    if run.environment is not None:
        encoder = ObservationEncoder(
            workload.tokenizer,
            workload.end_tokens,
            run.workload.template_arguments,
            tools,
            has_chats=workload.has_chats,
            max_context=run.environment.max_context,
        )
    held_out: HeldOut | None = None
    if run.evaluation is not None:
        evaluated = held_out_prompts(run.evaluation, run.workload, workload)
        own, longest = verifier_of(run.evaluation, run.verifier), run.evaluation.max_tokens
        longest = longest or run.rollout.max_tokens
        turns = None
        if run.environment is not None and host is not None and encoder is not None:
            turns = HeldOutEpisodes(
                run.environment,
                workload,
                evaluated,
                longest,
                host,
                encoder,
                seed,
                has_scorer=bool(own.rewards),
            )
        scores = verifier
        if run.evaluation.scorer is not None:
            scores = Verifier(own, directory.logs / "evaluation-verifier.log")
        held_out = HeldOut(
            run.evaluation,
            longest,
            evaluated,
            scores,
            seed,
            directory.write_evaluated,
            directory.write_evaluation,
            is_alone=run.algorithm.steps == 0,
            episodes=turns,
            bounds=bounds_of(own) if run.environment is None else None,
        )
    prompts = [decode_ids(prompt) for prompt in workload.prompts]
    if resume:
        recorded = directory.recorded
        check_prompt_tokens(directory.path, prompts, "" if recorded is None else recorded.prompts)
    checkpoint = directory.open(run, resume, prompts)
    records.open(directory.leg, is_resumed=resume)
    if directory.changes:
        logger.info(f"changed since the last start: {'; '.join(directory.changes.values())}")
    if resume and run.workload.ranker is not None:
        lines = read_rollouts(directory.path, rollback_to(checkpoint))
        workload.remember([(line["line"], line["num_tokens"]) for line in lines])
    decode = measured_yield(run)
    with (
        token_directory(run.execute, is_resumed=resume) as tokens,
        contextlib.ExitStack() as open_files,
    ):
        header = Trace(run, "real", {}, decode=decode)
        listeners: list[Callable[[Entry], None]] = [StageWatch(header, guard.stages).take]
        if run.execute.live_trace:
            full = FullBatches(decode, run.replica_kinds, run.rollouts_per_prompt)
            reader = ChromeReader(full, run.followers, run.verifier)
            live = LiveTrace(directory.path, reader)
            listeners.append(open_files.enter_context(contextlib.closing(live)).take)
        if tokens is not None:
            forget_lost_episodes(run.environment, tokens)
        most = longest_sequence(run.rollout, run.workload, run.environment)
        kept = (
            None
            if tokens is None or directory.other_samples
            else find_kept(run.algorithm.group_size, most, tokens, checkpoint)
        )
        if kept is not None and kept.num_rollouts:
            what = f"{kept.num_rollouts:,} rollouts with {kept.num_tokens:,} tokens"
            logger.info(f"{what} from before the restart are continued")
        buffer = RolloutBuffer(workload, run.num_trainers, seed, tokens, kept, run.environment)
        episodes = None
        if run.environment is not None and host is not None and encoder is not None:
            episodes = EpisodeRunner(run.environment, host, encoder, buffer)
        world = RealWorld(
            Trace(
                run,
                "real",
                facts(engine_named(run.rollout.backend).modules),
                directory.trace_file,
                keeps_entries=False,
                decode=decode,
                leg=directory.leg,
                run_id=directory.run_id,
                tell=partial(_tell, listeners) if listeners else None,
                prompts=digest_of(prompts),
            ),
            build_engine(run),
            launcher,
            buffer,
            verifier,
            partial(
                make_transfer,
                run.sync,
                run.execute,
                run.trainer.pool,
                launcher,
                weights_room(
                    run.model,
                    serves_adapters=run.serves_adapters,
                    copies=received_copies(
                        run.sync, run.execute.launcher, run.rollout, run.cluster.pools
                    ),
                ),
            ),
            directory,
            records,
            checkpoint,
            watch,
            guard.reason,
            episodes,
            held_out,
        )

        def say() -> str:
            saved = directory.checkpoints.newest()
            what = "no step is saved yet" if saved is None else f"step {saved.version} is saved"
            return f" after step {world.engine.version}: {what}; go on with: {how_to_resume}"

        loop = asyncio.get_running_loop()
        ending = Ending(loop, world.interrupt, world.abandon, world.stop_time, say)
        try:
            interruption.watch_over(ending)
            await world.run()
        except (RuntimeError, OSError) as error:
            raise with_advice(error, directory, say(), how_to_resume) from error.__cause__
        finally:
            guard.end()


def with_advice(
    error: RuntimeError | OSError, directory: RunDirectory, saved: str, how_to_resume: str
) -> RuntimeError | OSError:
    """Return the error that ends a run, with how to go on.

    Args:
        error: an error of the operating system, or of the user's code, stays as it is.
        directory: the directory of the run.
        saved: the last step, the last checkpoint, and the command that continues the run.
        how_to_resume: that command.
    """
    if directory.is_gone:
        what = f"execute.output {directory.path} was removed or moved while the run used it"
        return RuntimeError(f"{what}; move it back and go on with: {how_to_resume}")
    return RuntimeError(f"{error}{saved}") if type(error) is RuntimeError else error


def make_launcher(roles: PlacedRoles, directory: RunDirectory, configs: RoleConfigs) -> Launcher:
    """Return the launcher of a run: for local processes, or for actors of the joined Ray cluster.

    The libraries of local processes are imported from now on, while this process reads the tokenizer and the prompts.
    """
    if roles.execute.launcher == "ray":
        from streamrl.executor.launchers.ray_launcher import RayLauncher

        return RayLauncher(configs, roles, directory)
    from streamrl.executor.launchers.local_launcher import LocalLauncher

    local = LocalLauncher(configs, roles, directory, claim_gpus(roles))
    local.begin_imports()
    return local


def make_transfer(
    sync: SyncConfig,
    execute: ExecuteConfig,
    trainer_pool: str,
    launcher: Launcher,
    room: int,
    source: WeightSource,
) -> TransferRole:
    """Return the weight transfer of a run: direct, a directory shared by all roles with `room` bytes, or relays.

    A direct transfer needs `room` bytes on each machine with replicas; log it if this one has less.
    """
    from streamrl.executor.transfer.direct_transfer import DirectTransfer
    from streamrl.executor.transfer.relayed_transfer import RelayedTransfer
    from streamrl.executor.transfer.shared_directory import (
        free_shared_memory,
        warn_of_little_room,
    )
    from streamrl.executor.transfer.transfer import Transfer

    if sync.is_direct and free_shared_memory() < room:
        warn_of_little_room("the weights that replicas receive", room)
    match sync.wire:
        case "cuda-ipc":
            return DirectTransfer(source, "cuda-ipc", execute.patience)
        case "broadcast":
            on_cpu = launcher.device(trainer_pool) == "cpu"
            return DirectTransfer(source, "gloo" if on_cpu else "nccl", execute.patience)
        case _:
            if not uses_relays(execute.launcher, sync):
                return Transfer(source.push, room)
            return RelayedTransfer(source.push, sync, launcher.relay, launcher.trainer_place)


@contextlib.contextmanager
def token_directory(execute: ExecuteConfig, *, is_resumed: bool = False) -> Iterator[Path | None]:
    """Yield a directory for the token files of local workers, and remove it at the end.

    After an error it remains, and a resumed run reads it. Yield None for other launchers: in-process workers need no
    files, and Ray workers may be on other machines.
    """
    if execute.launcher != "local":
        yield None
        return
    from streamrl.executor.record import TOKENS
    from streamrl.executor.token_files import remove_all

    path = Path(execute.output) / TOKENS
    if not is_resumed:
        remove_all(path)
    path.mkdir(parents=True, exist_ok=True)
    yield path
    remove_all(path)


def forget_lost_episodes(environment: EnvironmentConfig | None, tokens: Path) -> None:
    """Remove saved tokens of episodes that begin again, because their environments ended with the last start."""
    from streamrl.executor.token_files import remove_all

    if environment is not None and environment.after_loss == "restart":
        remove_all(tokens)
        tokens.mkdir(exist_ok=True)


def find_kept(
    group_size: int, most_tokens: int, tokens: Path, checkpoint: Checkpoint | None
) -> KeptTokens:
    """Return the saved tokens of rollouts that were not trained on at the checkpoint."""
    from streamrl.executor.checkpoints import Position
    from streamrl.executor.token_files import KeptTokens

    at = Position(version=0, groups_done=0) if checkpoint is None else checkpoint.position
    done = frozenset(at.done_ahead)

    def is_open(rollout: int) -> bool:
        group = rollout // group_size
        return group >= at.groups_done and group not in done

    return KeptTokens(tokens, at.version, most_tokens, is_open)


def facts(engines: Sequence[str] = ()) -> dict[str, str | float]:
    """Return the architecture of the host and the versions of Python and the packages, for the trace."""
    versions: dict[str, Any] = {"host": platform.machine(), "python": platform.python_version()}
    for name in ("streamrl", *BACKENDS, *engines):
        versions[name] = version_of(name)
    return versions


def version_of(name: str) -> str:
    """Return the version of a package, or of its CPU build (`NAME-cpu`)."""
    for distribution in (name, f"{name}-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(distribution)
    return "not installed as a package"
