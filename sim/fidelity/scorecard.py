"""Write the first half of docs/fidelity.md: published rows with predictions, limits, and the history of errors."""

from __future__ import annotations

import csv
import datetime
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from importlib.metadata import version
from math import exp
from pathlib import Path
from typing import get_args

import numpy as np

from streamrl.hardware.cost_model import cost_model_digest
from streamrl.hardware.efficiency import scaled_errors
from streamrl.hardware.profiles import PROFILES
from streamrl.hardware.step_errors import PAPER
from streamrl.record.uncertainty import MOST_UNMEASURED
from streamrl.runfile.config import CostsConfig
from streamrl.runfile.result_files import replacing
from streamrl.sim.costs.overheads import load_engine
from streamrl.sim.fidelity.bands import COVERAGE, derive, residuals_of, with_reported_bands
from streamrl.sim.fidelity.kv_room import INDEPENDENT, SAME_SOURCE, engine_of
from streamrl.sim.fidelity.paper_figure import PaperFigure
from streamrl.sim.fidelity.paper_throughput import END_TO_END, cells_in_band
from streamrl.sim.fidelity.published_rows import (
    AT_DEFAULTS,
    AT_LOW_ENDS,
    IN_BAND,
    Evidence,
    Row,
    Summary,
    band_text,
    beside_text,
    first_errors,
    grouped,
    in_band_text,
    median_by,
    middle,
    num_configurations,
    publisher,
    range_text,
    summarise,
    width_text,
)
from streamrl.sim.fidelity.ratios import DOUBLED, DOUBLED_ASYNCHRONOUS, PAIRS, num_reversed
from streamrl.sim.fidelity.served import coverage

