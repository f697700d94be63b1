"""Write what this project is made of: NOTICE, an SBOM, and known vulnerabilities of the locked packages.

python -m tests.supply_chain notice            print NOTICE
python -m tests.supply_chain sbom FILE PYTHON  write a CycloneDX list of the packages of an environment
python -m tests.supply_chain audit             check requirements.lock against advisories

`cyclonedx-py` and `pip-audit` must be on the path; `make sbom` and `make audit` install them.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROFILES = ROOT / "profiles"
LOCK = ROOT / "requirements.lock"
HEAD_CHARS = 2000
"""Characters at the beginning of a file in which its source is searched."""
LICENCE = re.compile(r"^# licence: *(.+)", re.MULTILINE)
SOURCE = re.compile(r"^#.*?[Ss]ources?: *(.+)", re.MULTILINE)
FACTS = "facts of a published document, quoted with their source"
ENTRIES = "each entry names its source"
FACTS_OF_ENTRIES = "facts; the licences of repositories are at the end"
OWN = "Apache-2.0 (this project)"
LICENCES = (
    ("aiconfigurator", "Apache-2.0 (NVIDIA, metadata of aiconfigurator-core 0.12.0)"),
    ("Apache-2.0", "Apache-2.0"),
    ("(MIT)", "MIT"),
    ("splitwise-sim", "MIT"),
    ("flashinfer", "Apache-2.0"),
    ("config.json of", "facts of a model's config.json; its weights are not here"),
    ("datasheet", FACTS),
    ("whitepaper", FACTS),
    ("arXiv", FACTS),
    ("benchmarks/", OWN),
    ("this project", OWN),
    ("measured in", OWN),
    ("assumption", OWN),
    ("docs/fidelity", OWN),
    ("profiles/published", OWN),
    (ENTRIES, FACTS_OF_ENTRIES),
    ("(response_length)", "names of fields, which are facts"),
    ("docs.cloud.google.com", FACTS),
    ("forums.developer.nvidia.com", FACTS),
    ("documents of RL frameworks", FACTS),
    ("codex_swebenchpro_traces", "facts of a data set, which is not here"),
    ("AIConfigurator", "Apache-2.0 (NVIDIA, metadata of aiconfigurator-core 0.12.0)"),
)
"""Licence by what a source contains; the first that applies."""
NOT_FOUND = "no licence was found, and only facts were taken"
REPOSITORIES = {
    "MoonshotAI/checkpoint-engine": "MIT",
    "Mutinifni/splitwise-sim": "MIT",
    "NVIDIA-NeMo/RL": "Apache-2.0",
    "NVIDIA/Megatron-LM": "BSD-3-Clause and others, by file",
    "NVIDIA/TensorRT-LLM": "Apache-2.0",
    "NVIDIA/nccl": "BSD-3-Clause",
    "NVIDIA/nccl-tests": "BSD-3-Clause",
    "NovaSky-AI/SkyRL": "Apache-2.0",
    "NovaSky-AI/SkyThought": "Apache-2.0",
    "OpenRLHF/OpenRLHF": "Apache-2.0",
    "PrimeIntellect-ai/prime-rl": "Apache-2.0",
    "QwenLM/Qwen3": "its repository states no licence, and only facts were taken",
    "SemiAnalysisAI/InferenceX": "Apache-2.0",
    "THUDM/slime": "Apache-2.0",
    "ai-dynamo/aiconfigurator": "Apache-2.0",
    "alibaba/InferSim": "Apache-2.0",
    "alibaba/ROLL": "Apache-2.0",
    "alibaba/ServeGen": "Apache-2.0",
    "cloud-bulldozer/k8s-netperf": "Apache-2.0",
    "esnet/iperf": "BSD-3-Clause-LBNL",
    "flashinfer-ai/flashinfer": "Apache-2.0",
    "huggingface/trl": "Apache-2.0",
    "inclusionAI/AReaL": "Apache-2.0",
    "llm-d-incubation/llm-d-planner": "Apache-2.0",
    "meta-pytorch/torchforge": "BSD-3-Clause",
    "ml-energy/leaderboard": "Apache-2.0",
    "mosaicml/llm-foundry": "Apache-2.0",
    "radixark/miles": "Apache-2.0",
    "sgl-project/sgl-cookbook": "Apache-2.0",
    "sgl-project/sglang": "Apache-2.0",
    "tenstorrent/tt-inference-server": "Apache-2.0",
    "verl-project/verl": "Apache-2.0",
    "vllm-project/vllm": "Apache-2.0",
    "volcengine/verl": "Apache-2.0",
    **dict.fromkeys(
        (
            "ai-dynamo/aisimulate",
            "alpharomercoma/MI300X-vs-H200",
            "api-evangelist/akash",
            "api-evangelist/coreweave",
            "api-evangelist/lambda-labs",
            "api-evangelist/nexgen-cloud",
            "api-evangelist/openrelay",
            "api-evangelist/runpod",
            "datareceipts/data-receipts",
            "renshuBTC/compute-screener",
            "skypilot-org/skypilot-catalog",
            "tgarg01/silybench-data",
            "vllm-project/vime",
        ),
        NOT_FOUND,
    ),
}
"""Licence of each repository that a profile names, as its LICENSE file or the metadata of its package states it."""
GITHUB = re.compile(r"github\.com/([\w-]+/[\w.-]*\w)")
HEAD = """streamrl
Licensed under the Apache License, Version 2.0; see LICENSE.

