"""`streamrl profile MODELDIR`: measure a model on this machine."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from signal import Signals
from typing import Annotated, Any

import typer
from rich.table import Table

from streamrl.cli.lazy_commands import OUTPUT
from streamrl.cli.output import echo
from streamrl.cli.progress import make_progress
from streamrl.cli.shared import PROFILE, AsJson, claim_file, print_json, stdout_console
from streamrl.engine.world import RunInterruptedError
from streamrl.hardware.measured_profile import MeasuredProfile, read_measured, write_measured
from streamrl.runfile.backend_choice import ENGINES, engine_named, measured_engines
from streamrl.runfile.files import load_run
from streamrl.runfile.roles_config import Packing, Recompute

DIRECTORY = Path("runs/profiles")
DURATION = (
    "the quickstart's model takes up to 8 minutes on two cores; Ctrl-C stops and writes nothing"
)
"""How long a profile takes. Two cores took 449 s beside other work."""


def _measured_engine(name: str) -> str:
    """Return the name of an engine whose seconds can be measured; refuse any other."""
    names = measured_engines()
    if (name in ENGINES.own and name not in names) or not ENGINES.knows(name):
        listed = ", ".join(map(repr, names))
        raise typer.BadParameter(f"{name!r} is not one of {listed}.")
    if error := ENGINES.find_error(name, "--backend"):
        raise typer.BadParameter(str(error))
    return name


def measure(
    model: Annotated[
        Path, typer.Argument(metavar="MODELDIR", help="A Hugging Face model directory.")
    ],
    gpu: Annotated[
        str, typer.Option(help="The GPU of this machine, or cpu: a name in profiles/gpus.")
    ] = "cpu",
    backend: Annotated[
        str,
        typer.Option(
            metavar=f"<{'|'.join(measured_engines())}>",
            callback=_measured_engine,
            help="Inference engine to measure (rollout.backend).",
        ),
    ] = "transformers",
    dtype: Annotated[
        str | None,
        typer.Option(help="Format of weights. Default: float32 on a CPU, else bfloat16."),
    ] = None,
    max_running: Annotated[int, typer.Option(help="Largest batch to decode, in rollouts.")] = 64,
    max_context: Annotated[
        int, typer.Option(help="Longest prompt and output together, in tokens.")
    ] = 512,
    max_tokens_per_pass: Annotated[
        int, typer.Option(help="Most tokens in one pass of the trainer.")
    ] = 2048,
    packing: Annotated[
        Packing,
        typer.Option(
            help="Packing of the trainer's passes: packed, or padded if a model needs it."
        ),
    ] = "packed",
    recompute: Annotated[
        Recompute | None,
        typer.Option(
            help="Activation recomputation (trainer.recompute). Default: full on a GPU, none on a CPU. A CPU supports only none."
        ),
    ] = None,
    lora_rank: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Train and push LoRA adapters of this rank (sync.mode = lora). vllm applies them next to its weights; other engines merge them. Default: train all weights.",
        ),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="CPU threads per worker process. Default: half of the cores, as in a run with one replica.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Write the profile to this file. Default: a name made of model and GPU.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="POOL",
            help="Also measure Ray's time per rollout, on nodes of this pool in this machine's cluster.",
        ),
    ] = None,
    reward_model: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Also measure calls of the reward model in this Hugging Face directory.",
        ),
    ] = None,
    environment: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN.toml",
            help="Measure starts and actions of this run file's environment. Default: of one that computes nothing.",
        ),
    ] = None,
    ray_address: Annotated[str, typer.Option(help="Address of the Ray cluster's head.")] = "auto",
    quick: Annotated[
        bool, typer.Option("--quick", help="Measure few points, to test that it works.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Measure a model on this machine, for use in simulations.

    It measures decode, prefill, training, optimizer, push and load. Name the result in `costs.profile` of a run file.
    The model of the quickstart takes up to 8 minutes on two cores, and larger models take longer.

    Example: streamrl profile build/quickstart/model --max-context 176 -o runs/profiles/quickstart.toml
    """
    path = output or DIRECTORY / f"{model.resolve().name}.{gpu}.toml"
    claim_file(path, PROFILE)
    need_executor(backend, has_adapters=lora_rank is not None)
    from streamrl.executor.profiling.environment_times import MeasuredEnvironment
    from streamrl.executor.profiling.measurements import Limits, RayPlace, longest_prefix
    from streamrl.executor.profiling.profile_file import make_setup, profile_model

    own = None
    if environment is not None:
        run = load_run(environment)
        own = MeasuredEnvironment.of(run.environment, run.workload)
    setup = make_setup(
        model,
        gpu=gpu,
        dtype=dtype or ("float32" if gpu == "cpu" else "bfloat16"),
        threads=threads,
        limits=Limits(
            max_running=max_running,
            max_context=max_context,
            max_tokens_per_pass=max_tokens_per_pass,
            longest_prefix=longest_prefix(backend, gpu),
        ),
        backend=backend,
        is_quick=quick,
        packing=packing,
        recompute=recompute,
        lora_rank=lora_rank,
        ray=None if ray is None else RayPlace(ray, ray_address),
        reward_model=reward_model,
        environment=own,
    )
    echo(f"measuring {setup.num_points} points; {DURATION}", err=True)
    try:
        with make_progress() as progress:
            task = progress.add_task("measure", total=setup.num_points, facts="starting")
            found = profile_model(
                setup, gpu, lambda what: progress.update(task, advance=1, facts=what)
            )
    except RunInterruptedError as error:  # from the run that measures handling
        echo(f"streamrl: {Signals(error.signal).name}: {path} is not written", err=True)
        raise typer.Exit(128 + error.signal) from None
    write_measured(found, path)
    found = read_measured(path)
    if as_json:
        print_json({"path": str(path), "profile": found})
    else:
        stdout_console().print(_summary(found))
        stdout_console().print(
            f"pace: passes took {found.pace:.3f} times as long as at their medians, and runs are predicted to",
            soft_wrap=True,
        )
        stdout_console().print(f"profile: {path}", soft_wrap=True)