HISTORY = "fidelity-history.csv"
STRANGERS = scaled_errors()
"""Errors of measured GPUs that are predicted from other generations."""
TITLES = {
    "serving": "Serving: decode steps, requests and full load",
    "served": "Served points with known inputs: milliseconds per output token under load",
    "served-ranges": "Served points with unknown inputs: workers, kind of ranks or draft tokens",
    "training": "Training: seconds of an optimizer step",
    "steps": "Steps of RL: stages of published runs",
    "ratios": "Ratios of steps: the same run synchronous, asynchronous, and with other staleness",
    "memory": "Memory of replicas: KV cache that engines log at their start",
}
SHORT_TITLES = {
    "serving": "serving at a given load",
    "served": "serving under load, known inputs",
    "served-ranges": "serving under load, unknown inputs",
    "training": "training steps",
    "steps": "stages of RL steps",
    "ratios": "ratios of steps",
    "memory": "KV cache of replicas",
}
"""Begins of the scorecard's partitions."""
README_ORDER = ("whole RL steps", "stages of RL steps", "training steps", "serving", "KV cache")
"""Begins of the partitions in the README, in its order. Ratios are told in sentences below its table."""
SILICON = ("Hopper", "Blackwell")
"""Partitions of served points that the scorecard shows apart."""
FREE = "rows no program fitted (configurations)"
EARLIEST = "earliest prediction"
TOTALS = "totals alone"
"""Mark of whole steps whose stages were not published."""
FEW = 20
"""Fewer rows have no 90th percentile; the page shows the worst one."""
MOE_STEPS = "whole RL steps: MoE models"
"""Begin of the partitions that the long scorecard also shows by model."""
MANY_GPUS = 128
OF_MANY_GPUS = f"whole RL steps: at least {MANY_GPUS} GPUs (rows that are counted elsewhere too)"
"""The partition of large steps, which are also in the partitions of their models."""
BEGIN, END = "<!-- scorecard -->", "<!-- end of scorecard -->"
"""Marks of a page around the scorecard, which `streamrl validate --output docs` writes."""
CHECKED_BEGIN, CHECKED_END = "<!-- checked -->", "<!-- end of checked -->"
"""Marks of a page around the sentence that says which steps were compared."""
PLANS = PROFILES.resolve().parent / "docs" / "plans.md"
"""The page of recommended plans; it is only in a checkout."""
LARGE = 10
"""Least steps of a group that is named as the worst one."""
MOST_MODELS = 3
"""Models whose bias is told below the scorecard."""
REPEATED = "One line in seven repeats a measurement of another file."
"""Said of the served points."""
NOTES = {
    "served": f"One line in the sample of AIConfigurator is one point. {REPEATED} {coverage().text} The last column has the "
    "median errors of AIConfigurator 0.12.0 for the same points, and their number if it predicts fewer.",
    "served-ranges": "The sample does not state the number of decode workers, whether GPUs are tensor or attention ranks, or whether draft "
    "tokens were used. A point is the range over all of them, and its error is that of the geometric middle. "
    "*within* is the share of published values within the range.",
    "steps": "A row whose range is wider than 10 % has unknown inputs and is in a group of its own. These inputs are the shape of "
    "lengths (generation of NeMo-RL 0.3) and whether a layer recomputes (RLinf, verl 0.5). Others are degrees and "
    "recomputation (Llama-3.1-70B with DTensor), the racks in which nodes are (MoE models on GB200), and the memory of KV "
    "caches (HybridFlow). No profile is of HybridFlow's vLLM 0.3.1. All other inputs are stated in the source or in the "
    "recipe of its release, except the shape of lengths, whose range is narrower. Of rows with *totals alone*, no stage was published.",
}
HOW_TO_READ = (
    "How to read it:",
    "",
    "- Every row was given the mean output length that its source measured, and the layout, caps and placement of its recipe. Before",
    "  a run you know none of the first and guess the rest. So your errors are larger than these. `streamrl plan` shows what lengths",
    "  that are 20 % shorter or longer do to its objective.",
    "- *configurations*: how many different ones these rows are, if fewer. One that was published for three releases has three rows.",
    f"- *{AT_DEFAULTS}*: the median error if the run file does not say how nodes are placed in racks. NVLink then joins up to 72",
    "  GPUs. No source states the placement. So the column *median* has one that was inferred per row, or the middle of a range.",
    "- *rows no program fitted*: no program fitted a constant to these rows. But the model was developed while they were known: terms",
    "  and inputs were chosen by people who saw these errors. So this is a development set and no blind test. Predictions that were",
    "  dated before anyone of this project read the results are in [predictions](predictions.md).",
    "- Lines with the name of a model are a part of the line above them. Their errors may have opposite signs, so that a small bias",
    "  of all models together is a cancellation.",
    "- *earliest prediction*: the median error of the earliest kept prediction of the same rows, of 2026-11-29",
    "  (`profiles/published/first_predictions.csv`). It was made after the rows were in the repository, so it is no blind test.",
    "- *totals alone*: no stage of these steps was published. A right total can have two wrong stages.",
    "- *sources*: how many repositories, papers or logs these rows are from. Rows of one source are alike.",
    "- *median* and *p90* are absolute errors of predictions, relative to the published value. With fewer than 20 rows, the column",
    "  shows the worst error instead of p90.",
    "- *bias* is the median of signed errors;",
    "- *range*: if a source does not state an input, the prediction is a range, and its error is that of the geometric",
    "  middle. The column shows the median width of the ranges. No such row counts as exact. *within*: the share of published",
    "  figures in the range, for served points with unknown inputs. They have no band.",
    "- *unknown inputs*: the source does not state an input, and the prediction is a range wider than 10 %. These rows are in a",
    "  partition of their own, by this width alone.",
    "- *in band / above / below*: the shares of published figures within a band, above it and below it. Spreads and factors of the",
    "  band were computed without the row's source. 80, 10 and 10 % are the target. A figure above costs more than its band says.",
    "- *band*: the median ends of such bands, relative to the prediction. The upper half is wider, because steps are more often",
    "  predicted too short than too long.",
    "- *left out*: constants were fitted to such rows. Each row is predicted by constants without its model, or without its",
    "  source. Rows of the same source stay in some fits, so errors on a new source can be larger. The cell has median, p90 and",
    "  number of rows.",
    "- *in sample*: constants were fitted to the rows themselves, so their errors are too small.",
)
HOW_BANDS_ARE_MADE = (
    "Every step, dollar and day has one band. It comes from published rows, by these rules:",
    "",
    "1. A residual is the logarithm of published over predicted seconds. `fidelity-residuals.csv` has all of them.",
    "2. Rows of one source are alike. A source of n rows counts as n / (1 + (n - 1) c) rows. c is the measured correlation of two",
    "   residuals of one source (design effect, Kish 1965).",
    "3. The spread of a stage is the size that 80 % of its residuals stay below, by kind of model. It is pulled towards the spread",
    "   of all stages (partial pooling).",
    "4. The spreads of stages are combined with the share of each stage in the step, and with their measured correlation. If",
    "   generation and training overlap, the longer side sets the step. Either may be the longer one (Clark 1961).",
    "5. Residuals of whole steps, relative to that, have a factor that 80 % stay below. This is split conformal prediction. There",
    "   is a factor for dense and MoE models, and in each for GPU generations. A partition with few rows is pulled towards the",
    "   larger one.",
    "6. Each published step has a band of other sources. Two factors scale the lower and the upper halves of all bands, so that 10 %",
    "   of these steps are below and 10 % above (the idea of the jackknife+, Barber et al. 2021). Bands of reports rest on all",
    "   sources. Their factors are larger if more than 10 % of the published steps are beyond an end. To check coverage, a source is",
    "   left out of all rules, these factors too.",
    "7. Seconds that are scaled from other GPUs, or were never checked, have a further spread ([costs](costs.md)). Seconds that were",
    "   measured on the machine itself have the error of executed runs.",
    "",
    "The factors of rule 6 are made to hold at least 80 % of the published steps. The table below counts how many they hold. With",
    "their source left out, fewer are within: the share is a result. Frameworks and the share of seconds from datasheets are in the file of residuals and have no factor. Only two rows are",
    "of no framework. 80 % of the measured seconds of operators are within 69 % of their roofline (`benchmarks/bench_roofline.py`). With",
    "that as a further spread of every roofline, bands scored worse on left-out sources: 0.576 instead of 0.565. So only the share of a",
    "stage that is above the largest share of a published step has it: no row checks a band there.",
    "The form of the bands was chosen on the same steps, and the strength of pooling by the interval",
    "score of left-out sources. `streamrl validate --output",
    "docs` writes all spreads and factors to `profiles/errors/steps.toml`, which every command reads.",
    "",
    "Few sources published whole steps, and one has most of the rows. So the coverage of one partition or source can be far from",
    "80 %, as the tables show.",
)
LIMITS = (
    "Two published steps of NeMo-RL were not compared. DeepSeek-V3 with DAPO draws up to ten batches a step, and how many groups it "
    "dropped is not stated. Nemotron on software tasks waits for environments, whose seconds are not stated. One row contradicts itself: Qwen3-235B-A22B of 0.6, 1 step off. Its page states 231 s, and tokens per second that "
    "give 199 s. It counts as the range of both.",
    "MoE models on GB200: how nodes are placed in racks is not stated, so a step whose groups may span racks is a range. Runs of more "
    "than 72 GPUs are in several racks, and NeMo-RL up to 0.6 places replicas without regard to racks, so there no replica of several nodes "
    "counts as in one. Asynchronous steps of DeepSeek-V3 and Qwen3-235B-A22B are 19 to 24 % too short; they are bound by generation on these "
    "replicas. Over half of DeepSeek-V3's synchronous step is refit and switch, which were measured on H100 alone, and its generation is that "
    "of the asynchronous steps. So where its synchronous steps agree, two errors probably cancel. Optimizer states go to pageable memory at "
    "the rate of x86 hosts. For Grace nobody published one, and sources disagree: staged copies to GPUs are several times as slow there "
    "(sgl-project/sglang issue 29731), or nearly as fast as pinned ones (NVIDIA/cosmos-framework pull request 150).",
    "Passes of NeMo-RL's loss over logits are counted in its code and come on top of the 1.1 to 1.3 times that its passes take (its issue 2129). "
    "If the issue's figure has a part of them, training is predicted too long by up to that part.",
    "Qwen3-32B on GB200: its synchronous and its asynchronous step train on 16 GPUs, and lack 62 and 64 s. So log-probs and training there "
    "take about 1.45 times as long as predicted, if generation is right. On H100 the same steps are within 5 %. No stage of them was published. "
    "Grace hosts are slower, but engines keep the seconds of x86 hosts. One operation takes 2.75 times as long there "
    "(NVIDIA/TransformerEngine issue 2053). With that for the host's part of decode steps, the synchronous step would be 4 % too short, "
    "and the asynchronous step of Llama-3.1-8B 78 % too long.",
    "DeepSeek-V3 on H100 (NeMo-RL 0.5 and 0.6) is predicted 13 to 15 % too short if it takes turns, and 5 % if it does not. So 14 of 17 missing "
    "seconds are in the switch, or in passes that asynchronous steps hide. No stage of these steps was published. The checkpoint of 0.6 is "
    "another one, and its page says that tokens per second of releases do not compare. Each row has the lengths of its own release.",
    "NeMo-RL 0.4 takes 15 to 20 % longer than 0.5 for mixtures of one layout, and 5 to 8 % for dense models. The offload of the optimizer for "
    "log-probs is a part of this. A quarter of the training time is published for the fusion of bias and activation, rope fusion and sequence "
    "parallelism together (NVIDIA-NeMo/RL pull request 1241). Nothing is published for the first alone, which 0.4 lacks, so it has no term. "
    "vLLM 0.10 also launches attention outside of CUDA graphs, which counts as 19.5 us a layer: the middle of 12, 19.5 and 129 us "
    "(vLLM pull requests 10058, 20059 and 25444). The last is of Qwen3-Coder-30B-A3B in fp8 with ten requests. If all mixtures lose as much, "
    "it explains most of the rest.",
    "Tensor ranks of NeMo-RL 0.5 to 0.7 wait 1.3 ms a decode step for the host, a figure of vLLM 0.6. Newer ones publish less: 0.46 ms for "
    "scheduling (vLLM pull request 25444, one GPU) and 0.27 ms for the Ray executor (pull request 11107, two L4). With them, asynchronous steps on GB200 "
    "would be about 2 % shorter, and they are too short already.",
    "Optimizer states leave at 1.8 GB/s, the rate of copies in one run (NVIDIA-NeMo/RL issue 3976). The whole call took 1.31 GB/s there, "
    "and as much for DeepSeek-V3 (pull request 638, layout of its recipe). Pull request 1404 gives 1.77 and 2.34 GB/s. With the median of the four, 1.54 GB/s, "
    "DeepSeek-V3's synchronous steps on H100 would be 2 % longer, and those of mixtures on GB200 would be 8.9 % off instead of 7.8 %.",
    "Qwen3-30B-A3B in NeMo-RL 0.4 to 0.6: its recipes sort tokens by expert in separate operations (moe_permute_fusion false) and route in "
    "64 bits (moe_router_dtype fp64). Neither is counted. Both would lengthen training, which sets asynchronous steps that are predicted 5 to 21 % too long already.",
    "verl's ratios of synchronous over asynchronous steps have no lengths. Its training of one batch takes 314 s on 32 H20 and 133 s on 64 "
    "if steps are synchronous, and 270 s on 16 if they are not. No division of the same tokens gives these, so the lengths of these runs "
    "differ. All are simulated with one mean, so the ratio is 30 % too low.",
    "Refit of Llama-3.1-70B: two runs of one layout took 14 and 26 s, where 10 s are predicted. slime on H200 took 21 to 26 s, of which its "
    "own report leaves 19 s unexplained. These rows are the errors above 40 % of refits and switches.",
    "Hand-over of Qwen3-235B-A22B on B200: 7.26 s are published, and 15.2 s predicted. 9.5 s of these are the gather of all weights, at the "
    "rate of one network card for each GPU. If the eight cards of a node gather one copy together, it is 6.9 s. But then DeepSeek-V3 on H100 "
    "would be 10 s, where 35 s are published for an older version (pull request 1267). So both keep one card.",
    "HybridFlow's generation: no profile is of its vLLM 0.3.1, and what stays in memory beside KV caches is not stated. Llama-3.1-70B with DTensor: neither the degrees "
    "nor recomputation are stated, and its training stays outside their range.",
    "RLinf and verl 0.5 generate with SGLang 0.4. Their rows take constants of one page about H20. SGLang 0.4.9 alone is twice as fast on "
    "H100, and with its seconds their generation would be 38 % too short. Inside verl, SGLang was slower than alone (verl issue 1208), "
    "and nobody published why. So the seconds of both are ends of a range.",
    "Tensor ranks on several nodes: NCCL was measured on 2 to 8 nodes of H100 with 400 Gbps a GPU. That other GPUs and networks differ from "
    "NCCL's tuning model as these do was not checked. On four nodes of GPUs that are not stated, 1 MiB takes 118 us, and 88 us on H100 "
    "(stas00/ml-engineering 7bc7c30).",
    "Generation has larger errors than other stages, and few rows. Its own spread is pulled towards that of all stages, so its bands "
    "alone are too narrow.",
    "Vision towers take memory and sync bytes, and no seconds: images are not simulated.",
    "Memory of training: eight steps of Llama-3.1-405B in fp8 on GB200 and GB300 ran, and are predicted to need 11 % more than a GPU holds.",
    "Linear attention and sliding windows: no published step was fitted. Training of gpt-oss and Qwen3-Next is predicted 20 to 30 % "
    "too fast (rows above). The cause is unknown.",
    "Training of LoRA adapters, and optimizers in host memory or on NVMe: no published row was compared.",
    "KV cache of replicas: 13 of the 18 rows are one report about vLLM, and ten rows were derived from other figures of a log. "
    "Another version of an engine can be off by as much as its own row of fp8 experts, 23 %.",
    "Narrow formats without measurements are rooflines (int4 products, nvfp4), or as far from them as fp8 (int8, mxfp8).",
    "GPUs without tables (AMD, TPU, L4, RTX 4090, A6000) take the seconds of measured GPUs, in proportion to datasheets. Measured GPUs "
    f"whose tables were hidden were off by {STRANGERS.decode.median * 100:.0f} % in median and {STRANGERS.decode.p90 * 100:.0f} % at p90 in decode steps, "
    f"{STRANGERS.training.median * 100:.0f} % and {STRANGERS.training.p90 * 100:.0f} % in training steps (costs.md).",
    "Served points: MiniMax on vLLM is 11 % too fast. Its norm covers the heads of all tensor ranks, which takes small kernels and a further "
    "all-reduce in each layer. Every release of vLLM from 0.16 to 0.19 made it faster. Only the all-reduce counts here. gpt-oss on B200 "
    "is 14 % too slow with TensorRT-LLM, and 16 % too fast with vLLM. Ten points of Llama-3.1-8B in fp8 with vLLM 0.12 on H200 are two to "
    "four times as fast as predicted. They use 20 to 105 % of the peak with one prompt for 100 tokens. So prompts were probably cached.",
    "Served points: all requests count as running. In 13 of the points with known inputs they wait for their first token over half of the time.",
    "A run file cannot describe critics or reward models of another size than the actor, or rollout engines of mixed degrees.",
    "Steps without published output lengths are left out, except those of verl on H20: their mean was inferred from the log-prob "
    "passes, so all their stages count as fitted.",
    "Prefix caches between steps and disaggregated prefill are not modelled. The acceptance rate of draft tokens is a key, not a "
    "prediction.",
    "Tuning that a source does not state: identical published layouts of one MoE model differ by up to 41 %.",
)
"""Cases that have no prediction, or an uncertain one."""
BY_SOURCE = "Bands of whole steps, by source and by partition: computed without the source, and as reports show them."
SHOWN = (
    ("serving", "Llama-3.1-8B, h100 TP1, batch 255"),
    ("serving", "Qwen3-8B, h100 TP1, batch 255"),
    ("serving", "Llama-2-70B, h100 TP8, batch 1, context 1,024"),
)
"""Rows that the page shows, by the beginning of their names: 8B models at a batch of about 256, and
a 70B at 1.
"""


