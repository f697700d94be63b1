"""The replica, and the inference engine that it generates with."""
