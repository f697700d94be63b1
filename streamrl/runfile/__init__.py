"""The run file as frozen structs: its sections, quantities with units, reading and writing, and checks."""
