"""`streamrl evaluate`: score a checkpoint or a model on held-out prompts, without training."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from signal import Signals
from tempfile import TemporaryDirectory
from typing import Annotated, Any, TypeAlias

import msgspec
import typer
from msgspec.structs import asdict, replace

from streamrl.cli.checkpoint import step_of
from streamrl.cli.log_output import Quiet, Verbose, set_verbosity
from streamrl.cli.output import echo
from streamrl.cli.shared import AsJson, Overrides, claim_directory, print_json, stdout_console
from streamrl.engine.world import RunInterruptedError
from streamrl.record.evaluation import (
    EVALUATED,
    EVALUATIONS,
    EvaluationResult,
    difference,
    read_evaluations,
)
from streamrl.record.run_directory import RUN
from streamrl.report.evaluation_table import evaluations_table, say_difference
from streamrl.runfile.config import CheckpointsConfig, Run
from streamrl.runfile.evaluation_config import EvaluationConfig
from streamrl.runfile.files import change_run, load_run, read_recorded_run
from streamrl.runfile.result_files import write_files

OF_A_MODEL: dict[str, Any] = {
    "cluster": {"pools": {"local": {"gpu": "cpu", "gpus_per_node": 2}}},
    "rollout": {"pool": "local", "replicas": 1, "max_running": 64, "max_tokens": 1024},
    "trainer": {"pool": "local"},
    "algorithm": {"steps": 1, "prompts_per_step": 1, "group_size": 2},
    "policies": {"system": "stream-sync"},
}
"""Run file of a model that no run has trained: one replica on the cores of this machine."""

REWARDS = "verifier.reward="
"""Start of a `--set` that names all scorers, with their keys, such as the signature of a function."""
KEPT = (RUN, EVALUATED, EVALUATIONS)
"""Files that `--output` keeps of each evaluation."""
_Samplings: TypeAlias = Mapping[str, Mapping[str, Any]]
"""By model: the keys of its sampling."""


def evaluate(
    model: Annotated[
        Path,
        typer.Argument(
            metavar="RUN|MODEL", help="A run directory, or a Hugging Face directory of a model."
        ),
    ],
    prompts: Annotated[
        str | None,
        typer.Option(
            "--prompts", metavar="FILE", help="Held-out records. Absent: those of the run."
        ),
    ] = None,
    scorer: Annotated[
        str | None,
        typer.Option(
            "--scorer",
            help="Scorer or function. Absent: that of the run, or that of --set verifier.reward.",
        ),
    ] = None,
    samples: Annotated[
        int | None, typer.Option("--samples", help="Rollouts of each prompt: n of avg@n.")
    ] = None,
    num_prompts: Annotated[
        int | None, typer.Option("--num-prompts", help="Maximum prompts: the first of the file.")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option("--temperature", help="Sampling temperature; 0: most likely.")
    ] = None,
    step: Annotated[
        str,
        typer.Option("--step", metavar="STEP", help="Of a run: last, best, or a step's number."),
    ] = "last",
    against: Annotated[
        Path | None,
        typer.Option("--against", metavar="RUN|MODEL", help="Evaluate a second one, and compare."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="DIR", help="Keep the rollouts and scores here."),
    ] = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
    verbose: Verbose = 0,
    quiet: Quiet = False,
) -> None:
    """Score a run's checkpoint, or a model, on held-out prompts.

    The rollouts are generated and scored as in the evaluations of a run, with its environment if it has one. Of two,
    the difference is paired by prompt.

    Example: streamrl evaluate runs/quickstart --samples 4 --json
    Example: streamrl evaluate build/model --prompts held-out.jsonl --scorer exact --against runs/a
    """
    from streamrl.executor.execute import NAMES, carry_out, check_executable
    from streamrl.executor.sampling import sampling_keys

    set_verbosity(verbose, quiet)
    if output is not None:
        claim_directory(output)
    stated = {
        "prompts": prompts,
        "scorer": scorer,
        "samples": samples,
        "num_prompts": num_prompts,
        "temperature": temperature,
    }
    options = {name: value for name, value in stated.items() if value is not None}
    if against is not None and Path(against).resolve() == Path(model).resolve():
        raise ValueError(f"--against {against} is the model itself; name another run or model")
    found, samplings = {}, {}
    models = [model] if against is None else [model, against]
    runs = [run_to_evaluate(each, step, options, overrides or ()) for each in models]
    for run, _ in runs[1:]:
        check_executable(run)  # before the first one is scored
    for number, (each, (run, version)) in enumerate(zip(models, runs, strict=True)):
        with TemporaryDirectory() as place:
            directory = Path(place) / "run"
            try:
                carry_out(replace(run, execute=replace(run.execute, output=str(directory))))
            except RunInterruptedError as error:
                name = NAMES[Signals(error.signal)]
                echo(f"streamrl: {name}: the evaluation of {each} was interrupted", err=True)
                raise typer.Exit(128 + error.signal) from None
            found[str(each)] = replace(_result_in(directory, each), step=version)
            config = run.evaluation
            samplings[str(each)] = sampling_keys(config, run.rollout)
            if output is not None:
                keep_results(directory, output / str(number), run.execute.readers, version)
    assert config is not None, "the run of an evaluation has one"
    if as_json:
        print_json(_as_json(found, config, samplings))
    else:
        _show(found, config, samplings)


def run_to_evaluate(
    path: Path, step: str, options: Mapping[str, Any], overrides: Sequence[str]
) -> tuple[Run, int]:
    """Return a run without steps that evaluates a model, or a checkpoint of a run; and the step of the weights.

    Raises:
        ValueError: the directory has neither, or nothing says which prompts and which scorer.
    """
    names_rewards = any(str(each).startswith(REWARDS) for each in overrides)
    if names_rewards and "scorer" in options:
        raise ValueError("--scorer and --set verifier.reward both name scorers: remove one of them")
    if (path / RUN).is_file():
        from streamrl.executor.checkpoint_export import choose_checkpoint

        run = read_recorded_run(path / RUN)
        checkpoint = choose_checkpoint(path, step_of(step))
        version = checkpoint.version
        run = replace(run, model=replace(run.model, path=str(checkpoint.path)))
    elif (path / "config.json").is_file():
        acts = any(str(each).startswith("environment.") for each in overrides)
        if "prompts" not in options or not (acts or names_rewards or "scorer" in options):
            raise ValueError(
                f"{path} is a model, no run: name its --prompts and its --scorer, or scorers with their keys "
                "(--set verifier.reward=...), or the environment of its episodes (--set environment.implementation=...)"
            )
        from streamrl.executor.checkpoint_export import sampling_of_export

        sampling = sampling_of_export(path)
        if sampling.get("temperature") == 0:  # only evaluations have it
            options = {"temperature": sampling.pop("temperature"), **options}
        given = {
            **OF_A_MODEL,
            "rollout": {**OF_A_MODEL["rollout"], **sampling},
            "model": {"path": str(path.absolute()), "dtype": "float32"},
            "workload": {"prompts": str(Path(options["prompts"]).absolute())},
            **({"verifier": {"scorer": options["scorer"]}} if "scorer" in options else {}),
        }
        run, version = load_run(given), 0
    else:
        raise ValueError(f"{path} is neither a run directory nor a model directory (config.json)")
    own = run.evaluation or EvaluationConfig(prompts="")
    if names_rewards:  # instead of those of the run
        own = replace(own, scorer=None)
        run = replace(run, verifier=replace(run.verifier, scorer=None))
    changes = dict(options)
    if "prompts" in changes:
        changes["share"] = None
    elif not (own.prompts or own.share):
        raise ValueError(
            f"{path}: the run has no [evaluation]; name held-out prompts: --prompts FILE"
        )
    run = change_run(replace(run, evaluation=replace(own, **changes)), overrides)
    run = replace(
        run,
        algorithm=replace(run.algorithm, steps=0),
        followers=(),
        faults=(),
        execute=replace(
            run.execute,
            trackers=(),
            live_trace=False,
            deadline=None,
            budget=None,
            checkpoints=CheckpointsConfig(),
        ),
    )
    return run, version


def keep_results(directory: Path, output: Path, readers: str, version: int) -> None:
    """Copy the run file, the scores and the rollouts of a version's evaluation to `output`, for these readers.

    The trace is not kept: no step was made, so there is nothing to replay or to report.
    """
    from streamrl.executor.directory_lock import readable_by

    with readable_by(readers, output):
        output.mkdir(parents=True, exist_ok=True)
        kept = {output / name: (directory / name).read_bytes() for name in KEPT}
        for name in (EVALUATED, EVALUATIONS):
            lines = map(msgspec.json.decode, kept[output / name].splitlines())
            written = [msgspec.json.encode({**line, "step": version}) for line in lines]
            kept[output / name] = b"".join(line + b"\n" for line in written)
        write_files(kept)


def _result_in(directory: Path, model: Path) -> EvaluationResult:
    results = read_evaluations(directory)
    if not results:
        raise RuntimeError(f"{model}: no rollout has a score; see the log above")
    return results[-1]


def _as_json(
    found: Mapping[str, EvaluationResult], config: EvaluationConfig, samplings: _Samplings
) -> dict[str, Any]:
    table: dict[str, Any] = {
        "evaluations": {
            name: {**asdict(each), "sampling": samplings[name]} for name, each in found.items()
        }
    }
    if len(found) > 1:
        one, other = found.values()
        changes = difference(one, other, config)
        table["difference"] = {
            name: {**asdict(each.score), "num_prompts": each.num_prompts}
            for name, each in changes.items()
        }
    return table


def _show(
    found: Mapping[str, EvaluationResult], config: EvaluationConfig, samplings: _Samplings
) -> None:
    console = stdout_console()
    for name, result in found.items():
        console.print(f"{name}: {result.num_prompts} prompts x {result.samples} rollouts")
        echo(say_sampling(samplings[name]))
        console.print(evaluations_table([result]))
    if len(found) > 1:
        one, other = found.values()
        for name, each in difference(one, other, config).items():
            first, second = found
            echo(say_difference(each, name, f"of {first} above {second}"))
        if len({json.dumps(each, sort_keys=True) for each in samplings.values()}) > 1:
            echo(
                "The two were sampled differently, so the difference is not only that of the weights."
            )


def say_sampling(sampling: Mapping[str, Any]) -> str:
    """Return a line with the keys of `[rollout]` that an evaluation was sampled with."""
    return "sampling: " + ", ".join(f"{key} {_shown(value)}" for key, value in sampling.items())


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return json.dumps(value, ensure_ascii=False)
