"""Plan, simulate and run disaggregated RL post-training of LLMs.

The folders here are the core: they decide (`engine`), describe (`runfile`, `hardware`, `workload`) and report
(`record`, `doctor`, `report`). They never wait and never compute on GPUs. `sim` and `executor` are the two worlds that
the engine drives; `profiles` has the data. These three are symbolic links to folders at the top of the repository.

Notebooks and scripts import from `streamrl.api`.
"""

__version__ = "0.2.0"
