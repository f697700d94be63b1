#!/usr/bin/env bash
# Installs streamrl from this checkout with the extras that are named, and sees that it starts:
#   examples/clusters/install.sh executor,vllm,deepspeed,ray /opt/streamrl
set -euo pipefail
extras=${1:-executor,ray}
target=${2:-/opt/streamrl}
checkout=$(cd "$(dirname "$0")/../.." && pwd)
"${PYTHON:-python3}" -m venv "$target"
if [ -n "${TORCH:-}" ]; then # such as torch==2.13.0, where not the newest is wanted
    "$target/bin/python" -m pip install --quiet "$TORCH"
fi
"$target/bin/python" -m pip install --quiet "$checkout[$extras]"
"$target/bin/streamrl" --help >/dev/null
