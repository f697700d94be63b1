"""`streamrl profile accept PLAN`: test whether a rented node is as fast as a plan assumed."""

from __future__ import annotations

import shutil
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import msgspec
import typer

from streamrl.cli.lazy_commands import OUTPUT
from streamrl.cli.output import echo
from streamrl.cli.profile_measure import missing_packages, need_executor
from streamrl.cli.progress import make_progress
from streamrl.cli.shared import (
    AsJson,
    Overrides,
    claim_directory,
    print_json,
    stdout_console,
)
from streamrl.hardware.node_readings import DecodeReading, LinkReading, NodeReading
from streamrl.hardware.resolved import ResolvedRun, resolve
from streamrl.report.acceptance_table import acceptance_lines, acceptance_table
from streamrl.runfile.files import load_run
from streamrl.runfile.formatting import listing
from streamrl.runfile.plan_config import PlanConfig
from streamrl.runfile.result_files import write_file
from streamrl.sim.acceptance.outlook import DecodePoint, find_outlook
from streamrl.sim.acceptance.points import (
    PlannedLink,
    compare_decode,
    compare_link,
    compare_points,
    link_of,
    points_of,
)
from streamrl.sim.acceptance.result import Acceptance, Comparison, Decision, Outlook
from streamrl.sim.acceptance.scaled_profiles import write_scaled
from streamrl.sim.costs.costs import Costs
from streamrl.sim.planner.plan import PLAN_JSON, PLAN_TOML

if TYPE_CHECKING:
    from streamrl.executor.profiling.node_benchmarks import Node

MINUTES = 10.0
MOST_PORT = 65_535
LEFT_FOR_PLAN = 0.2
"""Share of the time that is left for the decode step and the predictions."""
RESULT, PROFILES = "acceptance.json", "profiles"
MOST_RUNNING, MOST_CONTEXT, LEAST_CONTEXT = 64, 2048, 64
"""Rollouts of the measured decode step, and tokens of each."""


