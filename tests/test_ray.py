"""Roles on a Ray cluster of several nodes on this machine, and what becomes of a run whose nodes die: make test-ray."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import to_builtins

from streamrl.engine.messages import (
    ReplicaLeaving,
    ReplicaLost,
    ReplicaStopped,
    TrainerLost,
    WeightsLoaded,
    WeightsPushed,
)
from streamrl.engine.trace import Trace, read_trace, replay
from streamrl.record.restarts import ledger_of_run
from tests.command_line import streamrl
from tests.test_end_to_end import RUN_FILE, SYMBOLS
from tests.test_engine_runs import EASY, FAULTS, MODES, SCORER, of_trainer
from tests.tiny_model import save_tiny_model
from tests.traces import check_every_command_ends_once, check_every_rollout_is_accounted_for

pytestmark = pytest.mark.ray

TWO_POOLS = RUN_FILE.replace(
    '[rollout]\npool = "local"',
    '[cluster.pools.far]\ngpu = "cpu"\ngpus_per_node = 2\nnodes = 2\n'
    '[[cluster.links]]\nbetween = ["local", "far"]\nbandwidth = "1 Gbps"\n'
    '[rollout]\npool = "far"',
)
NODES = {"head": "pool-local", "first": "pool-far", "second": "pool-far"}


class Nodes:
    """A Ray cluster on this machine: a node of the trainer's pool, and two of the replicas'."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self.cluster = Cluster()
        self.nodes: dict[str, Any] = {name: self.add(name) for name in NODES}
        self.address = self.cluster.address

    def add(self, name: str) -> Any:
        return self.cluster.add_node(
            num_cpus=4, resources={NODES[name]: 1}, object_store_memory=100 * 2**20
        )

    def kill(self, name: str) -> None:
        """Let a node die."""
        self.cluster.remove_node(self.nodes.pop(name), allow_graceful=False)

    def mend(self) -> None:
        """Let nodes that died come back empty; in the main thread, as Ray wants to handle signals."""
        for name in set(NODES) - set(self.nodes):
            self.nodes[name] = self.add(name)


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    made = Nodes()
    yield made
    made.cluster.shutdown()


def prepare(directory: Path, faults: str = "") -> None:
    save_tiny_model(directory / "model", SYMBOLS)
    (directory / "prompts.jsonl").write_text(json.dumps(EASY) + "\n")
    (directory / "scorer.py").write_text(SCORER)
    scored = TWO_POOLS.replace('scorer = "exact"', 'scorer = "python:scorer.py:starts_low"')
    (directory / "run.toml").write_text(scored + faults)


def options(address: str, *settings: str) -> list[str]:
    batch = (
        "algorithm.prompts_per_step=8",
        "algorithm.group_size=8",
        "policies.system=stream-async",
    )
    own = ("execute.launcher=ray", f"execute.ray_address={address}", "execute.patience=20 s")
    return [part for setting in (*own, *batch, *settings) for part in ("--set", setting)]


def execute(nodes: Nodes, directory: Path, *settings: str, faults: str = "") -> Trace:
    """Execute a run on the cluster, and look at its books."""
    prepare(directory, faults)
    done = streamrl("execute", directory / "run.toml", "--json", *options(nodes.address, *settings))
    assert done.returncode == 0, done.stderr
    return check(directory, json.loads(done.stdout)["ledger"])


def check(directory: Path, ledger: Any) -> Trace:
    assert ledger["is_balanced"] and ledger["checksummed"] >= 2
    trace = read_trace(directory / "run" / "trace.jsonl")
    check_every_rollout_is_accounted_for(trace)
    check_every_command_ends_once(trace)
    assert replay(trace) is None
    pushed = {}
    for entry in trace.entries:
        if isinstance(entry.event, WeightsPushed):
            pushed[entry.event.version] = entry.event.checksum
        if isinstance(entry.event, WeightsLoaded):
            assert entry.event.checksum == pushed[entry.event.version]
    return trace


