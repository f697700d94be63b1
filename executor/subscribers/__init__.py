"""Several trainers on one stream of rollouts: secondary trainers that attach and detach, and readers of the stream."""