def sections(sets: Mapping[str, Sequence[Row]], paper: Sequence[PaperFigure] = ()) -> Iterator[str]:
    """Yield the lines of each set of published rows: errors by group, and the rows in `SHOWN`."""
    yield from _summary(sets, paper)
    for name, rows in sets.items():
        yield from (
            "",
            f"## {TITLES[name]}",
            "",
            f"`streamrl validate {name} --rows` prints each row.",
        )
        if name in NOTES:
            yield from ("", NOTES[name])
        has_other = any(row.beside is not None for row in rows)
        yield from (
            "",
            f"| group | rows | median | p90 | bias | range | {IN_BAND} | band |"
            + " AIConfigurator |" * has_other,
            "|---|---|---|---|---|---|---|---|" + "---|" * has_other,
        )
        for group, some in (*grouped(rows).items(), ("all", rows)):
            found = summarise(some)
            beside = f" {beside_text(found)} |" if has_other else ""
            yield f"| {group} | {_figures(found)} |{beside}"
        shown = [row for row in rows if _is_shown(name, row)]
        if shown:
            yield from (
                "",
                "| row | published | predicted | without its model |",
                "|---|---|---|---|",
            )
        for row in shown:
            without = "" if row.left_out is None else f"{row.left_out:.3g}"
            figures = f"{range_text(row.published, 3)} {row.unit} | {range_text(row.predicted, 3)} | {without}"
            yield f"| {row.name}{'' if row.has_stages else f' ({TOTALS})'} | {figures} |"
    yield from ("", "## Limits of the predictions", "")
    yield from (f"- {limit}" for limit in LIMITS)