COMBINATIONS = [
    ("torch", 2, 0, "delta"),
    ("deepspeed", 1, 1, "lora"),
    ("deepspeed", 2, 3, "delta"),
]
"""Beside torch on one rank with whole weights, on which faults befall. All twelve take three minutes; on one machine
trainers meet every way (`test_engine_runs`)."""


@pytest.mark.parametrize(("backend", "num_ranks", "zero", "mode"), COMBINATIONS)
def test_one_run_file_executes_on_every_trainer_with_weights_every_way(
    nodes: Nodes, backend: str, num_ranks: int, zero: int, mode: str, tmp_path: Path
) -> None:
    settings = ("algorithm.steps=4", "rollout.replicas=1", *of_trainer(backend, num_ranks, zero))
    trace = execute(nodes, tmp_path, *settings, *MODES[mode])
    pushed = [e.event for e in trace.entries if isinstance(e.event, WeightsPushed)]
    assert all(event.wire_time > 0 and event.decode_time > 0 for event in pushed)


def test_weights_go_from_the_trainer_to_replicas_of_other_nodes_in_one_broadcast(
    nodes: Nodes, tmp_path: Path
) -> None:
    settings = ("algorithm.steps=6", "execute.checkpoint_every=1", "sync.wire=broadcast")
    trace = execute(nodes, tmp_path, *settings, faults=FAULTS)
    pushed = [e.event for e in trace.entries if isinstance(e.event, WeightsPushed)]
    assert pushed and all(event.wire_time > 0 for event in pushed)
    assert any(isinstance(entry.event, ReplicaLost) for entry in trace.entries)


HANGS = '[[faults]]\nkind = "replica-hangs"\nstep = 5\n'


def test_planned_faults_cost_no_rollout(nodes: Nodes, tmp_path: Path) -> None:
    settings = ("algorithm.steps=6", "execute.checkpoint_every=1", "execute.patience=5 s")
    trace = execute(nodes, tmp_path, *settings, faults=FAULTS + HANGS)
    events = [entry.event for entry in trace.entries]
    assert TrainerLost in [type(event) for event in events]
    assert any(event.wire_time > 0 for event in events if isinstance(event, WeightsPushed))
    lost = [event.reason for event in events if isinstance(event, ReplicaLost)]
    hung = ["no sign of life" in reason for reason in lost]
    assert any(hung) and not all(hung), lost


def test_a_node_that_dies_costs_no_rollout(nodes: Nodes, tmp_path: Path) -> None:
    prepare(tmp_path)
    metrics = tmp_path / "run" / "metrics.jsonl"
    killed: list[str] = []

    def kill() -> None:
        while not metrics.is_file() or metrics.read_text().count("\n") < 3:
            time.sleep(0.05)
        nodes.kill("first")
        killed.append("first")

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    settings = ("algorithm.steps=16", "rollout.replicas=4", "cluster.pools.far.gpus_per_node=4")
    done = streamrl("execute", tmp_path / "run.toml", "--json", *options(nodes.address, *settings))
    killer.join(60)
    nodes.mend()
    assert done.returncode == 0, done.stderr
    assert killed
    trace = check(tmp_path, json.loads(done.stdout)["ledger"])
    assert ReplicaLost in [type(entry.event) for entry in trace.entries]


