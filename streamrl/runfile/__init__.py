"""The run file as frozen structs: its sections, quantities with units, reading, writing, `--set`, and what may not stand together."""