def scorecard(sets: Mapping[str, Sequence[Row]]) -> Iterator[str]:
    """Yield the table of errors by partition: rows that no program fitted first, and errors of fitted rows beside them.

    Partitions with rows that nothing was fitted to come first.
    """
    yield f"| published | {FREE} | sources | {AT_DEFAULTS} | median | p90 | bias | range | {EARLIEST} | {IN_BAND} | band | fitted rows: left out | in sample |"
    yield "|---|---|---|---|---|---|---|---|---|---|---|---|---|"
    rows = _with_models(_partitions(sets))
    free = {partition: _free(some) for partition, some in rows.items()}
    for partition in sorted(rows, key=lambda each: not free[each]):
        cells = "0 | | | | | | | | |"
        if free[partition]:
            sources = len({publisher(row.source) for row in free[partition]})
            cells = f"{_count(free[partition])} | {sources} | {_cells(free[partition])}"
        beside = []
        for evidence in get_args(Evidence)[1:]:
            some = [row for row in rows[partition] if row.evidence == evidence]
            found = summarise(some) if some else None
            high = found and (found.p90 if found.rows >= FEW else found.worst)
            beside.append(f"{found.median:.1%} / {high:.1%} of {found.rows}" if found else "")
        yield f"| {partition}{_total(free[partition])} | {cells} | {' | '.join(beside)} |"


def short_scorecard(sets: Mapping[str, Sequence[Row]]) -> Iterator[str]:
    """Yield the README's table: the partitions of rows that no program fitted, whole steps first.

    Models of a partition have lines of their own if the signs of their errors cancel.
    """
    yield f"| published | {FREE} | {AT_DEFAULTS} | median | p90 | bias | range | {EARLIEST} | {IN_BAND} | band |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    partitions = _with_models(
        {name: _free(rows) for name, rows in _partitions(sets).items()}, only_cancelling=True
    )
    for begin in README_ORDER:
        for name, free in partitions.items():
            if name.startswith(begin) and free:
                yield f"| {name}{_total(free)} | {_count(free)} | {_cells(free)} |"


def _count(rows: Sequence[Row]) -> str:
    """Return the number of rows, and that of their configurations if it is smaller."""
    of = num_configurations(rows)
    return f"{len(rows)} ({of})" if of < len(rows) else f"{len(rows)}"


def _cells(rows: Sequence[Row]) -> str:
    """Return the cells of errors and bands: on racks at defaults first, and the earliest prediction with its number if some lack it."""
    found, default, first = summarise(rows), median_by(rows, AT_DEFAULTS), first_errors(rows)
    some = f" of {len(first)}" if 0 < len(first) < len(rows) else ""
    cells = (
        "" if default is None else f"{default:.1%}",
        f"{found.median:.1%}",
        _high(found),
        f"{found.bias:+.1%}",
        width_text(found),
        f"{np.median(first):.1%}{some}" if first else "",
        in_band_text(found),
        band_text(found),
    )
    return " | ".join(cells)


def _partitions(sets: Mapping[str, Sequence[Row]]) -> dict[str, list[Row]]:
    """Return the rows of each partition, stages before whole steps."""
    rows: dict[str, list[Row]] = {}
    for name, some in sets.items():
        for row in sorted(some, key=lambda each: each.stage == "step"):
            rows.setdefault(partition_of(name, row), []).append(row)
            if row.stage == "step" and row.num_gpus is not None and row.num_gpus >= MANY_GPUS:
                rows.setdefault(OF_MANY_GPUS, []).append(row)
    return rows


