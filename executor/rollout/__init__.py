"""Generate rollouts: the replica's controller side, its worker process, and the inference engines.

Read these files first:

- `inference_engine.py`: `InferenceEngine`, the contract between a worker and its engine, and `ReplicaSettings`.
- `replica_worker.py`: `ReplicaWorker`, the worker process: priority queue, aborts, weight loads, token versions.
- `replica.py`: `Replica`, the controller side. Each method carries out one command and returns its event.
- `engines.py`: which engine belongs to which value of `rollout.backend`.
- `transformers_engine.py`, `vllm_engine.py`, `static_engine.py`: the engines inside the worker process. `static_engine.py` is the
  shortest one; the tests compare the others with it.
- `row_batch.py`, `row_attention.py`: the sequences of the transformers engine, and their rows of the KV cache.
- `external_engine.py`: the engine whose tokens come from a server over HTTP. `server_api.py` has the requests and answers
  of each API, `server_client.py` the connection. `sglang_engine.py` starts a server of its own.
- `vllm_settings.py`, `vllm_worker.py`: vLLM's arguments, and the methods that run inside its worker processes.

Rules:

- An engine does not know policy versions. `ReplicaWorker` records which version sampled each token.
- Only `ReplicaWorker` decides the order of rollouts. An engine gets a sequence only when it has room.
- Call all methods of an engine on one event loop.
- Read or cancel a sequence, and copy weights, only inside `paused()`. Otherwise a forward pass may be running.
- Log-probabilities are those of softmax(logits / temperature). No engine uses top-k or top-p.
- Processes that an engine starts must end with the worker; `child_guard.py` ensures this for vLLM.
"""
