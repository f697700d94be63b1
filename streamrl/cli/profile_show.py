"""`streamrl profile show`: show how fast a model decodes on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, get_args

import msgspec
import typer

from streamrl.cli.lazy_commands import OUTPUT
from streamrl.cli.shared import PICTURE, AsJson, claim_file, print_json, stdout_console
from streamrl.hardware.precision import is_narrow
from streamrl.hardware.profiles import load_model
from streamrl.hardware.tiers import datasheet_share
from streamrl.report.profile_report import (
    comparison_table,
    generation_figure,
    generation_notes,
    generation_table,
)
from streamrl.runfile.cluster_config import ModelConfig
from streamrl.runfile.roles_config import CacheDtype, WeightDtype
from streamrl.sim.studies.hardware_efficiency import study_generation

WEIGHTS, CACHES = get_args(WeightDtype), get_args(CacheDtype)


def show(
    model: Annotated[
        str, typer.Argument(help="A name in profiles/models, or a Hugging Face directory.")
    ],
    gpu: Annotated[
        str, typer.Option(help="A name in profiles/gpus, or several with commas.")
    ] = "h20",
    tensor_parallel: Annotated[
        int,
        typer.Option(
            "--tensor-parallel", "--tp", min=1, help="GPUs per replica. Above 8, whole nodes."
        ),
    ] = 1,
    expert_parallel: Annotated[
        int,
        typer.Option(
            "--expert-parallel",
            "--ep",
            min=1,
            help="Expert parallel GPUs: 1, or the value of --tp.",
        ),
    ] = 1,
    dtype: Annotated[
        str, typer.Option(help=f"Format of weights and products: {', '.join(WEIGHTS)}.")
    ] = "bfloat16",
    kv_dtype: Annotated[
        str | None,
        typer.Option(help=f"Format of the KV cache: {', '.join(CACHES)}. Default: 16 bits."),
    ] = None,
    weight_only: Annotated[
        bool,
        typer.Option(
            "--weight-only", help="Keep weights narrow in memory only, and multiply in bfloat16."
        ),
    ] = False,
    context: Annotated[int, typer.Option(min=1, help="Context of each rollout, in tokens.")] = 4000,
    max_running: Annotated[int, typer.Option(min=1, help="Largest batch, in rollouts.")] = 512,
    backend: Annotated[
        str | None,
        typer.Option(
            help="Use the tables of this backend, such as sglang. Default: the GPU profile's tables."
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Draw the curve to this file (.png or .svg).",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show how fast a model decodes on a GPU.

    The table shows the step time, tokens per dollar, MBU, MFU, tier and sources for each batch size.

    Example: streamrl profile show qwen2.5-7b --gpu h20,h800 -o generation.png
    """
    if output is not None:
        if output.suffix not in (".png", ".svg"):
            raise ValueError(f"--output must end in .png or .svg, got {output}")
        claim_file(output, PICTURE)
    config = ModelConfig(path=model) if Path(model).is_dir() else ModelConfig(name=model)
    check_degrees(tensor_parallel, expert_parallel)
    check_formats(dtype, kv_dtype, weight_only=weight_only)
    shape = load_model(config)
    curves = [
        study_generation(
            shape,
            name.strip(),
            tensor_parallel=tensor_parallel,
            expert_parallel=expert_parallel,
            dtype=dtype,
            kv_dtype=kv_dtype,
            weight_only=weight_only,
            context=context,
            max_running=max_running,
            backend=backend,
        )
        for name in gpu.split(",")
    ]
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        generation_figure(curves, output)
    if as_json:
        print_json([describe(curve) for curve in curves])
        return
    console = stdout_console()
    for curve in curves:
        console.print(generation_table(curve))
        console.print()
    if len(curves) > 1:
        console.print(comparison_table(curves))
        console.print()
    for note in generation_notes(curves):
        console.print(note, highlight=False)


def check_degrees(tensor_parallel: int, expert_parallel: int) -> None:
    """Raise `ValueError` if experts would be split over other GPUs than the replica's."""
    if expert_parallel not in (1, tensor_parallel):
        raise ValueError(
            f"--expert-parallel must be 1 or --tensor-parallel {tensor_parallel}, got {expert_parallel}"
        )


def check_formats(dtype: str, kv_dtype: str | None, *, weight_only: bool) -> None:
    """Raise `ValueError` if a format is unknown, or weight-only is set for wide weights."""
    if dtype not in WEIGHTS:
        raise ValueError(f"--dtype must be one of {', '.join(WEIGHTS)}, got {dtype!r}")
    if kv_dtype is not None and kv_dtype not in CACHES:
        raise ValueError(f"--kv-dtype must be one of {', '.join(CACHES)}, got {kv_dtype!r}")
    if weight_only and not is_narrow(dtype):
        raise ValueError(
            f"--weight-only needs narrow weights (--dtype fp8 or int4), got --dtype {dtype}"
        )


def describe(curve: msgspec.Struct) -> dict[str, object]:
    """Return a curve as a JSON object, with whether it is unmeasured."""
    found: dict[str, object] = msgspec.to_builtins(curve)
    provenance = found["provenance"]
    assert isinstance(provenance, dict)
    shares = provenance["shares"]
    found["unmeasured"] = datasheet_share(shares)
    return found