def accept(
    plan: Annotated[
        Path,
        typer.Argument(metavar="PLAN", help="A plan.json, the directory of a plan, or a run file."),
    ],
    peer: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Also measure the link to this machine, where `streamrl profile listen PORT --host HOST` runs.",
        ),
    ] = None,
    minutes: Annotated[
        float, typer.Option(help="Time limit. What is left out keeps its planned figure.")
    ] = MINUTES,
    limit: Annotated[
        float | None,
        typer.Option(
            help="Return the node if the plan's step grows by more than this share. Default: plan.tolerance, the price "
            "difference that the planner accepts for a faster plan.",
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help=f"Write {RESULT} to this directory, and {PROFILES}/ with the measured figures, for STREAMRL_PROFILES.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Test a rented node: keep it, or return it?

    It measures this machine's GPUs, NCCL and the link to a peer, and predicts the plan again from what it measured. The
    exit status is 0 for keep, 1 for return or if nothing could be measured, and 2 for wrong input. `profile --accept PLAN` is the same.

    Example: streamrl profile accept plans/7b -o accepted
    """
    began_at = time.monotonic()
    run_file = _run_file(plan)
    run = load_run(run_file, overrides or ())
    limit = run.plan.tolerance if limit is None else limit
    _check(minutes, limit)
    if output is not None:
        claim_directory(output)
        if (output / PROFILES).exists():
            raise ValueError(f"{output / PROFILES} exists already; name another directory with -o")
    need_executor("transformers")
    from streamrl.executor.directory_lock import OwnedDirectory
    from streamrl.executor.transfer.shared_memory import replaced_directory

    rented = _Rented.of(resolve(run), peer)
    Costs.load(run)  # refuses a plan that cannot run, before any measurement
    with make_progress() as progress, OwnedDirectory("accept") as own:
        task = progress.add_task("measure", total=None, facts="starting")

        def watch(what: str) -> None:
            progress.update(task, advance=1, facts=what)

        found = _measure(rented, began_at + 60 * minutes * (1 - LEFT_FOR_PLAN), watch)
        watch("the plan")
        whole = _predict(run_file, overrides or (), rented, found, own / PROFILES)
        if not any(row.changes for row in whole.comparisons):
            raise RuntimeError(
                f"nothing that the plan rests on was measured within --minutes {minutes:g}, so the node is neither kept "
                "nor returned; allow more time"
            )
        if output is not None:
            with replaced_directory(output / PROFILES) as partial:
                shutil.copytree(own / PROFILES, partial, dirs_exist_ok=True)
    decision, reasons = _decide(whole, run.plan, limit)
    node = rented.node
    result = Acceptance(
        plan=str(run_file),
        gpu=node.gpu,
        device=node.device,
        num_gpus=rented.num_gpus,
        comparisons=whole.comparisons,
        before=whole.before,
        after=whole.after,
        kept=found.kept,
        limit=limit,
        decision=decision,
        reasons=reasons,
        profiles=None if output is None else str(output / PROFILES),
        minutes=(time.monotonic() - began_at) / 60,
    )
    if output is not None:
        write_file(output / RESULT, msgspec.json.encode(result))
    if as_json:
        print_json(result)
    else:
        stdout_console().print(acceptance_table(result))
        for line in acceptance_lines(result):
            echo(line)
        if output is not None:
            echo(
                f"with these figures: STREAMRL_PROFILES={output / PROFILES} streamrl plan RUN.toml"
            )
    if decision == "return":
        raise typer.Exit(1)


def listen(
    port: Annotated[int, typer.Argument(metavar="PORT", help="TCP port to listen on.")],
    host: Annotated[
        str,
        typer.Option(
            help="Address of this machine to listen on: that in the network between the nodes. The default takes only "
            "connections of this machine."
        ),
    ] = "127.0.0.1",
    minutes: Annotated[float, typer.Option(help="Time to wait for the other machine.")] = MINUTES,
    as_json: AsJson = False,
) -> None:
    """Be the other end of the link that `profile accept --peer` measures.

    Whoever reaches the address can take part in the measurement, so name one of a private network.

    Example: streamrl profile listen 29500 --host 10.0.0.7
    """
    _check(minutes, 0.0)
    if not 1 <= port <= MOST_PORT:
        raise ValueError(f"PORT must be from 1 to {MOST_PORT}, got {port}")
    _check_address(host, port)
    need_executor("transformers")
    from streamrl.executor.profiling.peer_link import measure_link

    found = measure_link(host, port, listens=True, backend=None, patience=60 * minutes)
    if as_json:
        print_json(found)
    else:
        rate, late = found.bandwidth / 1e9, found.latency * 1e3
        echo(f"{rate:.3g} GB/s and {late:.3g} ms one way, measured with {found.backend}")


def _check_address(host: str, port: int) -> None:
    """Raise `ValueError` if this machine cannot listen on an address: torch would wait there without a word."""
    try:
        if not host:
            raise OSError("the address is empty")
        socket.create_server((host, port)).close()
    except OSError as error:
        reason = error.strerror or error
        raise ValueError(f"--host {host} PORT {port}: cannot listen there: {reason}") from None


def _run_file(plan: Path) -> Path:
    """Return the run file of a plan: beside its plan.json, in its directory, or the file itself."""
    folder = plan if plan.is_dir() else plan.parent
    is_plan = plan.is_dir() or plan.name == PLAN_JSON
    found = folder / PLAN_TOML if is_plan else plan
    if is_plan and not found.is_file():
        raise ValueError(
            f"{folder} has no {PLAN_TOML}: name a plan of `streamrl plan -o`, or a run file"
        )
    return found


def _check(minutes: float, limit: float) -> None:
    if not 0 < minutes <= MINUTES:
        raise ValueError(f"--minutes must be above 0 and at most {MINUTES:g}, got {minutes:g}")
    if not limit >= 0:
        raise ValueError(f"--limit must be a share of 0 or more, got {limit:g}")


class _Rented(NamedTuple):
    """This node, and its part in the plan."""

    node: Node
    pool: str
    """The first pool of the plan with such GPUs."""
    resolved: ResolvedRun
    num_gpus: int
    """GPUs of the node that the plan uses."""
    peer: str | None
    link: PlannedLink | None
    """The link to the peer; None without one."""

    @classmethod
    def of(cls, resolved: ResolvedRun, peer: str | None) -> _Rented:
        """Find this machine's GPUs in the plan.

        Raises:
            ValueError: the plan does not use them, or uses more of a node; or there is no link to measure.
        """
        from streamrl.executor.launchers.placement import usable_cores
        from streamrl.executor.profiling.node_benchmarks import find_node

        node, pools = find_node(usable_cores()), resolved.run.cluster.pools
        own = [name for name, pool in pools.items() if pool.gpu == node.gpu]
        if not own:
            planned = listing([f"{pool.gpu} ({name})" for name, pool in pools.items()])
            raise ValueError(
                f"the plan's pools have {planned}, but this machine has {node.device} ({node.gpu}); "
                "run the test on a node of the plan"
            )
        pool = pools[own[0]]
        if pool.gpus_per_node > node.num_gpus:
            raise ValueError(
                f"cluster.pools.{own[0]}.gpus_per_node is {pool.gpus_per_node}, but this machine has "
                f"{node.num_gpus} of {node.gpu}; test a whole node, or correct the run file"
            )
        link = None if peer is None else link_of(resolved.run.cluster, own[0])
        if peer is not None and link is None:
            raise ValueError(
                f"--peer {peer}: the plan has one node of {own[0]} and no link, so there is nothing to measure"
            )
        return cls(node, own[0], resolved, min(pool.num_gpus, pool.gpus_per_node), peer, link)


class _Found(NamedTuple):
    """What was measured, and what was not."""

    readings: list[NodeReading]
    link: LinkReading | None
    decode: DecodeReading | None
    kept: list[str]


def _measure(rented: _Rented, ends_at: float, watch: Callable[[str], None]) -> _Found:
    """Measure the link, the GPUs and a decode step, until the time is over."""
    from streamrl.executor.profiling.node_benchmarks import measure_points

    link = None
    if rented.peer is not None and rented.link is not None:
        watch(rented.link.name)
        link = _measure_link(rented.peer, rented.link, ends_at)
    points = points_of(rented.resolved, rented.node.gpu, rented.num_gpus)
    readings = measure_points(points, rented.num_gpus, lambda: time.monotonic() > ends_at, watch)
    kept = [f"{point.text} (no time)" for point in points[len(readings) :]]
    why = _why_no_decode(rented, ends_at)
    decode = None
    if why is None:
        watch("decode step")
        decode = _measure_decode(rented)
    else:
        kept.append(f"decode step ({why})")
    return _Found(readings, link, decode, [*kept, *_never_measured(rented, decode)])


def _never_measured(rented: _Rented, decode: DecodeReading | None) -> Iterator[str]:
    """Yield what keeps its planned figure, whatever the time."""
    run, gpu = rented.resolved.run, rented.node.gpu
    if decode is None:
        yield "attention"
        if rented.resolved.model.experts is not None:
            yield "experts and all-to-all"
        yield "overheads of the inference engine"
    if rented.link is None and link_of(run.cluster, rented.pool) is not None:
        yield "the link to other nodes (no --peer)"
    if run.costs.profile is not None:
        yield f"training and weight sync, which rest on {run.costs.profile}"
    for name, pool in run.cluster.pools.items():
        if pool.gpu != gpu:
            yield f"all seconds of {name} ({pool.gpu})"


def _measure_link(peer: str, link: PlannedLink, ends_at: float) -> LinkReading:
    from streamrl.executor.profiling.peer_link import measure_link

    host, _, port = peer.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"--peer must be HOST:PORT, got {peer!r}")
    return measure_link(
        host,
        int(port),
        listens=False,
        backend="nccl" if link.between_gpus else "gloo",
        patience=max(1.0, ends_at - time.monotonic()),
    )


def _why_no_decode(rented: _Rented, ends_at: float) -> str | None:
    """Return why no decode step is measured; None if one is."""
    run, replica = rented.resolved.run, rented.resolved.replica
    if replica.pool.gpu != rented.node.gpu:
        return f"replicas are on {replica.pool.gpu}"
    if run.model.path is None:
        return "model.path is not set"
    if replica.config.tensor_parallel > 1:
        return f"it would need {replica.config.tensor_parallel} GPUs"
    no_time = "no time" if time.monotonic() > ends_at else None
    return next(missing_packages(replica.config.backend), no_time)


def _measure_decode(rented: _Rented) -> DecodeReading:
    from streamrl.executor.profiling.measurements import Limits, longest_prefix
    from streamrl.executor.profiling.profile_file import make_setup
    from streamrl.executor.profiling.profiler import measure_decode

    replica, gpu = rented.resolved.replica, rented.node.gpu
    backend = replica.config.backend
    longest = replica.prompt_tokens + replica.config.max_tokens
    most = min(MOST_CONTEXT, max(LEAST_CONTEXT, longest))
    running = min(MOST_RUNNING, replica.config.max_running)
    setup = make_setup(
        Path(str(rented.resolved.run.model.path)),
        gpu=gpu,
        dtype=replica.precision.wide,
        threads=1 if gpu == "cpu" else None,
        limits=Limits(
            max_running=running,
            max_context=most,
            max_tokens_per_pass=most,
            longest_prefix=longest_prefix(backend, gpu),
        ),
        is_quick=True,
        backend=backend,
    )
    return measure_decode(setup, running, most // 2)


class _Predicted(NamedTuple):
    """The plan before and after, and what was measured beside what was expected."""

    comparisons: list[Comparison]
    before: Outlook
    after: Outlook


def _predict(
    run_file: Path, overrides: Sequence[str], rented: _Rented, found: _Found, scaled: Path
) -> _Predicted:
    """Write the scaled profiles, and predict the plan with the profiles in use and with these."""
    gpu, decode, settings = rented.node.gpu, found.decode, list(overrides)
    point = None if decode is None else DecodePoint(decode.running, decode.context)
    before = find_outlook(run_file, settings, point)
    rows = compare_points(found.readings, gpu)
    counted = [each for each, row in zip(found.readings, rows, strict=True) if row.changes]
    write_scaled(scaled, gpu, counted)
    if rented.link is not None and found.link is not None:
        of_link, changes = compare_link(rented.link, found.link)
        rows, settings = [*rows, *of_link], [*settings, *changes]
    after = find_outlook(run_file, settings, point, scaled)
    if decode is not None and before.decode_time is not None and after.decode_time is not None:
        rows.append(compare_decode(decode, before.decode_time))
        factor = rented.resolved.run.costs.generation_factor * after.decode_time / decode.seconds
        settings.append(f"costs.generation_factor={factor:.6g}")
        after = find_outlook(run_file, settings, point, scaled)
    return _Predicted(rows, before, after)


def _decide(found: _Predicted, plan: PlanConfig, limit: float) -> tuple[Decision, list[str]]:
    """Return the decision and its reasons."""
    before, after = found.before, found.after
    longer = after.step_time / before.step_time - 1
    reasons = []
    if longer > limit:
        worst = max((row for row in found.comparisons if row.changes), key=lambda row: row.slowdown)
        text = f"{worst.name} takes {worst.slowdown:.2f} times the expected time"
        reasons = [f"the step is {longer:.1%} longer than planned", f"most behind: {text}"]
    late = (before.seconds, after.seconds, plan.deadline, "deadline")
    dear = (before.dollars, after.dollars, plan.budget, "budget")
    for was, now, most, name in (late, dear):
        if most and was <= most < now:
            reasons.append(f"the run exceeds plan.{name}, which the plan kept")
    if reasons:
        return "return", reasons
    return "keep", [f"the step is within {limit:.0%} of the plan"]
