"""Read, check, change and write run files: frozen structs with one class for each section.

Files to read first:

- `config.py`: `Run`, the whole run file, and the properties that follow from several sections.
- `files.py`: `load_run` reads TOML and applies `--set` overrides. `encode_run` writes the JSON in traces.
- `roles_config.py`, `policies_config.py` and the other files `*_config.py`: the sections, with a docstring for each key.
- `units.py`: quantities with a unit, such as "80 Gbps". The program computes in bytes and seconds.
- `field_checks.py`: checks of single keys. `checks.py` and `policy_checks.py`: checks of keys together.
- `errors.py`: `RunError`, one line of text with the key, the value and the allowed values.
- `choices.py`: how a name or "module:Class" becomes a class. `algorithms.py` and `backend_choice.py` have choices.
- `gpu_pools.py`: which GPUs each side uses. `keys.py` and `paths.py`: dotted keys, and keys with paths.
- `other_names.py`: names that other frameworks have for keys, for errors.
- `findings.py`: `Finding` and `Fix`, which the doctor and the checkups return. `formatting.py`: numbers as text.

Rules:

- A value is checked once, in `check_run`. Code that gets a `Run` relies on it.
- Names of sections and keys are public. A new key needs a reason, and a default that changes nothing.
- Compare properties of a choice (`engine_named(...).shares_prefixes`), never its name.
- Functions elsewhere take the sections that they read, not the whole `Run`.
- Paths in a run file are relative to the file.
"""
