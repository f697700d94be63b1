"""Run several trainers on one stream of rollouts, and serve the stream to other processes.

Trainer 0 is the primary trainer: replicas load its weights. Secondary trainers train on the same rollouts.

Read these files first:

- `trainers.py`: `Trainers` sends each command to the trainer that it names, and starts and stops them.
- `membership.py`: `Membership` attaches and detaches secondary trainers while a run is active.
- `attach_requests.py`: the request files in a run directory, and `attached.json`, which a resume reads.
- `secondary_records.py`: the metrics and checkpoints of secondary trainers.
- `counting_trainer.py`: a trainer without a model, to measure the stream.
- `stream.py`: `GroupStream`, the HTTP server of finished rollouts and groups. `stream_client.py` reads it.
- `token_stream.py`: `TokenStream` publishes tokens while rollouts are generated.

Rules:

- An attached trainer gets only groups that are drawn after it joined.
- A slow reader of the stream never delays the run. It loses events, or it is dropped.
- Write every change of membership to `attached.json`. A resume restores the trainers from it.
"""
