"""The scripts that start a run on several devices and nodes, with two processes on this machine."""

import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from command_line import QUICKSTART

ROOT = Path(__file__).parents[2]
DDP = ROOT / "configs" / "strategy" / "ddp.yaml"

SRUN = """#!/usr/bin/env bash
# Two tasks on one node, and signals passed on to them, as srun does.
for task in 0 1; do SLURM_PROCID=$task SLURM_LOCALID=$task SLURM_NODEID=0 "$@" & tasks+=($!); done
trap 'kill -TERM "${tasks[@]}"' TERM
for task in "${tasks[@]}"; do
    while kill -0 "$task" 2>/dev/null; do wait "$task"; code=$?; done
done
exit "$code"
"""


def environment(folder, **more):
    path = os.pathsep.join([str(folder), str(Path(sys.executable).parent), os.environ["PATH"]])
    return os.environ | {"OMP_NUM_THREADS": "1", "PATH": path, "PYTHONPATH": str(ROOT)} | more


def command(script, overlay, *extra):
    configs = [item for path in (QUICKSTART, overlay, str(DDP)) for item in ("--config", path)]
    return [
        str(ROOT / "scripts" / script), "fit", *configs,
        "--trainer.logger", "false", "--trainer.limit_val_batches", "0", *extra,
    ]  # fmt: skip


@pytest.mark.slow
def test_torchrun(overlay, tmp_path):
    run = subprocess.run(
        command("torchrun.sh", overlay, "--checkpoint.folder", str(tmp_path)),
        env=environment(tmp_path, DEVICES="2"), cwd=tmp_path, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    assert "GLOBAL_RANK: 1, MEMBER: 2/2" in run.stderr
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["iteration"] == 4


@pytest.mark.slow
def test_a_slurm_job_told_to_stop_saves_queues_again_and_goes_on(overlay, tmp_path):
    programs = {"srun": SRUN, "scontrol": f'#!/usr/bin/env bash\necho "$@" >> {tmp_path}/requeued\n'}
    for name, content in programs.items():
        (tmp_path / name).write_text(content)
        (tmp_path / name).chmod(0o755 | stat.S_IXUSR)
    slurm = {
        **{"SLURM_JOB_ID": "12345", "SLURM_JOB_NAME": "recast_pl", "SLURM_NODELIST": "127.0.0.1"},
        **{"SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2", "SLURM_NNODES": "1", "SLURM_JOB_NUM_NODES": "1"},
    }
    last = tmp_path / "runs" / "12345" / "checkpoints" / "last.ckpt"

    def job(epochs):
        return subprocess.Popen(
            command("slurm.sbatch", overlay, "--trainer.max_epochs", str(epochs)),
            env=environment(tmp_path, **slurm), cwd=tmp_path, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    first = job(epochs=1000)
    while not (last.exists() and torch.load(last, weights_only=True)["iteration"] >= 2):
        assert first.poll() is None, first.stdout.read()[-3000:]
        time.sleep(0.05)
    first.send_signal(signal.SIGTERM)
    said, _ = first.communicate(timeout=300)
    assert (tmp_path / "requeued").read_text() == "requeue 12345\n", said[-3000:]
    stopped = torch.load(last, weights_only=True)["iteration"]
    second = job(epochs=stopped // 2 + 2)
    said, _ = second.communicate(timeout=300)
    assert second.returncode == 0, said[-3000:]
    assert "Restored all states from the checkpoint" in said
    assert torch.load(last, weights_only=True)["iteration"] == 2 * (stopped // 2 + 2)
    assert (tmp_path / "requeued").read_text() == "requeue 12345\n"
