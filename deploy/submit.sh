#!/usr/bin/env bash
# Submit a job to a Ray cluster, print its log, wait for its end, and exit with the exit code of its command.
#   deploy/submit.sh 2 3 4 5 6                             numbered steps of run.sh, with its variables
#   deploy/submit.sh python train.py --model_dir s3://...  any command, in a copy of the code on the head node
# RAY_API_SERVER_ADDRESS is the address of the dashboard, by default http://127.0.0.1:8265, where `ray dashboard` and
# `kubectl port-forward` make it appear. RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH is the token of the cluster.
#
# Exit codes: those of the command; 1 if the job failed without one; 75 if the cluster does not answer; 130 if the job
# or this script was stopped. A job that this script no longer watches goes on: `ray job logs --follow`, `ray job stop`.
# The job sees no variable of this shell except those of run.sh: tokens and keys belong on the nodes, because everybody
# who can open the dashboard can read the environment of a job.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PYTHON=${PYTHON:-.venv/bin/python}
export RAY_API_SERVER_ADDRESS=${RAY_API_SERVER_ADDRESS:-http://127.0.0.1:8265}
export RAY_AUTH_MODE=${RAY_AUTH_MODE:-token}

fail() { # print a message and exit with code $1
    echo "deploy/submit.sh: $2" >&2
    exit "$1"
}

check_settings() { # refuse folders that a job cannot read, or that are lost with the job
    local name value
    for name in DATA_PREFIX INSTANCE_DIR ORIG_MODEL_NAME; do
        value=$(eval "$(bash run.sh settings)" && echo "${!name}")
        if [[ $name != DATA_PREFIX && ! -e $value ]]; then # a name on the Hub
            continue
        elif [[ $name == INSTANCE_DIR && " ${STEPS[*]} " != *" 1 "* ]]; then
            continue
        elif [[ $value != /* && $value != *://* ]]; then
            fail 2 "$name=$value is a folder on this machine, which the job cannot use: set $name to a URI such as \
s3://bucket/rex, or to the absolute path of a folder that all nodes share"
        fi
    done
}

make_environment() { # print the runtime environment of the job as JSON: the variables of run.sh
    bash run.sh settings | "$PYTHON" -c '
import json, shlex, sys
print(json.dumps({"env_vars": dict(word.split("=", 1) for word in shlex.split(sys.stdin.read()))}))'
}

wait_for_end() { # wait until job $1 has ended; exit with the code of its command
    "$PYTHON" - "$1" <<'EOF'
import sys
import time

from ray.job_submission import JobStatus, JobSubmissionClient

client = JobSubmissionClient()
while not (job := client.get_job_info(sys.argv[1])).status.is_terminal():
    time.sleep(2)
if job.status == JobStatus.STOPPED:
    sys.exit(130)
if job.status == JobStatus.FAILED and job.driver_exit_code is None:
    print(f"deploy/submit.sh: {job.message}", file=sys.stderr)
code = job.driver_exit_code if job.driver_exit_code is not None else job.status == JobStatus.FAILED
sys.exit(128 - code if code < 0 else int(code))  # as a shell reports a signal
EOF
}

(($#)) || fail 2 "name steps of run.sh or a command: deploy/submit.sh 2 3 4 5 6"
if ! "$PYTHON" -c 'from ray.job_submission import JobSubmissionClient; import aiohttp' 2>/dev/null; then
    fail 2 "$PYTHON lacks the client for jobs: $PYTHON -m pip install -r deploy/requirements.txt, or set PYTHON"
fi
ENVIRONMENT='{}'
if [[ $1 =~ ^[0-9]+$ ]]; then
    [[ "$*" =~ ^[1-6](\ [1-6])*$ ]] || fail 2 "$* are not steps of a job: name one or more of 1 to 6"
    STEPS=("$@")
    check_settings
    ENVIRONMENT=$(make_environment)
    set -- bash deploy/steps.sh "$@"
fi

JOB=dreambooth-$(date +%Y%m%d-%H%M%S)-$RANDOM
trap 'fail 130 "job $JOB goes on: ray job logs --follow $JOB; to end it: ray job stop $JOB"' INT
if ! "$PYTHON" -m ray.scripts.scripts job submit --submission-id "$JOB" --working-dir . \
    --runtime-env-json "$ENVIRONMENT" -- "$@"; then
    "$PYTHON" -m ray.scripts.scripts job status "$JOB" >/dev/null 2>&1 ||
        fail 75 "no job was started at RAY_API_SERVER_ADDRESS=$RAY_API_SERVER_ADDRESS: see above; is the cluster up, \
is its port forwarded, and is its token set?"
fi
wait_for_end "$JOB" # `ray job submit` exits with 1 whatever the code, and with 0 if the job was stopped