def _with_models(
    partitions: Mapping[str, list[Row]], *, only_cancelling: bool = False
) -> dict[str, list[Row]]:
    """Return partitions, and after each one of whole steps of several MoE models its rows by model.

    Errors of two models may have opposite signs, so that those of both together look unbiased.

    Args:
        partitions: rows by partition.
        only_cancelling: only of partitions in which the biases of models have opposite signs.
    """
    found: dict[str, list[Row]] = {}
    for name, rows in partitions.items():
        found[name] = rows
        models = {row.shape: [one for one in rows if one.shape == row.shape] for row in rows}
        if name.startswith(MOE_STEPS) and len(models) > 1:
            signs = {summarise(some).bias > 0 for some in models.values()}
            if len(signs) > 1 or not only_cancelling:
                found |= {f"{name}: {model}": some for model, some in models.items()}
    return found


def _free(rows: Sequence[Row]) -> list[Row]:
    """Return the rows that no program fitted."""
    return [row for row in rows if row.evidence == "not fitted"]


def _total(free: Sequence[Row]) -> str:
    """Return the mark of a partition of whole steps without stages."""
    return f", {TOTALS}" if free and not any(row.has_stages for row in free) else ""


def partition_of(name: str, row: Row) -> str:
    """Return the partition of the scorecard that a row of a set is in."""
    if row.unit == "x":
        return f"{SHORT_TITLES['ratios']}: {row.group}"
    if name == "memory":
        if row.group.endswith(INDEPENDENT):
            return f"{SHORT_TITLES[name]}: {INDEPENDENT}, {engine_of(row)}"
        return f"{SHORT_TITLES[name]}: {SAME_SOURCE}"
    if row.stage is None or row.basis is None:
        kinds = [kind for kind in SILICON if kind in row.partitions]
        return f"{SHORT_TITLES[name]}{''.join(f', {kind}' for kind in kinds)}"
    kind, silicon, _ = row.basis.partition
    models = "dense models" if kind == "dense" else "MoE models"
    unknown = ", unknown inputs" if row.has_unknown_inputs else ""
    if row.stage == "step":
        timing = "asynchronous" if ", asynchronous" in row.group else "synchronous"
        return f"whole RL steps: {models} on {silicon.title()}, {timing}{unknown}"
    if name == "training":
        free = ", mostly fp8 pretraining" if kind == "dense" else ""
        return f"{SHORT_TITLES[name]}: {models}{free}"
    return f"{SHORT_TITLES[name]}: {row.stage} on {silicon.title()}{unknown}"


def with_scorecard(
    page: str, sets: Mapping[str, Sequence[Row]], paper: Sequence[PaperFigure] = ()
) -> str:
    """Return a page with its sentence of compared steps and its short scorecard replaced, each between its marks.

    Raises:
        ValueError: the page lacks marks.
    """
    _, banded = _banded(sets)
    page = _between(page, (CHECKED_BEGIN, CHECKED_END), checked_text(banded))
    table = "\n".join(["", *short_scorecard(sets), *_told(sets, paper), "", ""])
    return _between(page, (BEGIN, END), table)


def _between(page: str, marks: tuple[str, str], text: str) -> str:
    before, begin, rest = page.partition(marks[0])
    _, end, after = rest.partition(marks[1])
    if not (begin and end):
        raise ValueError(f"the page must have the marks {marks[0]} and {marks[1]}")
    return before + begin + text + end + after


def checked_text(banded: Sequence[Row]) -> str:
    """Return which whole steps were compared, and the errors of those that no program fitted; "" without any."""
    free = _free(banded)
    if not free:
        return ""
    ((most, number),) = Counter(row.name.split()[0] for row in banded).most_common(1)
    found, systems = summarise(free), " or ".join(dict.fromkeys(row.system for row in banded))
    return (
        f"Checked on {len(banded)} published steps, {number} of {most}, {systems}. The {len(free)} to which nothing was fitted were known "
        f"during development: {found.median:.1%} off in median, {found.p90:.1%} at p90, given measured lengths, layouts and inferred racks. "
        "No streaming step outside one paper and no agentic step was compared, and no dated prediction has been scored."
    )


def _told(sets: Mapping[str, Sequence[Row]], paper: Sequence[PaperFigure]) -> Iterator[str]:
    """Yield the sentences below the scorecard: coverage of points and bands, choices of modes, and the paper."""
    rows, banded = _banded(sets)
    if banded:
        yield from ("", " ".join(_origins(banded)))
        yield from ("", f"{_bias(banded)} {_met(_free(banded))}".strip())
        yield from ("", _held(rows, banded))
        yield from ("", _systems(banded, paper))
    if on_racks := [row for row in _free(banded) if AT_DEFAULTS in row.readings]:
        yield from ("", _racks(on_racks))
    if training := _free(sets.get("training", ())):
        yield from ("", _trained(training))
    pairs = [row for row in sets.get("ratios", ()) if row.group == PAIRS]
    if pairs:
        told = [_modes(pairs), *_ratios_of(paper)]
        yield from ("", " ".join(told))
    yield from _scaling(sets.get("ratios", ()))
    if "served" in sets:
        yield from ("", _served(sets["served"]))


def _served(known: Sequence[Row]) -> str:
    """Return what served points are: one sample, and their errors with the engine that run files take if they name none."""
    name = load_engine(CostsConfig().engine).name.partition(",")[0]
    groups = grouped(known)
    told = [f"Served points are one sample, that of AIConfigurator. {REPEATED} {coverage().text}"]
    if own := groups.get(f"engine {name}"):
        found = summarise(own)
        told.append(
            f"A run file that names no engine, nor a framework that does, takes {name}. Its {found.rows} points with known inputs are "
            f"{found.median:.1%} off in median, and {found.p90:.1%} at p90."
        )
    return " ".join(told)


def _scaling(ratios: Sequence[Row]) -> Iterator[str]:
    """Yield how well it is predicted how many times as fast a step is on twice the GPUs."""
    told = []
    for group, run in (
        (DOUBLED, "The same run"),
        (DOUBLED_ASYNCHRONOUS, "Asynchronous instead of synchronous"),
    ):
        if pairs := [row for row in ratios if row.group == group]:
            found, wrong = summarise(pairs), num_reversed(pairs)
            ours = _ends([row.predicted[0] for row in pairs])
            told.append(
                f"{run}: {found.rows} pairs, published {_ends([row.published[0] for row in pairs])}, predicted {ours}. "
                f"Errors of the ratio are {found.median:.1%} in median and {found.worst:.1%} at worst, and the sign is reversed in {wrong}."
            )
    if told:
        yield from (
            "",
            f"**How many times as fast a step is on twice the GPUs.** {' '.join(told)}",
        )


