"""deploy/: each file fits the schema or the linter of the program that reads it, and the rest of the project."""

import copy
import gzip
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import jsonschema
import pytest
import yaml
from conftest import ROOT, SCRIPTS
from packaging.requirements import Requirement
from test_docs import check_script, run_sh_variables

DEPLOY = ROOT / "deploy"
BIN = Path(sys.executable).parent
SHELL_SCRIPTS = [ROOT / "run.sh", ROOT / ".ci" / "run", *sorted(DEPLOY.glob("*.sh"))]
RAYJOBS = ["rayjob.yaml", "rayjob-s3.yaml"]


def read_yaml(name):
    return yaml.safe_load((DEPLOY / name).read_text())


def read_pins(path):
    """Return {package: version specifier} of a requirements file."""
    lines = [line.split("#")[0].strip() for line in path.read_text().splitlines()]
    found = [Requirement(line) for line in lines if line and not line.startswith("-r")]
    return {each.name.lower(): str(each.specifier) for each in found}


# ---------------------------------------------------------------------------------------------------------------------
# Kubernetes


def to_json_schema(schema):
    """Return the JSON Schema of a structural schema of Kubernetes; a field that it does not name is an error.

    The API server drops such fields in silence, which is how a misspelled one goes unnoticed.
    """
    if isinstance(schema, list):
        return [to_json_schema(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    schema = {key: to_json_schema(value) for key, value in schema.items()}
    if schema.pop("x-kubernetes-int-or-string", False):
        schema.pop("type", None)
        schema.setdefault("anyOf", [{"type": "integer"}, {"type": "string"}])
    is_open = schema.pop("x-kubernetes-preserve-unknown-fields", False)
    if schema.get("type") == "object" and not is_open:
        schema.setdefault("additionalProperties", False)
    return schema


@pytest.fixture(scope="module")
def rayjobs():
    """The validator of a RayJob."""
    found = json.loads(gzip.decompress((ROOT / "tests/data/rayjob-crd-1.7.0.json.gz").read_bytes()))
    schema = to_json_schema(found["openAPIV3Schema"])
    schema["properties"]["metadata"] = {"type": "object"}  # that of every object of Kubernetes
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


@pytest.mark.parametrize("name", RAYJOBS)
def test_a_rayjob_fits_the_schema_of_kuberay(rayjobs, name):
    assert [error.message for error in rayjobs.iter_errors(read_yaml(name))] == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda spec: spec.update(entryPoint="python x.py"), "'entryPoint' was unexpected"),
        (lambda spec: spec.update(backoffLimit="2"), "'2' is not of type 'integer'"),
        (lambda spec: spec["rayClusterSpec"]["authOptions"].update(mode="tokens"), "is not one of"),
        (lambda spec: spec["rayClusterSpec"]["workerGroupSpecs"][0].pop("groupName"), "'groupName' is a required"),
        (
            lambda spec: spec["rayClusterSpec"]["workerGroupSpecs"][0].update(minReplica=1),
            "'minReplica' was unexpected",
        ),
        (lambda spec: container(spec).update(volumeMount=[]), "'volumeMount' was unexpected"),
        (lambda spec: container(spec)["resources"]["limits"].update({"nvidia.com/gpu": None}), "is not valid"),
    ],
)
def test_a_mistake_in_a_rayjob_is_refused(rayjobs, change, message):
    job = copy.deepcopy(read_yaml("rayjob.yaml"))
    change(job["spec"])
    (error,) = rayjobs.iter_errors(job)
    assert message in error.message


def container(spec):
    return spec["rayClusterSpec"]["workerGroupSpecs"][0]["template"]["spec"]["containers"][0]


def pods(job):
    cluster = job["spec"]["rayClusterSpec"]
    return [cluster["headGroupSpec"]["template"]["spec"], cluster["workerGroupSpecs"][0]["template"]["spec"]]


