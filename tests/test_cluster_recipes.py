"""The scripts of the page on many processes run, and the files of the page on clusters are what they should be."""

import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import yaml

from convexformer import ConvexAttentionRegressor, ConvexProbeRegressor, load_model
from convexformer.constrained import InfeasibleWarning
from convexformer.storage import write_shards

ROOT = Path(__file__).parent.parent
RECIPES = ROOT / "examples" / "clusters"
PAGES = ROOT / "docs" / "guide"
SCRIPTS = {
    found[1]: found[0]
    for found in re.finditer(
        r"(?<=```python\n)# (\w+)\.py\n(?:.*\n)*?(?=```)", (PAGES / "many_processes.md").read_text()
    )
}
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
LENGTHS = np.arange(600) % 8 + 1  # real tokens of the samples, for probes


def run(folder, *command, **settings):
    paths = os.pathsep.join(filter(None, [str(ROOT), str(ROOT / "solvers"), os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths, **settings}
    command = [str(part) for part in command]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def samples():
    """The samples of both ranks of the script."""
    X, y = [], []
    for rank in range(2):
        rng = np.random.default_rng(rank)
        X.append(rng.normal(size=(300, 8, 4)))
        y.append(X[-1][:, 2, 0] - 0.5 * X[-1][:, 5, 1] + 0.1 * rng.normal(size=300))
    return np.concatenate(X), np.concatenate(y)


@pytest.fixture
def shards(samples, tmp_path):
    """Function that writes the samples, and other arrays, to a folder of shards."""

    def write(**others):
        arrays = dict(zip(("X", "y"), samples, strict=True)) | others
        write_shards(tmp_path / "shards", lambda rows: {k: v[rows] for k, v in arrays.items()}, 600, shard_rows=100)

    return write


# Starting processes takes far longer than what a script does, and torch makes one process group in each.
ONE_AFTER_THE_OTHER = """
import runpy, sys
from unittest import mock
import torch.distributed as dist

dist.init_process_group("gloo")
with mock.patch.object(dist, "init_process_group"), mock.patch.object(dist, "destroy_process_group"):
    for script in sys.argv[1:]:
        runpy.run_path(script, run_name="__main__")
dist.destroy_process_group()
"""


def test_scripts_give_the_fits_of_one_process(samples, shards, tmp_path):
    shards(lengths=LENGTHS)
    scripts = {name: SCRIPTS[name] for name in ("own_samples", "shared_path", "shared_probe", "own_denoiser")}
    # More of them amplify rounding.
    scripts["own_denoiser"] = scripts["own_denoiser"].replace("n_epochs=40", "n_epochs=5")
    for name, script in scripts.items():
        (tmp_path / f"{name}.py").write_text(script)
    (tmp_path / "all.py").write_text(ONE_AFTER_THE_OTHER)
    run(tmp_path, *TORCHRUN, "all.py", *(f"{name}.py" for name in scripts))

    alone = ConvexAttentionRegressor(alpha=0.01, tol=1e-10).fit(*samples)
    for name in ("own_samples", "shared_path"):
        objective = load_model(tmp_path / f"{name}.npz").certificate_.primal
        assert objective == pytest.approx(alone.certificate_.primal, rel=1e-9)

    check_probe(tmp_path / "shared_probe.npz", *samples)

    parts = [np.random.default_rng(rank).uniform(size=(200, 1, 4)).repeat(6, axis=1) for rank in range(2)]
    model = load_model(tmp_path / "own_denoiser.npz")
    assert model.n_epochs == 5
    found = model.transform(parts[0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", InfeasibleWarning)
        alone = model.fit(np.concatenate(parts))
    np.testing.assert_allclose(alone.transform(parts[0]), found, rtol=1e-6)


def check_probe(path, X, y):
    """Check a saved probe against that of one process."""
    alone = ConvexProbeRegressor(alpha=0.01, tol=1e-10, random_state=0).fit((X, LENGTHS), y)
    model = load_model(path)
    assert model.certificate_.primal == pytest.approx(alone.certificate_.primal, rel=1e-9)
    np.testing.assert_allclose(model.predict((X, LENGTHS)), alone.predict((X, LENGTHS)), atol=1e-4)


SCRIPT_THAT_COUNTS = """
import atexit, pathlib, sys

def threads_of_gloo():
    return sum("gloo" in name.read_text() for name in pathlib.Path("/proc/self/task").glob("*/comm"))

atexit.register(lambda: pathlib.Path(f"{os.environ['RANK']}.txt").write_text(f"{before} {threads_of_gloo()}"))
import os
import numpy as np
import torch.distributed as dist
from convexformer import ConvexAttentionRegressor

dist.init_process_group("gloo")
X = np.random.default_rng(dist.get_rank()).normal(size=(300, 8, 4))
ConvexAttentionRegressor(alpha=0.01, tol=1e-10).fit(X, X[:, 2, 0])
before = threads_of_gloo()
dist.destroy_process_group()
"""


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are named in /proc")
def test_no_thread_of_gloo_outlives_the_interpreter(tmp_path):
    (tmp_path / "counts.py").write_text(SCRIPT_THAT_COUNTS)
    run(tmp_path, *TORCHRUN, "counts.py")
    for rank in range(2):
        before, after = map(int, (tmp_path / f"{rank}.txt").read_text().split())
        assert before > 0
        assert after == 0


def test_probe_of_the_command_is_that_of_one_process(samples, shards, tmp_path):
    shards(lengths=LENGTHS)
    options = ["--probe", "--tol", 1e-10, "--model", "command.npz", "--quiet"]
    run(tmp_path, *TORCHRUN, "-m", "convexformer", "fit", "shards", *options)
    check_probe(tmp_path / "command.npz", *samples)


def test_page_shows_the_files():
    shown = re.findall(r"```\{literalinclude\} (.*)", (PAGES / "clusters.md").read_text())
    assert {(PAGES / path).resolve() for path in shown} == set(RECIPES.iterdir())


def test_slurm_file():
    path = RECIPES / "fit.sbatch"
    assert subprocess.run(["bash", "-n", str(path)], check=False).returncode == 0
    text = path.read_text()
    assert text.startswith("#!/bin/bash\n#SBATCH ")
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", text, re.MULTILINE))
    threads = re.search(r"OMP_NUM_THREADS=(\d+)", text)
    processes = re.search(r"--nproc-per-node (\d+)", text)
    assert options["ntasks-per-node"] == "1"  # torchrun, which starts the processes
    assert int(options["cpus-per-task"]) == int(threads[1]) * int(processes[1])


def test_kubernetes_file():
    job = yaml.safe_load((RECIPES / "pytorchjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"], job["metadata"]["name"]) == (
        "kubeflow.org/v1",
        "PyTorchJob",
        "convexformer",
    )
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert set(replicas) == {"Master", "Worker"}
    assert replicas["Master"]["replicas"] == 1
    assert replicas["Worker"]["replicas"] >= 1
    for replica in replicas.values():
        pod = replica["template"]["spec"]
        (container,) = pod["containers"]
        assert container["name"] == "pytorch"  # as the operator has it
        assert container["image"]
        assert container["command"][:4] == ["python", "-m", "convexformer", "fit"]
        volumes = {volume["name"] for volume in pod["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes


def test_kubernetes_command_runs_in_two_pods(samples, shards, tmp_path):
    shards()
    job = yaml.safe_load((RECIPES / "pytorchjob.yaml").read_text())
    (container,) = job["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["containers"]
    command = [part.replace("/data", str(tmp_path)) for part in container["command"]]
    command[0] = sys.executable
    pods = "import os, subprocess, sys\n"
    pods += "import torch.distributed as dist\n"
    pods += "port = dist.TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False).port\n"
    pods += "common = dict(os.environ, WORLD_SIZE='2', MASTER_ADDR='127.0.0.1', MASTER_PORT=str(port))\n"
    pods += "found = [subprocess.Popen(sys.argv[1:], env=dict(common, RANK=str(rank))) for rank in range(2)]\n"
    pods += "sys.exit(max(pod.wait() for pod in found))\n"
    run(tmp_path, sys.executable, "-c", pods, *command, "--quiet")
    alone = ConvexAttentionRegressor(alpha=0.01).fit(*samples)
    objective = load_model(tmp_path / "model.npz").certificate_.primal
    assert objective == pytest.approx(alone.certificate_.primal, rel=1e-3)


def test_script_for_ray(samples, shards, tmp_path):
    pytest.importorskip("ray")
    shards()
    settings = {"HOME": str(tmp_path), "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    run(tmp_path, sys.executable, RECIPES / "ray_train.py", "shards", "model.npz", **settings)
    alone = ConvexAttentionRegressor(alpha=0.01, tol=1e-6).fit(*samples)
    objective = load_model(tmp_path / "model.npz").certificate_.primal
    assert objective == pytest.approx(alone.certificate_.primal, rel=1e-5)