def need_executor(backend: str, *, has_adapters: bool = False) -> None:
    """Raise `ValueError`, with the command that installs them, if packages are missing."""
    for text in missing_packages(backend, has_adapters=has_adapters):
        raise ValueError(text)


def missing_packages(backend: str, *, has_adapters: bool = False) -> Iterator[str]:
    """Yield what is not installed for an inference engine and a trainer, with the command that installs it."""
    engine = engine_named(backend)
    needed = (
        ("executor", ("torch", "transformers")),
        (engine.extra, engine.modules),
        ("lora", ("peft",) if has_adapters else ()),
    )
    for extra, names in needed:
        missing = [name for name in names if importlib.util.find_spec(name) is None]
        if missing:
            yield f"{', '.join(missing)} not installed: pip install 'streamrl[{extra}]'"


def _summary(found: MeasuredProfile) -> Table:
    """Return the largest point of each table, with its spread."""
    table = Table("operation", "point", "median", "quartiles")
    decode = max(found.decode, key=lambda row: (row.running, row.context))
    prefill = max(found.prefill, key=lambda row: row.rollouts * row.tokens)
    train = max(found.train, key=lambda row: row.rollouts * row.tokens)
    rows: list[tuple[str, str, Any]] = [
        ("decode step", f"{decode.running} rollouts of {decode.context:.0f} tokens", decode),
        ("prefill", f"{prefill.rollouts} x {prefill.tokens} tokens", prefill),
        ("train", f"{train.rollouts} x {train.tokens} tokens", train),
        ("optimizer step", "", found.optimizer),
        ("push", f"{found.push.bytes / 1e6:.1f} MB", found.push),
        ("load", f"{found.load.bytes / 1e6:.1f} MB", found.load),
    ]
    if found.reward:
        call = max(found.reward, key=lambda row: row.rollouts * row.tokens)
        rows.append(("reward model", f"{call.rollouts} x {call.tokens} tokens", call))
    for name, point, row in rows:
        low, median, high = (f"{seconds * 1e3:.2f} ms" for seconds in row.seconds)
        table.add_row(name, point, median, f"{low} to {high}")
    return table
