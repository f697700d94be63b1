"""What only this machine tells of a run file: what is installed, which GPUs there are, what lies on its disk."""
