"""Plans of several jobs: cluster files, what a job gets at each share, and what runs the schedule."""

from __future__ import annotations

import json
import os
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from streamrl.cli.plan_jobs import JOBS_PNG
from streamrl.export.job_scripts import (
    ExportedSchedule,
    ExportedStretch,
    scheduler_file,
    waits_of,
)
from streamrl.hardware.resolved import resolve
from streamrl.report.figures import jobs_figure
from streamrl.report.jobs_report import MEANINGS, jobs_report
from streamrl.runfile.cluster_config import PoolConfig
from streamrl.runfile.files import load_run
from streamrl.runfile.jobs_file import cluster_of, is_cluster_file, load_jobs
from streamrl.runfile.key_reference import cluster_tables, find
from streamrl.sim.jobs.plan import CLUSTER_JSON, ClusterPlan, read_cluster_plan
from streamrl.sim.jobs.planner import plan_jobs
from streamrl.sim.jobs.sharing import NAMES
from streamrl.sim.jobs.speeds import checkpoint_bytes, nodes_of
from streamrl.sim.parallel import spread_over
from streamrl.sim.steady_state import measure_steady
from tests.command_line import streamrl
from tests.runs import make_table

EXAMPLE = Path(__file__).parents[1] / "examples" / "clusters" / "two-jobs.toml"
PLAN: dict[str, Any] = {
    "mixes_replicas": False,
    "rollout_tensor_parallel": [1],
    "trainer_tensor_parallel": [1, 2],
    "pipeline_parallel": [1],
    "micro_batch": [2],
    "sync_modes": ["full"],
    "systems": ["colocated", "stream-async"],
    "finalists": 1,
}
POOL = {"gpu": "h800", "nodes": 2, "price": 2.0, "owned": True}


