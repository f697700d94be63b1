"""What training costs: layer by layer, stage by stage, micro-batch after micro-batch."""
