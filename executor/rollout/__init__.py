"""The replica: its controller side, its worker, and the inference engines that this may generate with."""