def _ends(ratios: Sequence[float]) -> str:
    return f"{min(ratios):.2f} to {max(ratios):.2f}"


def _held(rows: Sequence[Row], banded: Sequence[Row]) -> str:
    """Return how many steps bands hold: those of reports, those without the source of a step, and those of other pages."""
    pages = [" ".join(row.source.replace(",", " ").split()[:2]) for row in banded]
    ((most, _),) = Counter(pages).most_common(1)
    others = [row for row, page in zip(banded, pages, strict=True) if page != most]
    fitted = sum(row.evidence != "not fitted" for row in others)
    shown = with_reported_bands(banded, derive(residuals_of(rows)))
    inside, above = (sum(map(bool, held)) for held in _held_by(shown))
    return (
        f"Bands of reports are made to hold at least {COVERAGE:.0%} of the published steps. Counted, they hold {inside} of {len(shown)} "
        f"({inside / len(shown):.0%}): {above} are above and {len(shown) - inside - above} below. {_worst_held(shown)}If the source of a "
        f"step is left out, its band holds {_shares(banded)}. Of the {len(others)} steps that are not of {most}, "
        f"{sum(bool(row.is_in_band) for row in others)} are within; {fitted} of these have fitted constants. Bands of reports are wider "
        f"where seconds are scaled from other GPUs. {_rooflines(banded)}"
    )


def _held_by(rows: Sequence[Row]) -> tuple[list[bool | None], list[bool | None]]:
    """Return whether each row is in its band, and whether it is above."""
    return [row.is_in_band for row in rows], [row.is_above_band for row in rows]


def _shares(rows: Sequence[Row]) -> str:
    """Return the shares of rows in their bands, above and below: "62% (8% are above and 30% below)"."""
    inside, above = (float(np.mean([bool(each) for each in held])) for held in _held_by(rows))
    return f"{inside:.0%} ({above:.0%} are above and {1 - inside - above:.0%} below)"


def _worst_held(shown: Sequence[Row]) -> str:
    """Return the large group of whole steps of which bands hold the smallest share; "" without large ones."""
    groups = {name: some for name, some in _steps_by(shown).items() if len(some) >= LARGE}
    if not groups:
        return ""
    worst = min(groups, key=lambda name: np.mean([bool(row.is_in_band) for row in groups[name]]))
    return f"Of the groups of {LARGE} steps or more, they hold {worst} worst: {_shares(groups[worst])}. "


def _steps_by(steps: Sequence[Row]) -> dict[str, list[Row]]:
    """Return whole steps by partition, without the words that all partitions begin with."""
    found: dict[str, list[Row]] = {}
    for row in steps:
        found.setdefault(partition_of("steps", row).partition(": ")[2], []).append(row)
    return found


def _systems(banded: Sequence[Row], paper: Sequence[PaperFigure]) -> str:
    """Return which systems published steps are of, and which one the planner recommends most."""
    counted = Counter(row.system for row in banded)
    of = ", ".join(
        f"{number} {system} ({sum(bool(row.is_in_band) for row in banded if row.system == system)} in a band without their source)"
        for system, number in counted.most_common()
    )
    cells = cells_in_band() if any(figure.name == END_TO_END for figure in paper) else {}
    held = ", ".join(f"{sum(of)} of {len(of)} of {system}" for system, of in cells.items())
    told = f"In {PAPER}, bands of reports hold {held}. " if held else ""
    return f"The {len(banded)} steps are {of}. {_recommended(counted)}{told}No agentic step was compared: no published step has an environment."


def _recommended(compared: Collection[str]) -> str:
    """Return the system that the plans of docs/plans.md have most, and whether a published run of it was compared."""
    if not PLANS.is_file():
        return ""
    plans = [
        line.split(" | ")[1] for line in PLANS.read_text().splitlines() if line.count(" | ") > 7
    ]
    found = Counter(each.partition("; ")[2].partition(",")[0] for each in plans if "; " in each)
    ((system, number),) = found.most_common(1)
    told = f"`streamrl plan` recommends {system} in {number} of {found.total()} offers (docs/plans.md). "
    return told + ("" if system in compared else f"No published run of {system} was compared. ")


def _rooflines(banded: Sequence[Row]) -> str:
    """Return that rooflines do not widen bands, and the errors of steps that rest on them."""
    shares = [row.basis.roofline_share for row in banded if row.basis is not None]
    errors = {
        has: [
            abs(row.error)
            for row, share in zip(banded, shares, strict=True)
            if (share > MOST_UNMEASURED) == has
        ]
        for has in (True, False)
    }
    told = " ".join(
        f"{len(some)} steps with {'more than' if has else 'up to'} {MOST_UNMEASURED:.0%} of their seconds from rooflines are {np.median(some):.1%} off in median."
        for has, some in errors.items()
        if some
    )
    return (
        f"Rooflines widen them only where a stage has more of them than any published one. {told} No published step has more than {max(shares):.0%}, so no row "
        "checks a band above that."
    )


def _racks(rows: Sequence[Row]) -> str:
    """Return the errors of steps on racks: of a run file that states no placement, and of the placement inferred per row."""
    moe = [row for row in rows if row.basis is not None and row.basis.partition[0] == "mixture"]
    ahead = [row for row in moe if ", asynchronous" in row.group]
    told = []
    for reading, words in (
        (AT_DEFAULTS, "With racks at defaults, as in a run file that states none"),
        ("", "With the placement inferred per row"),
    ):
        errors = [row.error_by(reading) for row in rows]
        of = [
            f"{np.median([abs(row.error_by(reading)) for row in some]):.1%}"
            for some in (rows, moe, ahead)
            if some
        ]
        names = ("all", "MoE models", "asynchronous ones of these")
        medians = ", ".join(f"{each} ({name})" for each, name in zip(of, names, strict=False))
        told.append(
            f"{words}, they are off by {medians} in median. The bias is {np.median(errors):+.1%}, and the worst error {max(errors, key=abs):+.1%}."
        )
    return (
        f"**{len(rows)} whole steps are on racks of GB200.** By default, NVLink joins up to 72 GPUs, so a replica is within one rack. NeMo-RL up to 0.6 "
        f"places replicas without regard to racks, and no source states where they were. {' '.join(told)} To predict such a run, set "
        "`cluster.pools.POOL.nvlink_domain` to the GPUs of a replica in one rack, such as 4 or 8."
    )