The files in profiles/ are tables, model shapes and GPU profiles. This list has the source and licence of each.
`python -m tests.supply_chain notice > NOTICE` writes it, and a test compares it with the files.
"""


def source_of(path: Path) -> str:
    """Return where the figures of a file come from, in one line; `ENTRIES` for lists of sources."""
    return _head(path, "source", SOURCE) or ENTRIES


def licence_of(path: Path) -> str:
    """Return the licence of a file's source: as the file states it, or else by what its source names.

    Raises:
        ValueError: nobody has looked up the licence of this source.
    """
    source = source_of(path)
    if own := _head(path, "licence", LICENCE):
        return own
    found = [licence for part, licence in LICENCES if part in source]
    if {"Apache-2.0", "MIT"} <= {*found}:
        return "Apache-2.0 and MIT"
    named = [licence for name, licence in REPOSITORIES.items() if _names(source, name)]
    if not found and not named:
        raise ValueError(f"{path}: add the licence of {source!r} to tests/supply_chain.py")
    return found[0] if found else "; ".join(dict.fromkeys(named))


def _head(path: Path, key: str, comment: re.Pattern[str]) -> str | None:
    """Return a fact about a file: a key of TOML, or a comment at its beginning."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".toml" and isinstance(value := tomllib.loads(text).get(key), str):
        return " ".join(value.split())
    found = comment.search(text[:HEAD_CHARS])
    return " ".join(found[1].split()) if found else None


def _names(text: str, repository: str) -> bool:
    before = r"(?:(?<=github\.com/)|(?<![\w/-]))"
    named = rf"{before}{re.escape(repository)}(?![\w-])"
    return repository in text and re.search(named, text) is not None


def repositories_of(path: Path) -> set[str]:
    """Return the repositories that a file names: those in `REPOSITORIES`, and all others with their address."""
    text = path.read_text(encoding="utf-8")
    return {*GITHUB.findall(text), *(name for name in REPOSITORIES if _names(text, name))}


def profile_files() -> list[Path]:
    """Return the files under profiles/."""
    files = (path for path in sorted(PROFILES.rglob("*")) if path.is_file())
    return [path for path in files if "__pycache__" not in path.parts]


def notice() -> str:
    """Return the text of NOTICE: each file under profiles/, by licence and source."""
    by_source: dict[tuple[str, str], list[str]] = defaultdict(list)
    for path in profile_files():
        own = licence_of(path), source_of(path)
        by_source[own].append(path.relative_to(ROOT).as_posix())
    lines = [HEAD]
    for (licence, source), files in sorted(by_source.items()):
        lines += [f"Source: {source}", f"Licence: {licence}", *(f"  {each}" for each in files), ""]
    named = set[str]().union(*map(repositories_of, profile_files()))
    lines += ["Licences of the repositories that these files name:"]
    lines += [f"  github.com/{name}: {REPOSITORIES[name]}" for name in sorted(named)]
    return "\n".join([*lines, ""])


def sbom(file: Path, python: str) -> None:
    """Write a CycloneDX list of the packages that are installed for an interpreter."""
    file.parent.mkdir(parents=True, exist_ok=True)
    command = ["cyclonedx-py", "environment", python, "--output-format", "JSON", "-o", str(file)]
    subprocess.run([*command, "--pyproject", str(ROOT / "pyproject.toml")], check=True)


def audit() -> int:
    """Print known vulnerabilities of the locked packages; return the exit status."""
    command = [
        "pip-audit",
        "--requirement",
        str(LOCK),
        "--disable-pip",
        "--progress-spinner",
        "off",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    num_locked = len(re.findall(r"^\S+==", LOCK.read_text(), re.MULTILINE))
    num_skipped = done.stdout.count("could not be audited")
    if num_skipped >= num_locked or (done.returncode and not done.stdout.strip()):
        print("audit skipped: no advisories can be reached from this machine")
        return 0
    print(done.stdout.strip() or "no known vulnerabilities")
    return done.returncode


def main() -> None:
    """Run one of the three."""
    match sys.argv[1:]:
        case ["notice"]:
            print(notice(), end="")
        case ["sbom", file, python]:
            sbom(Path(file), python)
        case ["audit"]:
            sys.exit(audit())
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
