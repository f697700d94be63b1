"""Move weights from the trainer to the replicas.

Read these files first:

- `transfer.py`: `Transfer`, for replicas on the trainer's machine. Weights stay in shared memory.
- `relayed_transfer.py`: `RelayedTransfer`, for replicas on other machines. One relay on each machine receives weights.
- `shared_memory.py`: write and read a weight version as safetensors buckets with checksums.
- `relay.py`: `RelayWorker`, the process of a relay.
- `delta.py`: encode the changes between two versions. `adapters.py`: LoRA adapters, and merging them into weights.
- `broadcast.py`: send bytes to several processes at once over gloo, NCCL or CUDA IPC (`shared_gpu.py`).
- `direct_transfer.py`: `DirectTransfer`, from the trainer's process to those of replicas. `packed_weights.py`: the buckets.
- `bucket_check.py`, `shared_directory.py`: verify checksums; own a directory in shared memory.

The main object is the `Manifest` of a version: its number, and the path, size and checksum of each bucket.

Rules:

- A replica loads a version only after all checksums of its buckets were verified.
- Weights do not pass through the controller's process, except in chunks from one relay to another.
- A version number can name two sets of weights: after a rollback the trainer makes other weights of the same version.
  Compare checksums, not numbers.
- `RetainedVersions` decides which versions stay: the newest, the one being pushed, and those that a replica loads.
- If a delta does not fit, for whatever reason, the whole version is sent. Never serve unverified weights.
"""
