"""Executed episodes: environments in processes of their own, the tokens that are trained on, losses and resumes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from msgspec.structs import replace

from streamrl.cli.samples import describe_group
from streamrl.engine.messages import (
    Act,
    EndEvaluation,
    Evaluated,
    Event,
    Failed,
    Observed,
    Verified,
)
from streamrl.engine.state import State
from streamrl.engine.trace import Trace, read_trace, replay
from streamrl.executor.buffer import BufferedRollout
from streamrl.executor.checkup import readiness
from streamrl.executor.directory_lock import remove_abandoned
from streamrl.executor.environment.session import (
    Answer,
    EnvironmentFaultError,
    EnvironmentHost,
    Session,
)
from streamrl.executor.launchers.handles import WorkerLostError
from streamrl.executor.subscribers.attach_requests import Notice
from streamrl.executor.trainer.step_record import step_samples
from streamrl.executor.world import RealWorld
from streamrl.record.evaluation import EVALUATED, read_evaluations
from streamrl.record.recorded_inputs import recorded_inputs
from streamrl.record.run_directory import read_metrics, read_rollouts
from streamrl.record.samples import SampledGroup
from streamrl.runfile.choices import ExtensionError
from streamrl.runfile.config import Run
from streamrl.runfile.environment_config import EnvironmentConfig
from streamrl.runfile.workload_config import LengthsConfig
from streamrl.workload.episodes import RecordedEpisodes, read_episodes
from streamrl.workload.workload import SimulatedWorkload
from tests.runs import of
from tests.scripted import LengthsCost, ScriptedVerifier, make_world
from tests.scripted_roles import tokens_of
from tests.test_execute import real_run
from tests.traces import check_every_command_ends_once, check_every_rollout_is_accounted_for

GAME = f"python:{Path(__file__).parent / 'turn_game.py'}:"
CONFIG = EnvironmentConfig(max_turns=4, max_context=100, implementation=f"{GAME}Odd")
Look = Callable[[RealWorld, Event], None]


def episode_run(directory: Path, **changes: Any) -> Run:
    """Return a run whose episodes have up to four turns; keys of the environment begin with `env__`."""
    table = {"implementation": f"{GAME}Summing", "max_turns": 4, "max_context": 4096}
    for key in [key for key in changes if key.startswith("env__")]:
        table[key.removeprefix("env__")] = changes.pop(key)
    changes = {"verifier__scorer": None, "rollout__max_tokens": 256, **changes}
    return real_run(directory, environment=table, **changes)


def executed(run: Run, look: Look = lambda world, event: None, **options: Any) -> Trace:
    """Execute a run with scripted roles; `look` sees each event."""
    resume, tokens = options.pop("resume", False), options.pop("tokens", None)
    verifier_class = options.pop("verifier_class", ScriptedVerifier)
    if tokens is not None:
        tokens.mkdir(exist_ok=True)

    async def go() -> Trace:
        def watch(event: Event, state: State, now: float) -> None:
            look(world, event)

        roles = {"fastest": 0.0, "slowest": 0.01, **options}
        world: RealWorld = make_world(
            run, roles, resume, verifier_class=verifier_class, watch=watch, tokens=tokens
        )
        with contextlib.closing(world._directory):
            return await world.run()

    return asyncio.run(asyncio.wait_for(go(), timeout=60))


def rewards_of(trace: Trace) -> dict[int, float]:
    return {e.event.rollout: e.event.reward for e in trace.entries if isinstance(e.event, Verified)}


def sum_of(rollout: int, num_turns: int = 3) -> int:
    """Return the reward of an episode whose environment heard each turn once."""
    return sum(sum(tokens_of(rollout, turn)) for turn in range(num_turns))


def check_books(trace: Trace) -> None:
    check_every_rollout_is_accounted_for(trace)
    check_every_command_ends_once(trace)
    assert replay(trace) is None
    for rollout, reward in rewards_of(trace).items():
        assert reward == sum_of(rollout)


def test_what_is_trained_on_is_what_was_sampled_and_the_environment_hears_each_turn(
    tmp_path: Path,
) -> None:
    """Scripted trainers refuse samples with other tokens, or other masks, than those of turns and observations."""
    run = episode_run(tmp_path, env__arguments={"first": "begin"})
    trace = executed(run)
    check_books(trace)
    answers = [e.event for e in trace.entries if isinstance(e.event, Observed)]
    starts = [e for e in trace.entries for c in of(Act, e.commands) if c.starts and not c.turn]
    assert starts and {each.tokens for each in answers if each.is_over} == {0}
    assert {each.tokens for each in answers} == {0, 1, 2, 3, 5}


def kill_environments(world: RealWorld) -> None:
    """Kill the worker process of each open environment."""
    assert world._episodes is not None
    pid = world._episodes._host.pid
    for child in psutil.Process(pid).children() if pid is not None else ():
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()


def kill_host(world: RealWorld) -> None:
    """Kill the process that forks environments, and with it all of them."""
    assert world._episodes is not None
    if (pid := world._episodes._host.pid) is not None:
        os.kill(pid, signal.SIGKILL)


def stop_host(world: RealWorld) -> None:
    """Stop that process, which then neither answers nor ends."""
    assert world._episodes is not None
    if (pid := world._episodes._host.pid) is not None:
        os.kill(pid, signal.SIGSTOP)


def kill_replica(world: RealWorld) -> None:
    replicas: Any = world._launcher.replicas  # type: ignore[attr-defined]
    replicas[min(replicas)].kill("was killed by a test")


def announce_loss(world: RealWorld) -> None:
    world.give_notices(Notice((min(world._replicas),), 0.02, 0.0))


def kill_trainer(world: RealWorld) -> None:
    world._launcher.trainers[-1].kill("was killed by a test")  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("kill", "after_loss"),
    [
        (kill_environments, "replay"),
        (kill_host, "restart"),
        (stop_host, "replay"),
        (kill_replica, "replay"),
        (announce_loss, "replay"),
        (kill_trainer, "restart"),
    ],
)
def test_a_role_killed_in_mid_episode_loses_and_doubles_nothing(
    tmp_path: Path, kill: Callable[[RealWorld], None], after_loss: str
) -> None:
    patience = {"execute__patience": "1 s"} if kill is stop_host else {}
    run = episode_run(tmp_path, env__after_loss=after_loss, execute__checkpoint_every=1, **patience)
    moments = set(random.Random(f"{kill.__name__} {after_loss}").sample(range(20, 120), 3))
    seen = 0

    def look(world: RealWorld, event: Event) -> None:
        nonlocal seen
        seen += 1
        if seen in moments:
            kill(world)

    trace = executed(run, look)
    check_books(trace)
    assert seen > max(moments)
    failed = [e.event.command for e in trace.entries if isinstance(e.event, Failed)]
    assert kill is not kill_environments or of(Act, failed)


def test_commands_to_a_stopped_host_are_never_waited_for_and_it_is_replaced() -> None:
    """More commands than its socket holds; without the timer, a sender that waits would wait for ever."""
    host = EnvironmentHost(CONFIG, patience=1.0)

    async def go() -> None:
        await host.start()
        stopped = host.pid
        assert stopped is not None
        os.kill(stopped, signal.SIGSTOP)
        timer = threading.Timer(20.0, os.kill, (stopped, signal.SIGKILL))
        timer.start()
        while psutil.Process(stopped).status() != psutil.STATUS_STOPPED:
            await asyncio.sleep(0.01)  # a signal is delivered when the process next runs
        for number in range(5000):
            host.kill(number)
        assert host.pid == stopped and psutil.Process(stopped).status() == psutil.STATUS_STOPPED
        with pytest.raises(WorkerLostError, match=r"gave no sign of life for .* and was killed"):
            await Session(host).reset({"prompt": "p"})
        timer.cancel()
        session = Session(host)
        assert await session.reset({"prompt": "p"}) == [{"role": "user", "content": "p"}]
        assert host.pid not in (None, stopped)
        host.close()

    asyncio.run(asyncio.wait_for(go(), timeout=60))


def sleeping(pids: list[int]) -> list[int]:
    """Return the processes that have not ended."""
    return [pid for pid in pids if psutil.pid_exists(pid) and _status(pid) != psutil.STATUS_ZOMBIE]


def _status(pid: int) -> str:
    with contextlib.suppress(psutil.NoSuchProcess):
        return str(psutil.Process(pid).status())
    return psutil.STATUS_ZOMBIE


STARTING = EnvironmentConfig(max_turns=4, max_context=100, implementation=f"{GAME}Starting")


@pytest.mark.parametrize("is_killed", [False, True], ids=["closed", "host killed"])
@pytest.mark.parametrize("sandbox", [True, False])
def test_what_an_environment_starts_in_another_session_ends_with_its_host(
    sandbox: bool, is_killed: bool
) -> None:
    host = EnvironmentHost(replace(STARTING, sandbox=sandbox))

    async def started() -> list[int]:
        session = Session(host)
        shown = await session.reset({"prompt": "p", "starts": not sandbox})
        assert isinstance(shown, str)
        pids = [*map(int, shown.split())]
        assert len(pids) == 2 - sandbox and sleeping(pids) == pids
        if is_killed:
            assert host.pid is not None
            os.kill(host.pid, signal.SIGKILL)
        host.close()
        return pids

    assert not sleeping(asyncio.run(asyncio.wait_for(started(), timeout=60)))


OWNER = """
import asyncio, sys
from msgspec.structs import replace
from streamrl.executor.environment.session import EnvironmentHost, Session
from tests.test_episodes_executed import STARTING

