"""Read models, GPUs and measured times from `profiles/`, and compute memory and operator times from them.

Files to read first:

- `resolved.py`: `resolve` returns a run with the model, GPU and number formats of each role.
- `profiles.py`: `Gpu`, and functions that read a GPU or a model by its name.
- `model_shape.py`: `ModelShape` with its parameters, bytes and FLOPs. `hugging_face.py` reads it from config.json.
- `parallelism.py`: how a model is split over pipeline stages, tensor ranks and experts.
- `precision.py`: number formats, and the bytes of weights in them.
- `memory.py`, `activations.py`, `side_memory.py`: bytes on one GPU of each side, and whether a run fits.
- `operator_tables.py`, `interpolation.py`: measured seconds of kernels, and seconds of other shapes.
- `measured_profile.py`, `profile_fit.py`: what `streamrl profile` measured, and the curves through it.
- `calibration_file.py`: fitted factors. `tiers.py`: whether seconds are measured, composed or from a datasheet.

Rules:

- No file here simulates or computes the time of a step. That is done in `sim/costs`.
- A hardware constant is in `profiles/` with source and date. Constants in code have their source beside them.
- Bytes and FLOPs are those of one GPU, unless the name or the docstring says otherwise.
- Functions take a role's part of `ResolvedRun` (`ReplicaHardware`, `TrainerHardware`), not the run file.
"""
