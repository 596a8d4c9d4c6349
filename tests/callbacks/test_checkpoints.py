"""A checkpoint is whole or not there, and a run goes on from it as if it had never stopped."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from command_line import QUICKSTART

from recast_pl.callbacks.checkpoints import LAST, AtomicCheckpointIO, CheckpointNotWritten, Checkpoints
from recast_pl.credit import CreditAssigner, Preview, ReCAST
from recast_pl.testing import Near, theta, train

CHECKPOINT = {"state_dict": {"w": torch.arange(3.0)}, "iteration": 1, "pytorch-lightning_version": "2.6.6"}


def differences(one, other, at=""):
    """Where two checkpoints differ by a bit; seconds do, and what Lightning's loops count may."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        rest = [key for key in one if key not in ("loops", "seconds", "evaluations")]
        return [found for key in rest for found in differences(one[key], other[key], f"{at}/{key}")]
    if isinstance(one, (list, tuple)) and len(one) == len(other):
        return [
            f for i, (a, b) in enumerate(zip(one, other, strict=True)) for f in differences(a, b, f"{at}/{i}")
        ]
    equal = one.equal(other) if isinstance(one, torch.Tensor) else one == other
    return [] if equal else [at]


# ------------------------------------------------------------------ the file


def test_a_checkpoint_comes_back(tmp_path):
    AtomicCheckpointIO().save_checkpoint(CHECKPOINT, tmp_path / "new" / "a.ckpt")
    assert not differences(AtomicCheckpointIO().load_checkpoint(tmp_path / "new" / "a.ckpt"), CHECKPOINT)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["a.ckpt"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_leaves_the_last_good_checkpoint(tmp_path):
    io, path = AtomicCheckpointIO(), tmp_path / "a.ckpt"
    io.save_checkpoint(CHECKPOINT, path)
    (tmp_path / ".a.ckpt.unfinished").symlink_to("/dev/full")
    with pytest.raises(CheckpointNotWritten, match=r"a\.ckpt.*What was there before is intact"):
        io.save_checkpoint({**CHECKPOINT, "iteration": 2}, path)
    assert not differences(io.load_checkpoint(path), CHECKPOINT)
    io.save_checkpoint({**CHECKPOINT, "iteration": 2}, path)  # there is room again
    assert io.load_checkpoint(path)["iteration"] == 2


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(CheckpointNotWritten, match=r"file/a\.ckpt"):
        AtomicCheckpointIO().save_checkpoint(CHECKPOINT, tmp_path / "file" / "a.ckpt")


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 0.999])
def test_a_checkpoint_cut_short_is_refused(tmp_path, share):
    io, path = AtomicCheckpointIO(), tmp_path / "a.ckpt"
    io.save_checkpoint(CHECKPOINT, path)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(ValueError, match=r"--ckpt_path: .*a\.ckpt is no whole checkpoint"):
        io.load_checkpoint(path)


@pytest.mark.parametrize(
    ("content", "match"),
    [({"w": torch.zeros(2)}, "lacks state_dict, iteration"), (torch.zeros(2), "is not a checkpoint of a run"),
     ({**CHECKPOINT, "extra": Near(0.5)}, "no whole checkpoint")],
)  # fmt: skip
def test_a_foreign_file_is_refused(tmp_path, content, match):
    torch.save(content, tmp_path / "a.ckpt")
    with pytest.raises(ValueError, match=match):
        AtomicCheckpointIO().load_checkpoint(tmp_path / "a.ckpt")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        AtomicCheckpointIO().load_checkpoint(tmp_path / "nowhere.ckpt")


# ------------------------------------------------------------------ resuming


def recast():
    return CreditAssigner(every_n_steps=3, strategy=ReCAST(estimator=Preview(), samples=16))


REWARDS = {"near": Near(0.5), "far": Near(-0.4)}


class Stop(Checkpoints):
    """Ends a run as Ctrl-C does after so many iterations, or as a kill does at an epoch's end; counts steps."""

    def __init__(self, *, after=None, epoch=None, **rest):
        super().__init__(**rest)
        self.after, self.epoch, self.steps = after, epoch, []

    def on_train_batch_start(self, trainer, pl_module, *rest):
        super().on_train_batch_start(trainer, pl_module, *rest)
        self.steps.append((pl_module.iteration, trainer.fit_loop.epoch_loop._batches_that_stepped))

    def on_train_batch_end(self, trainer, pl_module, *rest):
        self._asked_to_stop = pl_module.iteration == self.after
        super().on_train_batch_end(trainer, pl_module, *rest)

    def on_train_epoch_end(self, trainer, pl_module):
        super().on_train_epoch_end(trainer, pl_module)
        if trainer.current_epoch == self.epoch:
            raise KeyboardInterrupt


@pytest.mark.parametrize(
    "stops",
    [
        [{"after": 1}], [{"after": 7}], [{"after": 14}],
        [{"after": 5}, {"after": 10}],  # both the last of their epochs
        [{"epoch": 0}, {"epoch": 1}],
        [{"after": 4}, {"after": 5}, {"after": 6}, {"epoch": 1}, {"after": 14}],
    ],
    ids=str,
)  # fmt: skip
def test_a_run_stopped_anywhere_and_resumed_is_the_whole_run(tmp_path, stops):
    whole = Stop(folder=str(tmp_path / "whole"))
    module, _ = train(REWARDS, epochs=3, folder=tmp_path, credit=recast(), callbacks=[whole])
    part, steps = tmp_path / "part", []
    for stop in stops:
        callback = Stop(folder=str(part), **stop)
        resume = part / LAST if (part / LAST).exists() else None
        arguments = {"folder": tmp_path, "credit": recast(), "callbacks": [callback], "resume": resume}
        with pytest.raises(SystemExit):
            train(REWARDS, epochs=3, **arguments)
        steps += callback.steps
    rest = Stop(folder=str(part))
    resumed, again = train(
        REWARDS, epochs=3, folder=tmp_path, credit=recast(), callbacks=[rest], resume=part / LAST
    )
    assert (resumed.iteration, again.current_epoch, again.global_step) == (15, 3, 15)
    assert theta(resumed) == theta(module)
    assert steps + rest.steps == whole.steps == [(step, step) for step in range(15)]
    one, other = (torch.load(folder / LAST, weights_only=True) for folder in (tmp_path / "whole", part))
    assert not differences(one, other)


