"""Run the environments of episodes.

An environment is an object of any class with these methods:

| method         | returns                                                                              |
|----------------|--------------------------------------------------------------------------------------|
| `reset(task)`  | messages or text before the first turn, or None; `task` is the record of the prompt  |
| `step(action)` | `(observation, reward, done)`; `action` is the text of the policy's turn             |
| `close()`      | nothing; optional                                                                    |

An observation is a text, or a list of chat messages. With a chat template, a text becomes a message of the user.
Optional attributes: `tools`, the JSON schemas of tools for the chat template. `prepare`, a class method that is called
once with the arguments, before workers exist: it may import what the sandbox would not allow.

The data flow of one action:

    EpisodeRunner.act ── text of the turn ──► Session ── socket ──► worker process ── step(action)
         │                                                                │
         └── token ids of the observation ◄── ObservationEncoder ◄── observation, reward, done

- `episodes.py`: the controller side. It carries out `Act` and `Close`, and appends observations to the buffer.
- `session.py`: one environment in its worker process, seen from the controller.
- `host.py`: the process that imports the class once and forks a sandboxed worker for each episode.
- `observation_tokens.py`: token ids of observations, by the model's chat template.
- `registry.py`: the class of a name. `retry.py`, `containers.py`, `http_environments.py`,
  `verifiers_environments.py`: environments of this package.
- `tool_calls.py`: find tool calls in a turn. `tools.py`: the environment that executes them. `mcp_client.py`: tools of
  MCP servers.

Token in, token out: a turn is trained on as sampled. Its text is decoded for the environment and never tokenized again.
Each observation is tokenized once, when it arrives, and appended to the context.
"""
