"""Runs a study: processes of the real command line, several at a time, resumed where they stopped."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import IO, Any

import yaml  # type: ignore[import-untyped]

from recast_pl.study.folder import LOCK, LOG, RESULT, Failure, RunFolder, write
from recast_pl.study.plan import Study
from recast_pl.study.record import RECORD, Incomplete, Result, completed, lines_of, outcome

OVERLAY = "overlay.yaml"  # what a study puts over a run's own configuration
POLL = 0.1  # seconds


class Locked(RuntimeError):
    """A run's processes of an earlier start are still at work."""


class RunningRun:
    """A run in work: `fit`, `validate` where its last evaluation was cut off, `test`; one process at a time.

    Its lock is inherited by its processes, so that it holds for as long as any of them lives, even if the
    study's own process was killed.

    Args:
        folder: its place.
        study: how it is run.

    Raises:
        Locked: where processes of an earlier start are still at work in the folder.
    """

    def __init__(self, folder: RunFolder, study: Study) -> None:
        self.folder, self.study = folder, study
        folder.path.mkdir(parents=True, exist_ok=True)
        self._lock: IO[str] = (folder.path / LOCK).open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._lock.close()
            raise Locked(folder.run.name) from error
        folder.begin()
        self.stage = ""
        self.began, self.resumed = time.monotonic(), folder.checkpoint.exists()
        self.process: subprocess.Popen[bytes] | None = None
        self.result: Result | None = None
        self.failure: Failure | None = None

    def step(self, *, stopping: bool) -> bool:
        """Looks after the process; starts the next one where one is over. Returns whether the run is over."""
        if self.process is not None:
            code = self.process.poll()
            if code is None:
                return False
            self.process = None
            if code and not stopping:
                reason = f"`{self.stage}` ended with status {code}"
                if code < 0:
                    reason = f"`{self.stage}` was ended by the signal {signal.Signals(-code).name}"
                self.failure = self.folder.fail(stage=self.stage, reason=reason)
        if stopping or self.failure is not None:
            return self._close()
        try:
            stage = self._next()
            if stage is None:
                self._finish()
        except Incomplete as error:
            self.failure = self.folder.fail(stage=self.stage or "fit", reason=str(error))
            return self._close()
        if stage is not None:
            self._start(stage)
        return stage is None and self._close()

    def _next(self) -> str | None:
        """The verb that is due by what the record lacks, or None.

        Raises:
            Incomplete: where a verb has ended well and left nothing.
        """
        lines = lines_of(self.folder.path)
        due = next((stage for stage in self._stages() if not completed(lines, stage)), None)
        if due is not None and due == self.stage:
            raise Incomplete(f"`{due}` has left no line in {RECORD}")
        return due

    def _stages(self) -> tuple[str, ...]:
        return ("fit", "validate", "test") if self.study.judges else ("fit", "validate")

    def _start(self, stage: str) -> None:
        folder, place = self.folder, self.folder.path
        self.stage = stage
        words = [
            sys.executable,
            "-m",
            "recast_pl",
            stage,
            *folder.run.arguments,
            *own_arguments(folder, self.study),
        ]
        if stage == "fit":
            words += ["--config", str(place / OVERLAY)]
            write(place / OVERLAY, yaml.safe_dump(overlay(place)))
        else:
            words += ["--trainer.logger=false", f"--trainer.default_root_dir={place / stage}"]
        if folder.checkpoint.exists():
            words += [f"--ckpt_path={folder.checkpoint}"]
        with (place / LOG).open("ab") as log:
            log.write(f"\n# {time.strftime('%Y-%m-%d %H:%M:%S')} {' '.join(words)}\n".encode())
            log.flush()
            self.process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment(self.study.threads),
                pass_fds=[self._lock.fileno()],
                start_new_session=True,  # Ctrl-C reaches it by `stop` alone, and once
            )
        write(place / "process.json", json.dumps({"stage": stage, "pid": self.process.pid}))

    def _finish(self) -> None:
        folder = self.folder
        self.result = Result(
            **folder.identity(), **outcome(lines_of(folder.path)), wall_seconds=time.monotonic() - self.began
        )
        write(folder.path / RESULT, self.result.to_json())
        if not self.study.keep_checkpoints:
            for path in folder.checkpoint.parent.glob("*.ckpt"):
                path.unlink()

    def _close(self) -> bool:
        (self.folder.path / "process.json").unlink(missing_ok=True)
        self._lock.close()
        return True

    def stop(self, number: int) -> None:
        """Sends a signal to the process and those that it has started."""
        if self.process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)


