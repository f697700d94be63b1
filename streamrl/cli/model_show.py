"""`streamrl model show`: show a model's parameters, KV cache and states by layer kind."""

from __future__ import annotations

from typing import Annotated, get_args

import typer

from streamrl.cli.shared import AsJson, print_json, stdout_console
from streamrl.report.model_report import describe_model, model_notes, model_table
from streamrl.runfile.roles_config import CacheDtype

CACHES = get_args(CacheDtype)


def show(
    model: Annotated[
        str, typer.Argument(help="A Hugging Face directory, or a name in profiles/models.")
    ],
    kv_dtype: Annotated[
        str, typer.Option(help=f"Format of the KV cache: {', '.join(CACHES)}.")
    ] = "bfloat16",
    context: Annotated[int, typer.Option(min=1, help="Tokens of a rollout.")] = 32768,
    as_json: AsJson = False,
) -> None:
    """Show a model's parameters, KV cache and states by layer kind.

    The directory needs only config.json. A field that changes the shape and is not understood is an error that names
    the field. Below the table: active parameters, the format of the checkpoint, and what was assumed.

    Example: streamrl model show qwen3-next-80b-a3b
    """
    if kv_dtype not in CACHES:
        raise ValueError(f"--kv-dtype must be one of {', '.join(CACHES)}, got {kv_dtype!r}")
    description = describe_model(model, kv_dtype, context)
    if as_json:
        print_json(description)
        return
    console = stdout_console()
    console.print(model_table(description))
    console.print()
    for note in model_notes(description):
        console.print(note, highlight=False)
