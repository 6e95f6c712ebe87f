#!/usr/bin/env bash
# Run numbered steps of run.sh on a node of a cluster, with the Python on PATH: deploy/steps.sh 2 3 4 5 6
# Stops at the first step that fails, with its exit code. Variables of run.sh are read from the environment.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if (($# == 0)) || [[ "$*" =~ [^1-6\ ] ]]; then
    echo "deploy/steps.sh: name the steps to run, 1 to 6: deploy/steps.sh 2 3 4 5 6" >&2
    exit 2
fi
if [[ ! -x .venv/bin/python ]]; then # run.sh calls .venv/bin/python; the packages are those of the node
    mkdir -p .venv/bin
    printf '#!/bin/sh\nexec %q "$@"\n' "$(command -v python)" >.venv/bin/python.part
    chmod +x .venv/bin/python.part
    mv .venv/bin/python.part .venv/bin/python
fi
for step in "$@"; do
    bash run.sh "$step"
done