def test_replicas_of_a_node_that_drains_move_their_rollouts(nodes: Nodes, tmp_path: Path) -> None:
    settings = ("algorithm.steps=24", "policies.max_restarts=0", "rollout.max_tokens=32")
    driver = driver_of(tmp_path, *options(nodes.address, *settings))
    wait_for_lines(tmp_path, 2, driver)
    drain = [sys.executable, "-m", "ray.scripts.scripts", "drain-node", "--address", nodes.address]
    node = ["--node-id", nodes.nodes["second"].node_id, "--deadline-remaining-seconds", "5"]
    why = ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "spot"]
    subprocess.run([*drain, *node, *why], check=True)
    assert driver.wait(300) == 0, (tmp_path / "driver.log").read_text()
    nodes.kill("second")
    nodes.mend()
    run = tmp_path / "run"
    trace = check(tmp_path, to_builtins(ledger_of_run(read_trace(run / "trace.jsonl"), run)))
    left = [e.event.replica for e in trace.entries if isinstance(e.event, ReplicaLeaving)]
    stopped = [e.event.replica for e in trace.entries if isinstance(e.event, ReplicaStopped)]
    assert left and left[0] in stopped
    assert not [e.event for e in trace.entries if isinstance(e.event, ReplicaLost)]


def driver_of(directory: Path, *arguments: str) -> subprocess.Popen[bytes]:
    """Prepare a run, and start its driver as a process of its own."""
    prepare(directory)
    command = [sys.executable, "-c", "from streamrl.cli import main; main()", "execute", "run.toml"]
    with (directory / "driver.log").open("wb") as log:
        return subprocess.Popen(
            [*command, *arguments],
            cwd=directory,
            stdout=subprocess.DEVNULL,
            stderr=log,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        )


def wait_for_lines(directory: Path, count: int, driver: subprocess.Popen[bytes]) -> None:
    metrics = directory / "run" / "metrics.jsonl"
    while not metrics.is_file() or metrics.read_text().count("\n") < count:
        assert driver.poll() is None, (directory / "driver.log").read_text()
        time.sleep(0.05)


def test_all_nodes_of_the_replicas_die_and_are_back_after_eight_seconds(
    nodes: Nodes, tmp_path: Path
) -> None:
    driver = driver_of(tmp_path, *options(nodes.address, "algorithm.steps=16"))
    wait_for_lines(tmp_path, 3, driver)
    nodes.kill("first")
    nodes.kill("second")
    time.sleep(8)
    nodes.mend()
    assert driver.wait(300) == 0, (tmp_path / "driver.log").read_text()
    run = tmp_path / "run"
    ledger = to_builtins(ledger_of_run(read_trace(run / "trace.jsonl"), run))
    trace = check(tmp_path, ledger)
    assert ReplicaLost in [type(entry.event) for entry in trace.entries]


COME_AND_GO = (
    "rollout.replicas=1",
    "policies.resize=adjust",
    "policies.max_replicas=3",
    "policies.resize_unit=1",
    "cluster.pools.far.gpus_per_node=4",
    "execute.checkpoint_every=2",
)


def test_a_driver_of_replicas_that_come_and_go_is_killed_and_leaves_nothing_and_is_resumed(
    nodes: Nodes, tmp_path: Path
) -> None:
    driver = driver_of(tmp_path, *options(nodes.address, *COME_AND_GO, "algorithm.steps=200"))
    wait_for_lines(tmp_path, 6, driver)
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    arguments = options(nodes.address, *COME_AND_GO, "algorithm.steps=10")
    done = streamrl("execute", tmp_path / "run.toml", "--resume", "--json", *arguments)
    assert done.returncode == 0, done.stderr
    check(tmp_path, json.loads(done.stdout)["ledger"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("execute.ray_address=10.255.255.1:1",), "no Ray cluster could be joined"),
        (("rollout.replicas=99", "cluster.pools.far.nodes=99"), "the run needs 99 CPUs"),
        (("execute.device=cuda:1",), "chooses GPUs itself"),
    ],
)
def test_what_the_cluster_has_not_is_one_line(
    nodes: Nodes, settings: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    prepare(tmp_path)
    arguments = options(nodes.address, *settings)
    done = streamrl("execute", tmp_path / "run.toml", *arguments)
    assert done.returncode == 2
    assert message in done.stderr and done.stderr.count("\n") <= 2, done.stderr
    assert not (tmp_path / "run").exists()