def test_kept_checkpoints_stay_and_the_last_is_replaced(tmp_path):
    keep = Checkpoints(folder=str(tmp_path), every_n_iterations=2, keep_every_n_iterations=4)
    train({"near": Near(0.5)}, epochs=2, folder=tmp_path, callbacks=[keep])
    assert sorted(path.name for path in tmp_path.glob("*.ckpt")) == [
        "iteration=00004.ckpt", "iteration=00008.ckpt", LAST,
    ]  # fmt: skip
    saved = [torch.load(path, weights_only=True)["iteration"] for path in sorted(tmp_path.glob("*.ckpt"))]
    assert saved == [4, 8, 10]


def test_another_number_of_steps_is_refused(tmp_path):
    train({"near": Near(0.5)}, epochs=1, folder=tmp_path, callbacks=[Checkpoints(folder=str(tmp_path))])
    with pytest.raises(ValueError, match=r"noise levels"):
        train({"near": Near(0.5)}, epochs=2, steps=9, folder=tmp_path, resume=tmp_path / LAST)


def test_a_run_whose_checkpoint_cannot_be_written_ends_with_the_reason(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(CheckpointNotWritten, match="file"):
        train({"near": Near(0.5)}, epochs=1, folder=tmp_path,
              callbacks=[Checkpoints(folder=str(tmp_path / "file"))])  # fmt: skip


@pytest.mark.parametrize("wrong", [{"every_n_iterations": 0}, {"keep_every_n_iterations": -1}])
def test_wrong_arguments_name_their_key(wrong):
    with pytest.raises(ValueError, match=rf"checkpoint\.{next(iter(wrong))}: expected 1 or more"):
        Checkpoints(**wrong)


# ------------------------------------------------------------------ signals, on the real command line


def started(overlay, folder, *extra, session=False):
    """`fit` in a process of its own; with `session`, the processes that it starts can be killed with it."""
    return subprocess.Popen(
        [sys.executable, "-m", "recast_pl", "fit", "--config", QUICKSTART, "--config", overlay,
         "--trainer.logger", "false", "--checkpoint.folder", str(folder), *extra],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder.parent,
        env=os.environ | {"OMP_NUM_THREADS": "1"}, start_new_session=session,
    )  # fmt: skip


def wait_for_iteration(path, iteration, process):
    """Until a checkpoint of `iteration` or a later one is there."""
    while process.poll() is None:
        if path.exists() and torch.load(path, weights_only=True)["iteration"] >= iteration:
            return
        time.sleep(0.02)
    raise AssertionError(process.stdout.read()[-3000:])


def test_ctrl_c_ends_with_a_checkpoint_and_says_how_to_go_on(overlay, tmp_path):
    folder = tmp_path / "checkpoints"
    process = started(overlay, folder, "--trainer.max_epochs", "500", "--trainer.limit_val_batches", "0")
    wait_for_iteration(folder / LAST, 2, process)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 1
    assert f"--ckpt_path {folder / LAST}" in said
    assert "Traceback" not in said
    assert torch.load(folder / LAST, weights_only=True)["iteration"] >= 2
    assert [path.name for path in folder.iterdir()] == [LAST]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["single", "fsdp"])
def test_killed_at_random_moments_a_run_loses_only_the_iteration_in_flight(overlay, tmp_path, strategy):
    """Twenty times SIGKILL, resumed each time; the weights are those of a run that nobody killed."""
    config = ("--config", str(Path(QUICKSTART).parent / "strategy" / f"{strategy}.yaml"))
    devices = "2" if strategy == "fsdp" else "1"
    length = ("--trainer.max_epochs", "60", "--trainer.limit_val_batches", "0", *config,
              "--trainer.devices", devices, "--data.iterations_per_epoch", "4")  # fmt: skip
    whole = tmp_path / "whole"
    process = started(overlay, whole, *length)
    said, _ = process.communicate(timeout=1800)
    assert process.returncode == 0, said[-3000:]
    folder, moments = tmp_path / "killed", random.Random(0)
    done, kills = 0, 0
    while True:
        resume = ("--ckpt_path", str(folder / LAST)) if (folder / LAST).exists() else ()
        process = started(overlay, folder, *length, *resume, session=True)
        if kills == 20:
            said, _ = process.communicate(timeout=1800)
            assert process.returncode == 0, said[-3000:]
            break
        wait_for_iteration(folder / LAST, done + 1, process)
        time.sleep(moments.uniform(0, 0.6))
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        kills += 1
        saved = torch.load(folder / LAST, weights_only=True)
        assert saved["iteration"] > done  # what was saved before is never lost
        done = saved["iteration"]
    one, other = (torch.load(path / LAST, weights_only=True) for path in (whole, folder))
    assert one["iteration"] == other["iteration"] == 240
    assert not differences(one, other)
