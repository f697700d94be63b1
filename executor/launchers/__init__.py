"""Start roles where they live and call them: in this process, in local processes, or on a Ray cluster."""

from __future__ import annotations