async def start():
    host = EnvironmentHost(replace(STARTING, sandbox=False))
    print(host.pid, await Session(host).reset({"prompt": "p", "starts": True}), host.pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(start())
"""


@pytest.mark.parametrize("whom", ["driver", "driver and host"])
def test_what_an_environment_starts_ends_with_a_killed_driver(tmp_path: Path, whom: str) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", OWNER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as driver:
        assert driver.stdout is not None
        _, *pids, host = driver.stdout.readline().split()
        left = [*map(int, pids)]
        assert len(left) == 2 and sleeping(left) == left
        if whom != "driver":
            driver.send_signal(signal.SIGSTOP)
            os.kill(int(host), signal.SIGKILL)
        driver.kill()
    if whom != "driver":
        remove_abandoned(tmp_path)  # as the next run on this machine does
    until = time.monotonic() + 20.0
    while sleeping(left):
        assert time.monotonic() < until, left
        time.sleep(0.05)


MCP = f"mcp:{sys.executable} {Path(__file__).parent / 'mcp_server.py'}"
ADDITION = '{"name": "add", "parameters": {"a": 1, "b": 2}}'


def tool_host(mode: str) -> EnvironmentHost:
    """Return the host of an environment whose tools are those of an MCP server."""
    tools = {"implementation": "tools", "tools": (f"{MCP} {mode}",), "tool_format": "llama"}
    return EnvironmentHost(EnvironmentConfig(max_turns=4, max_context=100, sandbox=False, **tools))


def test_what_an_mcp_server_starts_in_another_session_ends_with_the_host() -> None:
    host = tool_host("fork")

    async def called() -> int:
        session = Session(host)
        await session.reset({"prompt": "p"})
        (message,) = (await session.step(ADDITION, None)).observation or ()
        host.close()
        return int(message["content"])

    assert not sleeping([asyncio.run(asyncio.wait_for(called(), timeout=60))])


def test_an_mcp_server_that_does_not_answer_is_named() -> None:
    host = tool_host("hang")

    async def called() -> Answer:
        session = Session(host)
        await session.reset({"prompt": "p"})
        answer = await session.step(ADDITION, 0.2)
        host.close()
        return answer

    answer = asyncio.run(asyncio.wait_for(called(), timeout=60))
    assert answer.timed_out and answer.server == f"{MCP} hang".removeprefix("mcp:")


def test_an_action_that_waits_for_a_server_until_its_limit_is_counted_and_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    short = {"algorithm__steps": 1, "env__action_time_limit": "50 ms", "env__max_turns": 2}
    executed(episode_run(tmp_path, env__implementation=f"{GAME}Late", **short))
    (first, *others) = [each for each in caplog.messages if "MCP server" in each]
    assert first.startswith("the MCP server 'python server.py' did not answer 1 of ")
    assert "environment.action_time_limit" in first and others
    (line,) = read_metrics(tmp_path / "run")
    assert line["late_actions"] == len(read_rollouts(tmp_path / "run"))


def test_a_killed_driver_resumes_in_mid_episode(tmp_path: Path) -> None:
    run = episode_run(tmp_path, env__after_loss="replay", execute__checkpoint_every=1)

    class DeathError(Exception):
        pass

    def die(world: RealWorld, event: Event) -> None:
        saved = world._directory.checkpoints.newest()
        if not isinstance(event, Observed) or saved is None or event.rollout not in known(world):
            return
        buffered = known(world)[event.rollout]
        if (
            buffered.num_answered
            and not event.is_over
            and buffered.versions[-1][0] <= saved.version
        ):
            world._buffer.keep_files()
            raise DeathError

    def known(world: RealWorld) -> dict[int, BufferedRollout]:
        return world._buffer.rollouts

    tokens = tmp_path / "run" / "tokens"
    tokens.mkdir(parents=True)
    with pytest.raises(DeathError):
        executed(run, die, tokens=tokens)
    trace = executed(run, tokens=tokens, resume=True)
    check_books(trace)
    kept = [k for e in trace.entries for g in getattr(e.event, "groups", ()) for k in g.turns]
    assert any(each.answered for each in kept)


def test_a_faulty_environment_ends_the_run_with_its_reason(tmp_path: Path) -> None:
    small = {"policies__max_attempts": 1, "algorithm__prompts_per_step": 1, "algorithm__steps": 1}
    run = episode_run(tmp_path, env__arguments={"faulty": True}, **small)
    with pytest.raises(RuntimeError, match="LookupError: nothing is here"):
        executed(run)


@pytest.mark.parametrize(
    ("name", "why"),
    [("Closed", "task is missing"), ("Slow", r"within environment\.start_time_limit, 0\.3 s")],
)
def test_a_run_ends_early_if_no_environment_begins_an_episode(
    tmp_path: Path, name: str, why: str
) -> None:
    limits = {"env__start_time_limit": "300 ms"} if name == "Slow" else {}
    run = episode_run(tmp_path, env__implementation=f"{GAME}{name}", **limits)
    with pytest.raises(ExtensionError, match=rf"all of its first 8 starts failed.*{why}"):
        executed(run)


# Limits -------------------------------------------------------------------------------------------


def test_an_episode_ends_at_its_turns_its_tokens_its_context_and_its_time(tmp_path: Path) -> None:
    ends = {
        "turns": ({"env__max_turns": 2, "env__action_time_limit": "5 s"}, 2),
        "time": ({"env__episode_time_limit": "1 ms"}, None),
        "tokens": ({"rollout__max_tokens": 9}, None),
        "context": ({"env__max_context": 60, "workload__max_prompt_tokens": 40}, None),
    }
    for name, (changes, num_turns) in ends.items():
        directory = tmp_path / name
        directory.mkdir()
        run = episode_run(directory, env__arguments={"turns": 9}, algorithm__steps=1, **changes)
        trace = executed(run, may_be_cut=True)
        check_every_rollout_is_accounted_for(trace)
        assert replay(trace) is None
        if num_turns is not None:  # the environment judges the turn that it does not answer
            for rollout, reward in rewards_of(trace).items():
                assert reward == sum_of(rollout, num_turns)


def odd(*actions: str, limit: float | None = 0.1, config: EnvironmentConfig = CONFIG) -> list[Any]:
    """Return the answers of the environment to some actions, each in a session of its own."""

    async def go() -> list[Any]:
        host = EnvironmentHost(config)
        try:
            return [await ask(host, action) for action in actions]
        finally:
            host.close()

    async def ask(host: EnvironmentHost, action: str) -> Any:
        session = Session(host)
        assert await session.reset({"prompt": "p"}) == [{"role": "user", "content": "p"}]
        try:
            return await session.step(action, limit)
        except (EnvironmentFaultError, WorkerLostError) as error:
            return str(error)

    return asyncio.run(go())


def test_an_action_is_limited_and_a_bad_answer_is_a_fault_with_its_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("streamrl.executor.environment.session.END_TIME", 0.5)
    slept, hung, left, eaten, opened, infinite, large, pair, word, *others = odd(
        *("sleep", "hang", "exit", "eat", "open", "infinite", "large", "pair"),
        *("word", "raise", "forge", "number", "half", "hello"),
    )
    raised, forged, number, half, told = others
    assert slept.timed_out and not slept.done and "more than 0.1 s" in slept.observation
    assert hung.timed_out and hung.done
    assert left == "the process of the environment has ended"
    assert "more memory" in eaten.observation and not eaten.done
    assert opened.startswith("PermissionError")
    bound = "ValueError: a reward must be between -1,000,000 and 1,000,000, got"
    assert infinite.startswith(f"{bound} inf") and large.startswith(f"{bound} -2e+06")
    assert pair.startswith("TypeError: step must return (observation, reward, done)")
    assert word.startswith("TypeError: done must be True or False, got 'no'")
    lines = (Path(__file__).parent / "turn_game.py").read_text().splitlines()
    at = re.fullmatch(r"LookupError: nothing is here \(.*/turn_game\.py:(\d+)\)", raised)
    assert at is not None and "raise LookupError" in lines[int(at[1]) - 1]
    assert forged.startswith("a line on the environment's socket is not the answer")
    assert "observation" in number
    assert half.observation == "half of a ?"
    assert (told.observation, told.reward, told.done) == ("hello", 1.0, False)


def test_a_class_that_cannot_be_used_is_refused_with_its_key() -> None:
    config = EnvironmentConfig(max_turns=4, max_context=100, implementation=f"{GAME}Missing")
    with pytest.raises(ValueError, match=r"environment\.implementation .* has no function Missing"):
        asyncio.run(EnvironmentHost(config).describe())


@pytest.mark.parametrize(("name", "level"), [("Odd", "ok"), ("Bad", "error")])
def test_the_doctor_begins_an_episode(tmp_path: Path, name: str, level: str) -> None:
    run = episode_run(tmp_path, env__implementation=f"{GAME}{name}")
    assert run.environment is not None
    (found,) = readiness._find_environment(run.environment, run.workload)
    assert found.level == level
    assert level == "ok" or "environment.implementation" in found.text


# The record ---------------------------------------------------------------------------------------


def test_episodes_are_recorded_turn_by_turn_and_simulated_again(tmp_path: Path) -> None:
    """`compare` and the kind episodes both simulate the turns, observations and times of rollouts.jsonl."""
    run = episode_run(tmp_path, env__arguments={"first": "begin"}, algorithm__steps=2)
    trace, directory = executed(run), tmp_path / "run"
    lines = {line["rollout"]: line for line in read_rollouts(directory)}
    answers: dict[int, list[int]] = {}
    for entry in trace.entries:
        if isinstance(entry.event, Observed) and not entry.event.is_over:
            answers.setdefault(entry.event.rollout, []).append(entry.event.tokens)
    for rollout, line in lines.items():
        turns = line["turns"]
        assert [turn["tokens"] for turn in turns] == [len(tokens_of(rollout, n)) for n in range(3)]
        shown = [line["first_observation_tokens"], *(t["observation_tokens"] for t in turns)]
        assert shown == [*answers[rollout], 0] and shown[0] == 5
        assert all(0 < turn["action_time"] < 5 for turn in turns) and 0 < line["start_time"] < 5

    recorded = recorded_inputs(trace, directory / "trace.jsonl")
    draws = SimulatedWorkload(replace(run, workload=recorded.workload)).draw(0, 2)
    for draw in draws:
        for rollout, episode in zip(draw.drawn.rollouts, draw.episodes, strict=True):
            turns = lines[rollout]["turns"]
            assert episode.observations == tuple(t["observation_tokens"] for t in turns[:-1])
            assert episode.action_times == tuple(turn["action_time"] for turn in turns)
            assert episode.start_time == lines[rollout]["start_time"]
        assert draw.drawn.prompt_tokens == lines[draw.drawn.rollouts[0]]["prompt_tokens"] + 5
    for source in (directory, directory / "rollouts.jsonl"):
        lengths = LengthsConfig(kind="episodes", source=str(source))
        workload = replace(run.workload, lengths=lengths)
        (drawn,) = SimulatedWorkload(replace(run, workload=workload)).draw(0, 1)
        assert {each.num_turns for each in drawn.episodes} == {3}


def test_a_sample_separates_turns_and_observations(tmp_path: Path) -> None:
    run = episode_run(tmp_path, env__arguments={"first": "begin"})
    found: list[SampledGroup] = []
    scored: Counter[int] = Counter()

    def look(world: RealWorld, event: Event) -> None:
        if not isinstance(event, Verified) or found:
            return
        group = event.rollout // run.algorithm.group_size
        scored[group] += 1
        if scored[group] == run.algorithm.group_size:
            found.append(step_samples(world._buffer, [group], 1, 99, 256, lambda rollout: 0.5))

    executed(run, look)
    parts = [each.parts for each in found[0].rollouts if len(each.parts) == 6]
    assert [part.is_policy for part in parts[0]] == [False, True] * 3
    assert parts[0][0].text and parts[0][1].text.split()
    shown = describe_group(found[0])
    first = shown.index("  observation:")
    assert first < shown.index("  turn 1:") < shown.index("  observation:", first + 1)


def test_a_damaged_record_of_episodes_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    line = '{"rollout": 0, "prompt_tokens": 4, "turns": [{"tokens": 3, "action_time": 0.5}]}\n'
    path.write_text(line + line[:20])
    assert read_episodes(path)[0].episode.action_times == (0.5,)
    path.write_text(line + line.replace('"tokens": 3', '"tokens": 0'))
    with pytest.raises(ValueError, match=r"rollouts.jsonl:2: the line is not from a run"):
        read_episodes(path)
    path.write_text(line.replace("turns", "texts"))
    with pytest.raises(ValueError, match="has no episode with turns"):
        RecordedEpisodes(path, 400)


# Evaluations --------------------------------------------------------------------------------------

HELD_OUT_SHARE = {"share": 0.4, "every": 2, "samples": 3}


def check_evaluations(trace: Trace, directory: Path) -> None:
    """Check that each due version has a score of each episode, whose environment heard each turn once."""
    check_every_command_ends_once(trace)
    check_every_rollout_is_accounted_for(trace)
    assert replay(trace, checks_invariants=True) is None
    results = read_evaluations(directory)
    assert [(each.step, each.num_failed) for each in results] == [(0, 0), (2, 0), (4, 0)]
    for each in results:
        rewards = [reward for of_prompt in each.rewards.values() for reward in of_prompt]
        assert rewards == [sum_of(number) for number in range(9)]
        assert list(each.scores) == ["avg@3", "pass@1", "pass@3"]


def test_held_out_episodes_are_evaluated_and_recorded_turn_by_turn(tmp_path: Path) -> None:
    trace = executed(episode_run(tmp_path, evaluation=HELD_OUT_SHARE, env__sandboxes=4))
    check_evaluations(trace, tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / EVALUATED).open()]
    assert len(lines) == 3 * 9
    assert {len(line["turns"]) for line in lines} == {3}
    trained = {line["place"] for line in read_rollouts(tmp_path / "run")}
    assert trained.isdisjoint(line["place"] for line in lines)


def test_roles_killed_in_mid_evaluation_lose_no_episode(tmp_path: Path) -> None:
    own = {**HELD_OUT_SHARE, "beside": True}
    run = episode_run(tmp_path, env__after_loss="replay", evaluation=own)
    kills = {4: kill_environments, 30: kill_replica, 40: kill_host}
    seen = 0

    def look(world: RealWorld, event: Event) -> None:
        nonlocal seen
        if isinstance(event, Evaluated):
            seen += 1
            kills.pop(seen, lambda world: None)(world)

    trace = executed(run, look)
    check_evaluations(trace, tmp_path / "run")
    assert not kills and any(isinstance(entry.event, Failed) for entry in trace.entries)


def test_a_resumed_run_repeats_an_evaluation_that_was_interrupted(tmp_path: Path) -> None:
    changes = {"policies__system": "stream-sync", "execute__checkpoint_every": 1}
    run = episode_run(tmp_path, evaluation=HELD_OUT_SHARE, **changes)

    def look(world: RealWorld, event: Event) -> None:
        if isinstance(event, Evaluated) and event.version == 2:
            world.interrupt("Ctrl-C")

    with pytest.raises(RuntimeError, match="Ctrl-C"):
        executed(run, look)
    assert [each.step for each in read_evaluations(tmp_path / "run")] == [0]
    trace = read_trace(tmp_path / "run" / "trace.jsonl")  # a busy machine may cut its end off
    assert replay(trace, checks_invariants=True) is None
    ends = [each for entry in trace.entries for each in of(EndEvaluation, entry.commands)]
    assert [(each.version, bool(each.reason)) for each in ends] == [(0, False), (2, True)]
    executed(run, resume=True)
    assert [each.step for each in read_evaluations(tmp_path / "run")] == [0, 2, 4]


def test_a_scorer_of_evaluations_is_added_to_the_rewards_of_the_environment(tmp_path: Path) -> None:
    own = {**HELD_OUT_SHARE, "scorer": "exact"}
    trace = executed(episode_run(tmp_path, evaluation=own), verifier_class=LengthsCost)
    first = read_evaluations(tmp_path / "run")[0]
    rewards = [reward for of_prompt in first.rewards.values() for reward in of_prompt]
    assert all(0 <= reward - sum_of(n) <= 1 for n, reward in enumerate(rewards))
    assert replay(trace) is None