def overlay(place: Path) -> dict[str, Any]:
    """Where a run's files go."""
    return {
        "trainer": {
            "enable_progress_bar": False,
            "logger": {
                "class_path": "lightning.pytorch.loggers.TensorBoardLogger",
                "init_args": {"save_dir": str(place), "name": "", "version": ""},
            },
        },
        "checkpoint": {"folder": str(place / "checkpoints")},
    }


def own_arguments(folder: RunFolder, study: Study) -> list[str]:
    """The callback that writes the record."""
    callback = {
        "class_path": "recast_pl.callbacks.RunRecord",
        "init_args": {"folder": str(folder.path), "pictures": study.pictures},
    }
    return [f"--trainer.callbacks+={json.dumps(callback)}"]


def environment(threads: int | None) -> dict[str, str]:
    """Of a run's processes: the number of threads of OpenMP (torch's own follows it), MKL and OpenBLAS."""
    if threads is None:
        return dict(os.environ)
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    return {**os.environ, **dict.fromkeys(names, str(threads))}


class Runner:
    """Brings all of a study's runs to their ends.

    Ctrl-C (or SIGTERM) once lets the iterations in flight come to their ends and their checkpoints be written;
    twice stops at once.

    Args:
        study: as read from its file.
        folders: of its runs.
        say: prints a line of progress.
    """

    def __init__(
        self, study: Study, folders: Sequence[RunFolder], *, say: Callable[[str], None] = print
    ) -> None:
        self.study, self.say = study, say
        self.total = len(folders)
        self.finished = [folder for folder in folders if folder.finished]
        self.waiting = [folder for folder in folders if not folder.finished]
        self.working: list[RunningRun] = []
        self.failures: list[Failure] = []
        self.interrupts = self._passed = 0
        self._took: list[float] = []  # wall seconds of runs that went from their start to their end
        self._told: set[str] = set()

    def run(self) -> bool:
        """Runs what is not finished. Returns whether all of the study is."""
        self.say(f"{self.total} runs, {len(self.finished)} of them finished, {self.study.parallel} at a time")
        handlers = {
            number: signal.signal(number, self._interrupt) for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            while self.working or (self.waiting and not self.interrupts):
                if not self.interrupts:
                    self._fill()
                self._pass_on()
                for run in list(self.working):
                    if run.step(stopping=self.interrupts > 0):
                        self.working.remove(run)
                        self._over(run)
                time.sleep(POLL)
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        self._last_words()
        return len(self.finished) == self.total

    def _fill(self) -> None:
        """Starts runs up to the number at a time; those still locked wait at the end of the queue."""
        for folder in list(self.waiting):
            if len(self.working) >= self.study.parallel:
                return
            try:
                run = RunningRun(folder, self.study)
            except Locked:
                if folder.run.name not in self._told:
                    self._told.add(folder.run.name)
                    self.say(
                        f"{folder.run.name}: processes of an earlier start are still at work; waiting for them"
                    )
                continue
            self.waiting.remove(folder)
            self.working.append(run)
            how = "goes on from its last checkpoint" if run.resumed else "begins"
            self.say(f"{folder.run.name}: {how}")

    def _over(self, run: RunningRun) -> None:
        name = run.folder.run.name
        if run.failure is not None:
            self.failures.append(run.failure)
            self.say(f"{name}: FAILED, {run.failure.reason}; see {run.folder.path / LOG}")
        elif run.result is not None:
            self.finished.append(run.folder)
            took = run.result.wall_seconds
            if not run.resumed:
                self._took.append(took)
            self.say(f"[{len(self.finished)}/{self.total}] {name}: finished in {duration(took)}{self._left()}")
        else:
            self.say(f"{name}: stopped")

    def _left(self) -> str:
        rest = len(self.waiting) + len(self.working)
        if not rest or not self._took:
            return ""
        seconds = sum(self._took) / len(self._took) * rest / min(self.study.parallel, rest)
        return f"; about {duration(seconds)} left"

    def _last_words(self) -> None:
        if self.interrupts:
            self.say(
                f"Stopped: {len(self.finished)} of {self.total} runs are finished. "
                "The same command goes on from here."
            )
        for failure in self.failures:
            self.say(f"FAILED {failure.name} ({failure.reason}):\n{failure.tail}")
        if self.failures:
            self.say(f"{len(self.failures)} runs failed; the same command tries them again.")

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self.interrupts += 1

    def _pass_on(self) -> None:
        """Hands interrupts on to the processes, each once."""
        while self._passed < self.interrupts:
            self._passed += 1
            if self._passed == 1 and self.working:
                self.say("Stopping after the iterations in flight, with checkpoints. Once more: at once.")
            for run in self.working:
                run.stop(signal.SIGINT if self._passed == 1 else signal.SIGKILL)


def duration(seconds: float) -> str:
    """Seconds for people.

    >>> duration(8.4), duration(400), duration(8000)
    ('8 s', '6 min 40 s', '2 h 13 min')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
