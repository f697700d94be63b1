"""Factors of one's own cluster: simulated steps beside measured ones of the same work, and what the difference says."""