def _trained(rows: Sequence[Row]) -> str:
    """Return how many configurations training steps are, and of which precision or model most of them are."""
    told = []
    for kind, words in (("dense", "dense models"), ("mixture", "MoE models")):
        some = [row for row in rows if row.basis is not None and row.basis.partition[0] == kind]
        if some:
            ((model, count),) = Counter(row.shape for row in some).most_common(1)
            fp8 = sum(" fp8 " in row.configuration for row in some)
            parts = [f"{fp8} in fp8"] * bool(fp8) + [f"{count} of {model}"]
            told.append(
                f"The {len(some)} rows of {words} are {num_configurations(some)} configurations ({', '.join(parts)})."
            )
    return f"Training steps that no program fitted: {' '.join(told)}"


def _bias(banded: Sequence[Row]) -> str:
    """Return how many steps that no program fitted take longer than predicted, by model, and the partition that is furthest off."""
    free = _free(banded)
    if not free:
        return ""
    partitions = _steps_by(free)
    errors = {name: summarise(some) for name, some in partitions.items()}
    worst = max(errors, key=lambda name: errors[name].median)
    known = [row for row in free if first_errors([row])]
    first, now = first_errors(known), summarise(known or free)
    begun = (
        f"The earliest kept predictions of {len(known)} of them were made after the rows were in the repository. They were "
        f"{np.median(first):.1%} off in median and {np.quantile(first, 0.9):.0%} at p90. Today's are {now.median:.1%} and {now.p90:.1%} off. "
        f"{_worse_than_first(partitions)}"
        if first
        else ""
    )
    longer = [-row.error for row in free if row.error < 0]
    return (
        f"{len(longer)} of {len(free)} whole steps that no program fitted take longer than predicted, and their predictions are "
        f"{np.median(longer or [0.0]):.1%} too short in median. {_by_model(free)}{begun}Of whole steps, those of "
        f"{worst} have the largest median error: {errors[worst].median:.1%}."
    )


def _by_model(free: Sequence[Row]) -> str:
    """Return how many steps of the models with most rows are predicted too short; errors of models cancel in a common bias."""
    told = []
    for model, number in Counter(row.shape for row in free).most_common(MOST_MODELS):
        errors = [row.error for row in free if row.shape == model]
        told.append(
            f"{sum(error < 0 for error in errors)} of {number} of {model} ({np.median(errors):+.1%})"
        )
    return f"By model (bias), too short are {', '.join(told)}. "


def _worse_than_first(partitions: Mapping[str, Sequence[Row]]) -> str:
    """Return the partitions whose median error is larger than that of the earliest predictions of the same rows."""
    told = []
    for name, rows in partitions.items():
        known = [row for row in rows if first_errors([row])]
        if known and (now := summarise(known).median) > (
            first := float(np.median(first_errors(known)))
        ):
            told.append(f"{name} ({now:.1%} from {first:.1%})")
    return f"Worse than then are {'; '.join(told)}. " if told else ""