def write_files(folder: Path, **changes: Any) -> Path:
    """Write a cluster file of two small jobs, with top-level keys replaced."""
    run = make_table({"model.name": "qwen2.5-0.5b", "plan": PLAN, "simulate": {"max_steps": 3}})
    run["algorithm"] |= {"prompts_per_step": 8, "steps": 40}
    (folder / "run.toml").write_text(tomli_w.dumps(run))
    table: dict[str, Any] = {
        "cluster": {"pools": {"h800": POOL}},
        "jobs": [
            {"name": "long", "run": "run.toml"},
            {"name": "short", "run": "run.toml", "set": ["algorithm.steps=10"], "priority": 4},
        ],
        "schedule": {"start_time": "20 s", "slice": "2 min"},
    }
    path = folder / "cluster.toml"
    path.write_text(tomli_w.dumps({**table, **changes}))
    return path


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Plan the two jobs by the command line once, and return the directory and the printed JSON."""
    folder = tmp_path_factory.mktemp("jobs")
    path = write_files(folder)
    with spread_over(partial(ThreadPoolExecutor, 1)):
        done = streamrl("plan", path, "-o", folder / "plan", "--export", "slurm", "--json")
    assert done.returncode == 0, done.stderr
    return folder / "plan", json.loads(done.stdout)


# Plans --------------------------------------------------------------------------------------------


def test_two_jobs_on_one_pool_are_compared_with_each_alone(
    written: tuple[Path, dict[str, Any]],
) -> None:
    plan = read_cluster_plan(written[0] / CLUSTER_JSON)
    assert {option.name for option in plan.options} == set(NAMES) == set(MEANINGS)
    for option in plan.options:
        assert 0 < option.utilisation <= 1
        for own, alone in zip(option.jobs, plan.alone, strict=True):
            assert own.seconds >= alone.seconds - 1e-6, "a job with others is not faster than alone"
    value = plan.value_of(plan.choice)
    assert all(value <= plan.value_of(option) + 1e-9 for option in plan.options)
    assert plan.check is None or plan.check.ratio <= 1.02


def test_the_json_of_the_command_is_the_file_that_it_writes(
    written: tuple[Path, dict[str, Any]],
) -> None:
    folder, printed = written
    assert printed == json.loads((folder / CLUSTER_JSON).read_bytes())
    assert (folder / JOBS_PNG).read_bytes().startswith(b"\x89PNG")


def test_a_written_run_file_simulates_to_the_speed_of_its_share(
    written: tuple[Path, dict[str, Any]],
) -> None:
    folder, _ = written
    plan = read_cluster_plan(folder / CLUSTER_JSON)
    for place, share in sorted({(each.job, each.share) for each in plan.choice.stretches}):
        job = plan.jobs[place]
        found = next(each for each in job.shares if each.share == share)
        run = load_run(folder / f"{job.name}-{sum(found.gpus.values())}-gpus.toml")
        assert run.algorithm.steps == job.steps
        assert run.cluster.pools["h800"].num_gpus == found.gpus["h800"]
        assert run.execute.output == str(folder / "runs" / job.name)
        metrics = measure_steady(run)
        assert found.step_time_band.low <= metrics.step_time <= found.step_time_band.high
        whole = metrics.whole_run
        assert whole is not None
        assert found.step_time * job.steps == pytest.approx(whole.seconds - whole.start_time)
        assert found.utilisation <= sum(metrics.busy.values()) + 1e-9
        trainer = resolve(run).trainer
        seconds = checkpoint_bytes(trainer) / 1e9 / nodes_of(trainer)
        assert found.save_time == found.load_time == pytest.approx(seconds)


def test_a_checkpoint_has_weights_and_optimizer_states(
    written: tuple[Path, dict[str, Any]],
) -> None:
    run = load_run(next(written[0].glob("long-*-gpus.toml")))
    trainer = resolve(run).trainer
    # bfloat16 weights, a float32 copy and two moments
    assert checkpoint_bytes(trainer) == trainer.model.num_parameters * (2 + 12)


def test_an_existing_plan_is_kept(written: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = written
    done = streamrl("plan", folder.parent / "cluster.toml", "-o", folder)
    assert done.returncode == 2 and "exists already; use --force" in done.stderr


def test_the_report_has_each_way_of_sharing_and_each_job(
    written: tuple[Path, dict[str, Any]],
) -> None:
    plan = read_cluster_plan(written[0] / CLUSTER_JSON)
    text = shown(plan)
    for name in (*NAMES, "long", "short", "GPUs busy alone", "another seed"):
        assert name in text or plan.check is None, name
    texts = [each.get_text() for axes in jobs_figure(plan).axes for each in axes.texts]
    assert {"long", "short", f"{plan.chosen} *"} <= set(texts)


def shown(plan: ClusterPlan) -> str:
    from rich.console import Console

    console = Console(width=160)
    with console.capture() as capture:
        console.print(jobs_report(plan))
    return capture.get()


@pytest.mark.parametrize(
    ("long", "short", "owned"), [((3000, 32), (500, 64), True), ((800, 64), (900, 32), False)]
)
def test_a_plan_is_not_worse_than_static_halves_with_simulations_it_has_not_seen(
    long: tuple[int, int], short: tuple[int, int], owned: bool, tmp_path: Path
) -> None:
    """`make bench-jobs` does so with twenty larger pairs."""
    jobs = [
        {
            "name": name,
            "run": "run.toml",
            "set": [f"algorithm.steps={steps}", f"algorithm.prompts_per_step={prompts}"],
        }
        for name, (steps, prompts) in (("long", long), ("short", short))
    ]
    cluster = {"pools": {"h800": {**POOL, "nodes": 1, "gpus_per_node": 2, "owned": owned}}}
    path = write_files(tmp_path, jobs=jobs, cluster=cluster, schedule={"start_time": "5 s"})
    with spread_over(partial(ThreadPoolExecutor, 1)):
        plan = plan_jobs(load_jobs(path)).plan
    assert plan.chosen != "equal-split" and plan.check is not None
    assert plan.check.ratio <= 1.02
    assert plan.check.ratio == pytest.approx(plan.check.planned_ratio, rel=0.1)


# Cluster files ------------------------------------------------------------------------------------


def test_a_cluster_file_is_told_from_a_run_file(tmp_path: Path) -> None:
    assert is_cluster_file(EXAMPLE)
    assert not is_cluster_file(EXAMPLE.parents[1] / "h20-h800.toml")
    assert not is_cluster_file(tmp_path / "missing.toml")


def test_the_example_has_two_jobs_on_four_shares() -> None:
    jobs = load_jobs(EXAMPLE)
    assert jobs.num_shares == 4
    assert [job.offer.run.algorithm.steps for job in jobs.jobs] == [300, 100]
    assert {job.offer.run.rollout.pool for job in jobs.jobs} == {"h800"}
    assert jobs.jobs[1].config.deadline == 12 * 3600


def test_a_share_is_rounded_down_to_nodes_and_the_last_one_is_the_whole_pool() -> None:
    pools = {"a": PoolConfig(gpu="h800", nodes=13), "b": PoolConfig(gpu="h20", nodes=1)}
    cluster = load_jobs(EXAMPLE).cluster
    from msgspec.structs import replace

    shared = replace(cluster, pools=pools)
    sizes = [cluster_of(shared, share, 8).pools for share in range(1, 9)]
    assert [each["a"].nodes for each in sizes] == [1, 3, 4, 6, 8, 9, 11, 13]
    assert [each["b"].num_gpus for each in sizes] == [1, 2, 3, 4, 5, 6, 7, 8]


JOB = {"name": "a", "run": "run.toml"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"jobs": []}, "jobs must have 1 to 8 entries, got 0"),
        ({"jobs": [{**JOB, "name": str(n)} for n in range(9)]}, "jobs must have 1 to 8 entries"),
        ({"jobs": [JOB, JOB]}, "jobs.1.name is 'a', as that of another job"),
        ({"jobs": [{**JOB, "name": "A b"}]}, "jobs.0.name is 'A b'; write up to 40 small letters"),
        ({"jobs": [{"name": "a"}]}, "jobs.0.run is missing"),
        (
            {"jobs": [{**JOB, "prio": 3}]},
            "jobs.0.prio is not a key of a cluster file; did you mean",
        ),
        ({"jobs": [{**JOB, "priority": 0}]}, r"jobs.0.priority must be in \(0, 1000000\], got 0"),
        ({"jobs": [{**JOB, "deadline": "soon"}]}, "jobs.0.deadline: 'soon' needs a number"),
        ({"jobs": [{**JOB, "run": "no.toml"}]}, r"jobs.0 \(a\): .*no.toml: no such run file"),
        (
            {"jobs": [{**JOB, "set": ["algorithm.stops=3"]}]},
            r"jobs.0 \(a\): algorithm.stops is not",
        ),
        (
            {"jobs": [{**JOB, "set": ["algorithm.steps=3", "cluster.pools.h800.price=99"]}]},
            "jobs.0.set names cluster.pools.h800.price, which has no effect: the cluster file has",
        ),
        ({"jobs": [{**JOB, "set": ["plan.budget_per_day=1"]}]}, "no effect: jobs have no budgets"),
        ({"jobs": [{**JOB, "set": ["plan.deadline='1 h'"]}]}, "no effect: a job has jobs.deadline"),
        (
            {"jobs": [{**JOB, "deadline": "1 h", "submitted": "3 h"}]},
            r"jobs.0.deadline is .*, which is not after jobs.0.submitted \(.*from the start of the",
        ),
        ({"schedule": {"slice": "1 s"}}, "schedule.slice must be in"),
        ({"schedule": {"shares": 3}}, "schedule.shares is 3, and the smallest pool has 2 nodes"),
        ({"schedule": {"sharing": ["fair"]}}, "schedule.sharing.0 must be one of equal-split"),
        ({"schedule": {"sharing": []}}, r"schedule.sharing is empty, got \[\]; remove it, or list"),
        (
            {"cluster": {"pools": {"h800": {**POOL, "owned": False, "minimum_term": "1 day"}}}},
            "cluster.pools.h800.minimum_term has no effect on several jobs",
        ),
        (
            {"cluster": {"pools": {"h800": POOL}, "billing": {"setup_time": "1 h"}}},
            "cluster.billing.setup_time has no effect on several jobs",
        ),
        (
            {"cluster": {"pools": {"h800": {**POOL, "nods": 3}}}},
            "cluster.pools.h800.nods is not a key",
        ),
        ({"cluster": {"pools": {}}}, "."),
    ],
)
def test_a_wrong_cluster_file_is_refused_with_key_value_and_remedy(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        load_jobs(write_files(tmp_path, **changes))


@pytest.mark.parametrize("command", ["simulate", "doctor", "execute"])
def test_commands_of_one_run_say_that_a_cluster_file_has_several(command: str) -> None:
    done = streamrl(command, EXAMPLE)
    assert done.returncode == 2
    assert done.stderr.endswith("cluster file with several jobs; only `streamrl plan` reads it\n")


def test_settings_of_the_command_line_change_the_cluster_file(tmp_path: Path) -> None:
    path = write_files(tmp_path)
    jobs = load_jobs(path, ["schedule.objective=dollars", "jobs.0.priority=3"])
    assert (jobs.schedule.objective, jobs.jobs[0].config.priority) == ("dollars", 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--take", "2"], "--take applies to a run file"),
        (["--for", "verl"], "--for applies to a run file"),
        (["--export", "verl"], "--export must be one of slurm, ray, kueue for a cluster file"),
        (["--steps", "3"], "--steps"),
    ],
)
def test_options_of_a_single_run_are_refused(
    options: list[str], message: str, tmp_path: Path
) -> None:
    done = streamrl("plan", write_files(tmp_path), *options)
    assert done.returncode == 2 and message in done.stderr


def test_a_plan_that_kueue_cannot_run_is_written_all_the_same(tmp_path: Path) -> None:
    jobs = [{**JOB, "name": name, "set": ["algorithm.steps=900"]} for name in "ab"]
    pools = {"h800": {**POOL, "nodes": 1, "gpus_per_node": 2}}
    schedule = {"start_time": "5 s", "sharing": ["time-slicing"]}
    path = write_files(tmp_path, jobs=jobs, cluster={"pools": pools}, schedule=schedule)
    with spread_over(partial(ThreadPoolExecutor, 1)):
        done = streamrl("plan", path, "-o", tmp_path / "out", "--export", "kueue")
    assert done.returncode == 1
    assert "kueue.json was not: Kueue has no time slices; export to slurm or ray" in done.stderr
    assert (tmp_path / "out" / CLUSTER_JSON).exists()
    assert "Share 2 h800 by time-slicing: jobs take turns on all GPUs." in done.stdout


@pytest.mark.parametrize(
    ("names", "part"),
    [
        (["my pool$x"], "cluster.pools.my pool$x: --export needs a name of letters and digits"),
        (["h800-"], "cluster.pools.h800-: --export needs"),
        (["h_800", "H-800"], "cluster.pools.H-800: Kubernetes takes it for the pool h_800"),
    ],
)
def test_a_pool_that_a_scheduler_cannot_name_is_refused_before_the_search(
    names: list[str], part: str, tmp_path: Path
) -> None:
    pools = {name: {**POOL, "nodes": 1} for name in names}
    settings = [f"{role}.pool={names[0]!r}" for role in ("rollout", "trainer")]
    path = write_files(tmp_path, jobs=[{**JOB, "set": settings}], cluster={"pools": pools})
    done = streamrl("plan", path, "-o", tmp_path / "out", "--export", "kueue")
    assert done.returncode == 2 and part in done.stderr and done.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_jobs_with_the_same_run_directory_are_refused_before_the_search(tmp_path: Path) -> None:
    same = {**JOB, "set": [*JOB.get("set", []), "execute.output=runs/shared"]}
    path = write_files(tmp_path, jobs=[{**same, "name": name} for name in "ab"])
    done = streamrl("plan", path, "-o", tmp_path / "out")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "jobs.1 (b): execute.output is " in done.stderr
    assert "as that of job a; give each job its own: jobs.1.set = [" in done.stderr
    assert not (tmp_path / "out" / CLUSTER_JSON).exists()


def test_a_job_that_fits_on_no_share_is_named(tmp_path: Path) -> None:
    path = write_files(tmp_path, jobs=[{**JOB, "set": ["model.name=deepseek-v3"]}])
    with spread_over(partial(ThreadPoolExecutor, 1)):
        done = streamrl("plan", path)
    assert done.returncode == 2
    assert "job a has no plan on any share of the pools: " in done.stderr


def test_every_key_of_a_cluster_file_is_explained() -> None:
    keys = [key for table in cluster_tables() for key in table.keys]
    assert [key.name for key in keys if not key.text] == []
    assert find("schedule.slice") in keys and find("jobs.0.deadline") in keys


# What runs a schedule -----------------------------------------------------------------------------


def test_a_stretch_waits_for_the_last_holders_of_its_gpus() -> None:
    rows = [
        ("a", 0.0, 10.0, 2),
        ("b", 0.0, 20.0, 2),
        ("a", 10.0, 30.0, 1),
        ("c", 15.0, 40.0, 1),
        ("a", 40.0, 50.0, 4),
    ]
    # the second stretch of a keeps a GPU of the first, c takes the other one, and the last takes all
    assert waits_of(rows, 4) == [[], [], [0], [0], [1, 2, 3]]
    # a job keeps its own GPUs, although others are free for longer
    assert waits_of([("a", 0.0, 9.0, 2), ("b", 0.0, 5.0, 2), ("a", 9.0, 20.0, 2)], 4)[2] == [0]


def stretches() -> list[ExportedStretch]:
    """Return the schedule of a job that gets the GPUs of another when that ends."""
    pools = [{"h800": PoolConfig(gpu="h800", nodes=nodes)} for nodes in (1, 1, 2)]
    rows = [("a", 0.0, 7200.0), ("b", 0.0, 3600.0), ("a", 7200.0, 9000.0)]
    return [
        ExportedStretch(
            job=job,
            run_file=f"{job}-{8 * own['h800'].nodes}-gpus.toml",
            pools=own,
            start=start,
            end=end,
            is_first=place < 2,
            is_last=place > 0,
            waits_for=[0, 1] if place == 2 else [],
            priority=1.0,
            submitted=start if place < 2 else 0.0,
        )
        for place, ((job, start, end), own) in enumerate(zip(rows, pools, strict=True))
    ]


def exported(*chosen: ExportedStretch, takes_turns: bool = False) -> ExportedSchedule:
    return ExportedSchedule(chosen, {"h800": PoolConfig(gpu="h800", nodes=2)}, takes_turns)


def run_script(folder: Path, text: str, **stubs: str) -> list[str]:
    """Run a script where each command of `stubs` is one that notes its arguments; return the notes."""
    for name, line in stubs.items():
        (folder / name).write_text(f'#!/usr/bin/env bash\necho "{name} $*" >> "$NOTES"\n{line}\n')
        (folder / name).chmod(0o755)
    (folder / "script.sh").write_text(text)
    environment = {"PATH": f"{folder}:{os.environ['PATH']}", "NOTES": str(folder / "notes")}
    subprocess.run(["bash", "script.sh"], cwd=folder, env=environment, check=True, timeout=30)
    return (folder / "notes").read_text().splitlines()


def test_slurm_gets_a_job_for_each_stretch_with_those_that_it_waits_for(tmp_path: Path) -> None:
    text = scheduler_file("slurm", exported(*stretches()))
    notes = run_script(tmp_path, text, sbatch='wc -l < "$NOTES" | tr -d " "')
    one = "--nodes=1 --gpus-per-node=8 examples/clusters/slurm.sh"
    assert notes == [
        f"sbatch --parsable --job-name=a {one} a-8-gpus.toml --set execute.deadline=2 h",
        f"sbatch --parsable --job-name=b {one} b-8-gpus.toml",
        "sbatch --parsable --job-name=a --dependency=afterany:1:2 --nodes=2 --gpus-per-node=8 "
        "examples/clusters/slurm.sh a-16-gpus.toml --resume",
    ]


def test_ray_runs_a_stretch_after_those_that_it_waits_for(tmp_path: Path) -> None:
    text = scheduler_file("ray", exported(*stretches()))
    notes = run_script(tmp_path, text, ray='[ "$7" != b-8-gpus.toml ] || sleep 0.3; exit 1')
    submit = "ray job submit --working-dir . -- streamrl execute"
    ray = "--set execute.launcher=ray"
    assert sorted(notes[:2]) == [
        f"{submit} a-8-gpus.toml --set execute.deadline=2 h {ray}",
        f"{submit} b-8-gpus.toml {ray}",
    ]
    assert notes[2] == f"{submit} a-16-gpus.toml --resume {ray}"


CLOCK = 'echo "sleep $1" >> "$NOTES"; SECONDS=$((SECONDS + $1));'
"""A shell function that lets time pass."""


def submitted_later() -> list[ExportedStretch]:
    """Return jobs that are submitted hourly: two on GPUs of their own, and one that waits for the first."""
    first, second, _ = (each._replace(is_first=True, is_last=True) for each in stretches())
    hour = 3600.0
    return [
        first._replace(end=100.0),
        second._replace(start=hour, submitted=hour, end=2 * hour),
        second._replace(job="c", start=2 * hour, submitted=2 * hour, end=3 * hour),
        second._replace(job="d", start=30 * hour, submitted=30 * hour, waits_for=[0]),
    ]


def test_no_job_starts_before_it_is_submitted(tmp_path: Path) -> None:
    schedule = exported(*submitted_later())
    text = scheduler_file("slurm", schedule)
    notes = run_script(tmp_path, text, sbatch='wc -l < "$NOTES" | tr -d " "')
    begins = [re.findall(r"--begin=now\+(\d+)", note) for note in notes]
    assert begins == [[], ["3600"], ["7200"], ["108000"]]
    assert "--dependency=afterany:1 " in notes[3]


def test_ray_jobs_start_at_their_time_from_the_start_of_the_script(tmp_path: Path) -> None:
    text = scheduler_file("ray", exported(*submitted_later()))
    clock = text.replace("set -euo pipefail", f"set -euo pipefail\nsleep() {{ {CLOCK} }}")
    assert clock != text
    notes = run_script(tmp_path, clock, ray="true")
    slept = [int(note.split()[1]) for note in notes if note.startswith("sleep")]
    # the script itself takes some time
    assert slept == pytest.approx([3600, 3600, 28 * 3600], abs=20)


def test_kueue_gets_one_queue_and_a_job_with_a_priority_for_each() -> None:
    first, second, _ = stretches()
    text = scheduler_file("kueue", exported(first._replace(is_last=True), second))
    items = json.loads(text)["items"]
    kinds = [item["kind"] for item in items]
    assert kinds.count("RayJob") == kinds.count("LocalQueue") == 2
    queue = items[kinds.index("ClusterQueue")]["spec"]
    (flavor,) = queue["resourceGroups"][0]["flavors"]
    assert flavor["resources"] == [{"name": "nvidia.com/gpu", "nominalQuota": 16}]
    assert queue["preemption"] == {"withinClusterQueue": "LowerPriority"}
    job = items[kinds.index("RayJob")]
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "a"
    assert job["spec"]["suspend"] is True
    head = job["spec"]["rayClusterSpec"]["headGroupSpec"]
    assert json.loads(json.loads(head["rayStartParams"]["resources"])) == {"pool-h800": 1}
    assert "--resume || " in job["spec"]["entrypoint"]


def test_kueue_refuses_what_it_cannot_do() -> None:
    with pytest.raises(ValueError, match="Kueue cannot change the GPUs of job a; export to slurm"):
        scheduler_file("kueue", exported(*stretches()))
    with pytest.raises(ValueError, match="Kueue has no time slices; export to slurm or ray"):
        scheduler_file("kueue", exported(*stretches()[:2], takes_turns=True))


def test_the_written_script_names_files_that_were_written(
    written: tuple[Path, dict[str, Any]],
) -> None:
    folder, _ = written
    named = {
        word
        for line in (folder / "slurm.sh").read_text().splitlines()
        for word in line.replace(")", " ").replace('"', " ").split()
        if word.endswith("-gpus.toml")
    }
    assert named and named == {path.name for path in folder.glob("*-gpus.toml")}
