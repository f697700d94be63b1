"""Check whether this machine can execute a run: packages, GPUs, cores, sandbox, prompts and output directory.

`streamrl doctor` calls these checks. Each file has a function `find(run)` that yields findings.

- `installed.py`: are the packages of the back ends installed, in versions that fit together?
- `readiness.py`: can the back ends execute the run, and does this machine have the GPUs, cores and sandbox?
- `run_paths.py`: can the prompts be read and scored, and is the output directory free?
- `tested_paths.py`: has this project run the chosen paths before, and on which hardware?
- `executed_memory.py`: the GPU memory of the executed trainer, which `readiness.py` reports.

Rules:

- A check changes nothing on disk and loads no weights.
- A finding has a level, a text with key and value, and a fix. `changes` holds the fix as keys and values, if possible.
- A run without `model.path` is only planned and simulated, so most checks skip it.
"""