@pytest.mark.parametrize("name", RAYJOBS)
def test_a_rayjob_is_what_the_guide_says(name):
    """A head that computes nothing, GPUs from none to some, tokens from secrets alone, Ray as pinned."""
    import ray

    job = read_yaml(name)
    cluster = job["spec"]["rayClusterSpec"]
    (group,) = cluster["workerGroupSpecs"]
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    assert cluster["enableInTreeAutoscaling"] and group["minReplicas"] == 0 < group["maxReplicas"]
    assert container(job["spec"])["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert cluster["authOptions"]["mode"] == "token" and cluster["rayVersion"] == ray.__version__
    values = [value for pod in pods(job) for each in pod["containers"] for value in each["env"] if "value" in value]
    assert {each["name"] for each in values} <= {"AWS_REGION", "AWS_DEFAULT_REGION"}
    guide = (ROOT / "docs/clusters.md").read_text()
    secrets = set(re.findall(r"(?:secretName: |secretRef: {name: |secretKeyRef: {name: )([\w-]+)", dump(name)))
    assert secrets == {"dreambooth-ray", "dreambooth-store", "dreambooth-hub"}
    assert all(f"create secret generic {secret} " in guide for secret in secrets)


def dump(name):
    return (DEPLOY / name).read_text()


@pytest.mark.parametrize("name", RAYJOBS)
def test_the_settings_of_a_rayjob_are_variables_of_run_sh(name):
    spec = read_yaml(name)["spec"]
    script, *steps = shlex.split(spec["entrypoint"])[1:]
    assert (ROOT / script).is_file() and set(steps) <= set("123456")
    environment = yaml.safe_load(spec["runtimeEnvYAML"])
    assert environment["working_dir"] == "/app" and f"WORKDIR {environment['working_dir']}\n" in dump("Dockerfile")
    variables = environment["env_vars"]
    assert set(variables) <= run_sh_variables() and all(isinstance(value, str) for value in variables.values())
    for variable, script in (("TRAIN_FLAGS", "train"), ("DRAW_FLAGS", "run_model"), ("DRAW_FLAGS", "evaluate")):
        assert list(check_script(script, shlex.split(variables[variable]), is_short=True)) == []
    lines = subprocess.run(
        ["bash", ROOT / "run.sh", "settings"], env={**os.environ, **variables}, capture_output=True, text=True
    ).stdout
    assert f"DATA_PREFIX={variables['DATA_PREFIX']}\n" in lines and "CLIP_MODEL=openai/clip-vit-base-patch32\n" in lines


def test_the_rayjobs_differ_in_their_folders_alone():
    def common(job):
        job["spec"].pop("entrypoint")
        variables = yaml.safe_load(job["spec"].pop("runtimeEnvYAML"))["env_vars"]
        for pod in pods(job):
            pod.pop("securityContext", None)
            pod["volumes"] = [each for each in pod.get("volumes", ()) if each["name"] != "data"]
            for each in pod["containers"]:
                each["volumeMounts"] = [mount for mount in each.get("volumeMounts", ()) if mount["name"] != "data"]
                each["env"] = [value for value in each["env"] if "AWS" not in value["name"]]
        return job, {name: value for name, value in variables.items() if not name.endswith(("_DIR", "_PREFIX"))}

    shared, stored = map(read_yaml, RAYJOBS)
    assert "claimName" in json.dumps(shared) and "claimName" not in json.dumps(stored)
    assert common(shared) == common(stored)


# ---------------------------------------------------------------------------------------------------------------------
# ray up


def validate_cluster(config):
    """Validate a file of `ray up` as it does itself, by ray-schema.json among others."""
    from ray.autoscaler._private import util

    util.validate_config(util.prepare_config(copy.deepcopy(config)))


def test_the_cluster_fits_the_schema_of_ray():
    import ray.autoscaler

    config = read_yaml("cluster.yaml")
    schema = json.loads((Path(ray.autoscaler.__file__).parent / "ray-schema.json").read_text())
    jsonschema.validate(config, schema)
    validate_cluster(config)
    for change in ({"max_worker": 3}, {"head_node_type": "heads"}, {"idle_timeout_minutes": "10"}):
        with pytest.raises((jsonschema.ValidationError, ValueError)):
            validate_cluster({**config, **change})


def test_the_machines_are_requests_that_ec2_accepts():
    """By botocore's own model of the request, without network."""
    from botocore.loaders import Loader
    from botocore.model import ServiceModel
    from botocore.validate import ParamValidator

    request = ServiceModel(Loader().load_service_model("ec2", "service-2")).operation_model("RunInstances").input_shape
    for name, machine in read_yaml("cluster.yaml")["available_node_types"].items():
        node = {**machine["node_config"], "MinCount": 1, "MaxCount": 1}
        assert ParamValidator().validate(node, request).generate_report() == "", name
        wrong = {**node, "InstanceMarketOption": {"MarketType": "spot"}}
        assert "InstanceMarketOption" in ParamValidator().validate(wrong, request).generate_report()


def test_the_cluster_has_gpus_on_spot_from_none_to_some_and_a_token():
    config = read_yaml("cluster.yaml")
    head, gpu = (config["available_node_types"][name] for name in ("head", "gpu"))
    assert head["resources"] == {"CPU": 0} and "InstanceMarketOptions" not in head["node_config"]
    assert gpu["min_workers"] == 0 < gpu["max_workers"] <= config["max_workers"] and gpu["resources"]["GPU"] == 1
    assert gpu["node_config"]["InstanceMarketOptions"] == {"MarketType": "spot"}
    assert "~/.ray/auth_token" in config["file_mounts"] and "ENV RAY_AUTH_MODE=token" in dump("Dockerfile")
    made = re.search(r"^RUN mkdir -p (.+)", dump("Dockerfile"), re.MULTILINE)
    places = {Path(place.replace("~", "/home/ubuntu")).parent for place in config["file_mounts"]}
    assert made and places == {Path(word) for word in made[1].split()}  # Docker's own would belong to root
    assert "\nENV HOME=/home/ubuntu\n" in dump("Dockerfile")
    assert "--dashboard-host=127.0.0.1" in config["head_start_ray_commands"][1]


# ---------------------------------------------------------------------------------------------------------------------
# The image, and what is uploaded


def test_the_dockerfile_passes_the_linter(tmp_path):
    hadolint = [BIN / "hadolint", "--no-color"]
    done = subprocess.run([*hadolint, DEPLOY / "Dockerfile"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")
    (tmp_path / "Dockerfile").write_text("FROM ubuntu\nRUN cd /tmp\n")
    assert subprocess.run([*hadolint, tmp_path / "Dockerfile"], capture_output=True).returncode == 1


def test_the_image_has_the_pinned_packages():
    """It installs requirements.txt itself, and what it adds has the version that is tested here."""
    ours, more = read_pins(ROOT / "requirements.txt"), read_pins(DEPLOY / "requirements.txt")
    tested = {**read_pins(ROOT / "requirements-test.txt"), **ours}
    assert "-r ../requirements.txt\n" in dump("requirements.txt")
    assert set(more) == {"ray", "bitsandbytes"}
    assert {name: tested[name] for name in more if name in tested} == {
        name: more[name] for name in more if name in tested
    }
    text = dump("Dockerfile")
    assert "uv pip install --no-cache -r deploy/requirements.txt" in text and "uv venv --python 3.11" in text
    assert 'target-version = "py311"' in (ROOT / "pyproject.toml").read_text()
    assert "torch 2.13 is built for CUDA 13.0" in text and re.search(r"^FROM nvidia/cuda:13\.0\.", text, re.MULTILINE)
    assert ours["torch"].startswith("==2.13.")  # with another one, look up the CUDA version of its wheel


def test_what_the_dockerfile_copies_exists():
    sources = [
        source
        for line in re.findall(r"^COPY (.+)", dump("Dockerfile"), re.MULTILINE)
        if "--from" not in line
        for source in [word for word in line.split() if not word.startswith("--")][:-1]
    ]
    assert len(sources) >= 3 and all((ROOT / source).exists() for source in sources)


def test_image_and_upload_have_the_same_files():
    def patterns(path):
        lines = (line.strip().replace("!/", "!") for line in path.read_text().splitlines())
        return {line.removeprefix("/") for line in lines if line and line[0] != "#"} - {
            "!.",
            "__pycache__",
            "**/__pycache__",
        }

    allowed = patterns(ROOT / ".rayignore")
    assert allowed == patterns(DEPLOY / "Dockerfile.dockerignore")
    assert "*" in allowed and all(any(ROOT.glob(each[1:])) for each in allowed - {"*"})


def test_a_job_gets_the_code_and_nothing_else(tmp_path):
    """Ray's own package of the project: no photos, models, outputs or tests; every script starts from it."""
    from ray._private.runtime_env import packaging

    tree, code = tmp_path / "tree", tmp_path / "code"
    shutil.copytree(
        ROOT, tree, ignore=shutil.ignore_patterns(".git", ".venv", "models", "data", "__pycache__", ".*_cache")
    )
    for name in ("rex/model-tuned/unet.safetensors", "photos/1.png", "models/m/vae.bin", "common/__pycache__/x.pyc"):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text("large")
    packaging.create_package(str(tree), tmp_path / "code.zip", include_gitignore=True)
    with zipfile.ZipFile(tmp_path / "code.zip") as package:
        names = {name for name in package.namelist() if not name.endswith("/")}
        package.extractall(code)
    folders = {name.split("/")[0] for name in names if "/" in name}
    assert folders == {"common", "pipelines", "training", "pretraining", "evaluation", "prompts", "deploy"}
    assert {f"{script}.py" for script in SCRIPTS} | {"run.sh", "deploy/steps.sh"} < names
    assert not any(name.endswith((".png", ".safetensors", ".bin", ".pyc")) for name in names)
    assert sum((code / name).stat().st_size for name in names) < 2**20
    for script in SCRIPTS:
        done = subprocess.run([sys.executable, f"{script}.py", "--help"], cwd=code, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


# ---------------------------------------------------------------------------------------------------------------------
# Shell scripts


@pytest.mark.parametrize("path", SHELL_SCRIPTS, ids=lambda path: path.name)
def test_a_shell_script_passes_the_linter(path):
    assert subprocess.run(["bash", "-n", path]).returncode == 0
    done = subprocess.run([BIN / "shellcheck", path], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")
    assert os.access(path, os.X_OK)


def write_program(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def copy_of_scripts(tmp_path):
    """A folder with the shell scripts alone."""
    tree = tmp_path / "a tree"
    shutil.copytree(DEPLOY, tree / "deploy")
    shutil.copy(ROOT / "run.sh", tree)
    return tree


def call(command, cwd, timeout=60, **environment):
    environment = {**os.environ, **{name: str(value) for name, value in environment.items()}}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout)


def test_steps_run_with_the_python_on_path_up_to_the_first_that_fails(copy_of_scripts, tmp_path):
    log = tmp_path / "log"
    program = f'#!/bin/bash\necho "$1" "${{*: -1}}" >>"{log}"\n[[ $1 != train.py ]] || exit 5\n'
    write_program(tmp_path / "bin" / "python", program)
    done = call(
        ["bash", copy_of_scripts / "deploy" / "steps.sh", "2", "4", "5"],
        tmp_path,
        PATH=f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        TRAIN_FLAGS="--gpus_per_worker 1",
    )
    assert done.returncode == 5
    assert [line.split()[0] for line in log.read_text().splitlines()] == ["cache_model.py"] * 2 + ["train.py"]
    assert "== step 4" in done.stderr and "== step 5" not in done.stderr


@pytest.mark.parametrize("words", [[], ["0"], ["7"], ["2", "all"]])
def test_steps_refuses_what_is_no_step_of_a_job(copy_of_scripts, words):
    done = call(["bash", copy_of_scripts / "deploy" / "steps.sh", *words], copy_of_scripts)
    assert done.returncode == 2 and "name the steps" in done.stderr and not (copy_of_scripts / ".venv").exists()


FAKE_RAY = """
import json, sys
class JobStatus:
    FAILED, STOPPED, SUCCEEDED = "FAILED", "STOPPED", "SUCCEEDED"
class Status(str):
    def is_terminal(self): return self != "RUNNING"
class JobSubmissionClient:
    asked = 0
    def get_job_info(self, name):
        JobSubmissionClient.asked += 1
        job = json.load(open("job.json"))
        class Info: pass
        Info.status = Status("RUNNING" if job["is_slow"] and JobSubmissionClient.asked == 1 else job["status"])
        Info.driver_exit_code, Info.message = job["code"], "the node was lost"
        return Info
"""
FAKE_CLI = """
import json, os, sys
words = sys.argv[1:]
if words[1] == "submit":
    json.dump([words, os.environ["RAY_API_SERVER_ADDRESS"], os.environ["RAY_AUTH_MODE"]], open("said.json", "w"))
    sys.exit(json.load(open("job.json"))["submit"])
sys.exit(json.load(open("job.json"))["lookup"])
"""


@pytest.fixture
def submit(copy_of_scripts, tmp_path):
    """A function that runs submit.sh with a stand-in for Ray: a job with a status, and a code of its driver."""
    lib = tmp_path / "lib"
    files = {"ray/job_submission.py": FAKE_RAY, "ray/scripts/scripts.py": FAKE_CLI, "aiohttp.py": ""}
    for name, text in {**files, "ray/__init__.py": "", "ray/scripts/__init__.py": ""}.items():
        write_program(lib / name, text)

    def run(*words, status="SUCCEEDED", code=0, submit=0, lookup=0, is_slow=False, **environment):
        job = {"status": status, "code": code, "submit": submit, "lookup": lookup, "is_slow": is_slow}
        (copy_of_scripts / "job.json").write_text(json.dumps(job))
        command = ["bash", copy_of_scripts / "deploy" / "submit.sh", *words]
        done = call(command, tmp_path, PYTHON=sys.executable, PYTHONPATH=lib, **environment)
        said = copy_of_scripts / "said.json"
        return done, json.loads(said.read_text()) if said.exists() else None

    return run


@pytest.mark.parametrize(
    ("job", "expected"),
    [
        ({}, 0),
        ({"status": "FAILED", "code": 75, "submit": 1}, 75),
        ({"status": "FAILED", "code": -9, "submit": 1}, 137),
        ({"status": "FAILED", "code": None, "submit": 1}, 1),
        ({"status": "STOPPED", "code": None}, 130),
        ({"submit": 1, "is_slow": True}, 0),  # the log was lost, not the job
        ({"submit": 1, "lookup": 1}, 75),
    ],
)
def test_submit_exits_as_the_command_did(submit, job, expected):
    done, (words, address, mode) = submit("python", "train.py", "--instance_prompt", "a cat's $HOME", **job)
    assert done.returncode == expected, done.stderr
    assert words[:3] == ["job", "submit", "--submission-id"] and words[4:8] == ["--working-dir", ".", *words[6:7], "{}"]
    assert words[8:] == ["--", "python", "train.py", "--instance_prompt", "a cat's $HOME"]
    assert (address, mode) == ("http://127.0.0.1:8265", "token")
    assert ("the node was lost" in done.stderr) == (expected == 1)


def test_submit_passes_the_variables_of_run_sh_and_no_secret(submit):
    done, (words, *_) = submit(
        "2", "4", DATA_PREFIX="s3://bucket/rex", ORIG_MODEL_NAME="a/b", CLASS_NAME="a 'fat' $cat", HF_TOKEN="hf_secret"
    )
    assert done.returncode == 0 and words[8:] == ["--", "bash", "deploy/steps.sh", "2", "4"]
    variables = json.loads(words[7])["env_vars"]
    assert set(variables) >= run_sh_variables()
    assert (
        variables["DATA_PREFIX"] == "s3://bucket/rex" and variables["TUNED_MODEL_DIR"] == "s3://bucket/rex/model-tuned"
    )
    assert variables["CLASS_NAME"] == "a 'fat' $cat" and "hf_secret" not in json.dumps(words)


@pytest.mark.parametrize(
    ("words", "environment", "message"),
    [
        ([], {}, "name steps of run.sh or a command"),
        (["0"], {}, "0 are not steps"),
        (["12"], {}, "12 are not steps"),
        (["4"], {}, "DATA_PREFIX=data is a folder on this machine"),
        (["4"], {"DATA_PREFIX": "s3://b/rex", "ORIG_MODEL_NAME": "deploy"}, "ORIG_MODEL_NAME=deploy is a folder"),
        (["1"], {"DATA_PREFIX": "/shared/rex", "INSTANCE_DIR": "deploy"}, "INSTANCE_DIR=deploy is a folder"),
    ],
)
def test_submit_refuses_what_a_job_cannot_do(submit, words, environment, message):
    done, said = submit(*words, **environment)
    assert done.returncode == 2 and message in done.stderr and said is None


@pytest.fixture
def slurm(copy_of_scripts, tmp_path):
    """A function that starts slurm.sh, spooled as Slurm does, on stand-ins for Slurm and Ray; with its log of steps."""
    log = tmp_path / "steps"
    write_program(tmp_path / "bin" / "scontrol", '#!/bin/bash\nprintf "%s\\n" $NODES\n')
    write_program(
        tmp_path / "bin" / "srun",
        f'#!/bin/bash\nprintf "%s " "${{#RAY_AUTH_TOKEN}}" "$@" >>"{log}"\necho >>"{log}"\nexec sleep 60\n',
    )
    (tmp_path / "lib").mkdir()
    ray = "import os\ndef init(**_): pass\ndef nodes(): return [{'Alive': True}] * int(os.environ['ALIVE'])\n"
    (tmp_path / "lib" / "ray.py").write_text(ray)
    shutil.copy(DEPLOY / "slurm.sh", tmp_path / "spooled")

    def start(*words, **environment):
        environment = {
            **os.environ,
            "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
            "PYTHON": sys.executable,
            "PYTHONPATH": str(tmp_path / "lib"),
            "SLURM_SUBMIT_DIR": str(copy_of_scripts),
            "SLURM_JOB_NODELIST": "n[1-3]",
            "SLURM_JOB_ID": "4711",
            "SLURM_CPUS_PER_TASK": "6",
            "HEAD_IP": "10.0.0.1",
            "NODES": "n1 n2 n3",
            "ALIVE": "3",
            **environment,
        }
        command = ["bash", tmp_path / "spooled", *words]
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    return start, log


def test_slurm_starts_a_head_and_workers_then_the_command_and_ends_them(slurm):
    start, log = slurm
    show = "import os; print(os.environ['RAY_ADDRESS'], os.environ['RAY_AUTH_MODE'], len(os.environ['RAY_AUTH_TOKEN']))"
    process = start(sys.executable, "-c", f"{show}; raise SystemExit(4)")
    out, error = process.communicate(timeout=30)  # it ends when no step of it holds its output any more
    assert (process.returncode, out) == (4, "10.0.0.1:24711 token 64\n"), error
    head, workers = sorted(log.read_text().splitlines(), key=lambda line: "--address" in line)
    assert (
        "--nodes=1 " in head and "--nodelist=n1 " in head and "--head --node-ip-address=10.0.0.1 --port=24711" in head
    )
    assert "--nodes=2 " in workers and "--nodelist=n2,n3 " in workers and "--address=10.0.0.1:24711" in workers
    assert all(line.startswith("64 ") and "--num-cpus=6" in line for line in (head, workers))


def test_slurm_on_one_node_starts_no_workers(slurm):
    start, log = slurm
    assert start("true", NODES="n1", ALIVE="1").wait(timeout=30) == 0
    assert len(log.read_text().splitlines()) == 1


def test_slurm_gives_up_on_nodes_that_do_not_join(slurm):
    start, _ = slurm
    process = start("true", ALIVE="2", START_SECONDS="0")
    _, error = process.communicate(timeout=30)
    assert process.returncode == 75 and "not all of n1 n2 n3 run Ray after 0 s" in error


def test_slurm_passes_sigterm_to_the_command_and_waits_while_it_saves(slurm, tmp_path):
    start, _ = slurm
    ready = tmp_path / "ready"
    program = f'trap "sleep 1; echo saved; exit 143" TERM; touch {ready}; for i in {{1..300}}; do sleep 0.1; done'
    process = start("bash", "-c", program)
    deadline = time.monotonic() + 30
    while not ready.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    out, error = process.communicate(timeout=30)
    assert (process.returncode, out) == (143, "saved\n"), error


def test_slurm_needs_a_command(slurm):
    start, log = slurm
    process = start()
    assert process.wait(timeout=30) == 2 and not log.exists()
