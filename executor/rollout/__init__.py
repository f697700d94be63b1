"""The replica: its controller side, its worker, and the inference engine that this generates with."""