def _origins(banded: Sequence[Row]) -> Iterator[str]:
    """Yield whose whole steps no program fitted, the errors of the fitted ones, and errors at the low ends of ranges."""
    free = [row for row in banded if row.evidence == "not fitted"]
    fitted = [row for row in banded if row.evidence != "not fitted"]
    sources = [
        ", ".join(sorted({row.source.replace(",", " ").split()[0] for row in some}))
        for some in (free, fitted)
    ]
    if free:
        found = summarise(free)
        yield (
            f"The {len(free)} whole steps that no program fitted are of {sources[0]}. Together they are {found.median:.1%} off in median, "
            f"{found.p90:.1%} at p90, with a bias of {found.bias:+.1%}."
        )
    if fitted:
        errors = summarise(fitted)
        yield (
            f"{len(fitted)} fitted ones are of {sources[1]}: {errors.median:.1%} off in median, {errors.worst:.1%} at worst."
        )
    if ranges := [row for row in free if row.has_unknown_inputs]:
        lowest = np.median([abs(row.predicted[0] / middle(row.published) - 1) for row in ranges])
        shown = sorted(ranges, key=lambda row: row.width)[len(ranges) // 2]
        yield (
            f"{len(ranges)} of the unfitted ones have unknown inputs: they are ranges, such as {range_text(shown.predicted, 3)} s for "
            f"{middle(shown.published):.3g} s, and their error is that of the middle. At the lower end it is {lowest:.1%} in median. For MoE "
            "models on GB200 it has the fewest racks."
        )


def _met(free: Sequence[Row]) -> str:
    """Return how many whole steps are within the targets of 12 % in median and 25 % at p90: by row, then by partition."""
    sizes = [abs(row.error) for row in free]
    partitions = _steps_by(free)
    met = [name for name, rows in partitions.items() if _is_met(rows)]
    known = [name for name in partitions if "unknown inputs" not in name]
    default, low = (
        sum(_is_met(rows, reading) for rows in partitions.values())
        for reading in (AT_DEFAULTS, AT_LOW_ENDS)
    )
    return (
        f"By row, {sum(size <= 0.12 for size in sizes)} of {len(free)} are within 12 %, and {sum(size <= 0.25 for size in sizes)} within 25 %. "
        f"By partition, {len(met)} of {len(partitions)} are within 12 % in median and 25 % at p90. They have "
        f"{sum(len(partitions[name]) for name in met)} of the {len(free)} rows. Of the {len(known)} partitions with known inputs, "
        f"{sum(name in met for name in known)} are. With {AT_DEFAULTS}, {default} of all are, and {low} at the low ends of ranges."
    )


def _is_met(rows: Sequence[Row], reading: str = "") -> bool:
    errors = [abs(_error_by(row, reading)) for row in rows]
    return bool(np.median(errors) <= 0.12 and np.quantile(errors, 0.9) <= 0.25)


def _error_by(row: Row, reading: str) -> float:
    if reading == AT_LOW_ENDS:
        return row.predicted[0] / middle(row.published) - 1
    return row.error_by(reading)


def _modes(pairs: Sequence[Row]) -> str:
    """Return how often the faster one of two modes is predicted as the slower one, and how often a fixed choice is wrong."""
    slower = sum(row.published[0] <= 1 for row in pairs)
    return (
        f"{len(pairs)} published runs have a synchronous and an asynchronous step of one release, model and number of GPUs. In "
        f"{num_reversed(pairs)} of them the faster mode is predicted as the slower one: {num_reversed(pairs, AT_LOW_ENDS)} at the low ends of ranges, and "
        f"{num_reversed(pairs, AT_DEFAULTS)} with {AT_DEFAULTS}. Who always chooses asynchronous is wrong in {slower}."
    )


def _ratios_of(paper: Sequence[PaperFigure]) -> Iterator[str]:
    """Yield how often the slower system of the paper is predicted as the faster one, and how many targets are missed."""
    for figure in paper:
        if figure.reversed is not None:
            yield (
                f"In {figure.reversed} of {len(figure.cells)} ratios of StreamRL's {figure.name.removesuffix(' ratios')} the slower "
                "system is predicted as the faster one."
            )
    if paper:
        missed = sum(not figure.is_met for figure in paper)
        yield f"{missed} of {len(paper)} targets of the StreamRL paper are missed."


def _summary(sets: Mapping[str, Sequence[Row]], paper: Sequence[PaperFigure]) -> Iterator[str]:
    """Yield the scorecard, how to read it, and how bands are made."""
    if not sets:
        return
    yield from ("", *scorecard(sets), *_told(sets, paper))
    yield from ("", *HOW_TO_READ)
    rows, banded = _banded(sets)
    if banded:
        yield from ("", "## Bands: the one error of a step", "", *_bands(rows, banded))


def _banded(sets: Mapping[str, Sequence[Row]]) -> tuple[list[Row], list[Row]]:
    """Return the rows that errors of steps come from, and the whole steps with a band."""
    rows = [row for name in ("training", "steps") for row in sets.get(name, ())]
    return rows, [row for row in rows if row.stage == "step" and row.band is not None]


def _bands(rows: Sequence[Row], banded: Sequence[Row]) -> Iterator[str]:
    """Yield how bands are made from rows, and how many published steps they cover."""
    yield from HOW_BANDS_ARE_MADE
    errors = derive(residuals_of(rows))
    yield from (
        "",
        "| stage | rows | sources | 80 % of errors are below | pooled: dense models | MoE models |",
        "|---|---|---|---|---|---|",
    )
    for stage, of in errors.stages.items():
        spreads = (of.own or 0.0, *(errors.spread(stage, [kind]) for kind in ("dense", "mixture")))
        cells = (exp(spread) - 1 for spread in spreads)
        yield f"| {stage} | {of.rows} | {of.sources} | {' | '.join(f'{cell:.0%}' for cell in cells)} |"
    told = ", ".join(f"{pair} {value:.2f}" for pair, value in errors.correlation.items())
    yield from ("", f"Measured correlation of the errors of two stages of a step: {told}.")
    yield from ("", BY_SOURCE, "", *_coverage(rows, banded))


def _coverage(rows: Sequence[Row], banded: Sequence[Row]) -> Iterator[str]:
    """Yield how many published steps are in bands without their source, and in the bands that reports show."""
    errors = derive(residuals_of(rows))
    yield f"| steps | number | without their source: {IN_BAND} | that band | bands of reports: {IN_BAND} | that band | 80 % of errors are below |"
    yield "|---|---|---|---|---|---|---|"
    groups: dict[str, list[Row]] = {}
    for row in banded:
        groups.setdefault(row.source, []).append(row)
    for row in banded:
        partition = partition_of("steps", row).removeprefix("whole RL steps: ")
        groups.setdefault(partition, []).append(row)
    for name, some in (*groups.items(), ("all", list(banded))):
        found = summarise(some)
        shown = summarise(with_reported_bands(some, errors))
        most = float(np.quantile([abs(row.error) for row in some], COVERAGE))
        bands = " | ".join(f"{in_band_text(one)} | {band_text(one)}" for one in (found, shown))
        yield f"| {name} | {found.rows} | {bands} | {most:.0%} |"


def _figures(found: Summary) -> str:
    """Return the cells of a summary."""
    errors = f"{found.median:.1%} | {_high(found)} | {found.bias:+.1%}"
    bands = f"{in_band_text(found)} | {band_text(found)}"
    return f"{found.rows} | {errors} | {width_text(found)} | {bands}"


def _high(found: Summary) -> str:
    """Return the 90th percentile of errors, or the worst one of few rows."""
    return f"{found.p90:.1%}" if found.rows >= FEW else f"worst {found.worst:.1%}"


def stamp() -> str:
    """Return the version of the program, the digest of its cost model, and the date."""
    return (
        f"streamrl {version('streamrl')}, cost model {cost_model_digest()}, {datetime.date.today()}"
    )


def write_history(
    sets: Mapping[str, Sequence[Row]], paper: Mapping[str, float], path: Path
) -> None:
    """Append a line with the errors of this version, or replace the line of this cost model.

    Args:
        sets: published rows by name.
        paper: mean error by figure of the paper.
        path: the table.
    """
    line = {
        "date": str(datetime.date.today()),
        "cost_model": cost_model_digest(),
        "version": version("streamrl"),
    }
    for name, rows in sets.items():
        found = summarise(rows)
        line |= {f"{name}_median": f"{found.median:.4f}", f"{name}_p90": f"{found.p90:.4f}"}
        line |= {f"{name}_bias": f"{found.bias:.4f}"}
    line |= {f"paper_{name}": f"{error:.4f}" for name, error in paper.items()}
    lines = []
    if path.is_file():
        with path.open(encoding="utf-8") as file:
            lines = [
                one for one in csv.DictReader(file) if one.get("cost_model") != line["cost_model"]
            ]
    names = list(dict.fromkeys(key for one in (*lines, line) for key in one))
    with replacing(path) as partial, partial.open("w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, names, lineterminator="\n")
        table.writeheader()
        table.writerows([*lines, line])


def _is_shown(name: str, row: Row) -> bool:
    """Return whether a row is shown on the page: all rows of steps, their ratios on twice the GPUs, and a few others."""
    if row.group in (DOUBLED, DOUBLED_ASYNCHRONOUS):
        return True
    return name == "steps" or any(name == of and row.name.startswith(begin) for of, begin in SHOWN)
