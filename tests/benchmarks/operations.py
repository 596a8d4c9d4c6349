"""Where an iteration's time goes by kind of operation, in the framework and in the plain loop.

    OMP_NUM_THREADS=1 python tests/benchmarks/operations.py

One iteration of each under torch's profiler, after one that is not counted: the seconds that operations spend
themselves, without the operations they call, summed by kind. The profiler slows both, small operations most.
"""

import argparse
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
from iteration import Alternation
from plain_loop import Outcome
from quickstart import built, circumstances, run
from torch.profiler import ProfilerActivity, profile

from recast_pl.types import PromptBatch

KINDS: Mapping[str, tuple[str, ...]] = {  # the first that is in an operation's name
    "matrix products": ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "mkldnn_linear"),
    "attention": ("scaled_dot_product", "flash_attention"),
    "convolutions": ("conv",),
    "normalisation": ("layer_norm", "rms_norm", "group_norm", "batch_norm"),
    "activations": ("gelu", "silu", "sigmoid", "softmax", "tanh"),
    "optimiser": ("adam", "_foreach", "clip_grad"),
    "copies and shapes": (
        *("copy_", "cat", "clone", "contiguous", "index", "empty", "view", "reshape", "transpose", "slice"),
        *("split", "chunk", "fill_", "zero_", "select", "expand", "permute"),
    ),
    "other elementwise": (
        *("mul", "add", "sub", "div", "pow", "sqrt", "neg", "mean", "sum", "square", "abs", "clamp", "where"),
        *("exp", "sin", "cos", "lerp"),
    ),
    "fused by the compiler": ("graph_", "cpp_", "CompiledFunction", "Torch-Compiled"),
}


def kind_of(name: str) -> str:
    """An operation's kind.

    >>> kind_of("aten::addmm"), kind_of("aten::add_"), kind_of("aten::convolution_backward"), kind_of("Lerp")
    ('matrix products', 'other elementwise', 'convolutions', 'other')
    """
    return next((kind for kind, parts in KINDS.items() if any(part in name for part in parts)), "other")


def seconds_by_kind(events: Iterable[Any]) -> dict[str, float]:
    """Of the profiler's averages."""
    seconds: dict[str, float] = {}
    for event in events:
        kind = kind_of(event.key)
        seconds[kind] = seconds.get(kind, 0.0) + event.self_cpu_time_total / 1e6
    return seconds


class Profiled(Alternation):
    """Both programs' last iterations under the profiler, one after the other."""

    def __init__(self, *, iterations: int) -> None:
        super().__init__()
        self._last = iterations - 1
        self._profiler: profile | None = None
        self.ours: dict[str, float] = {}
        self.plain: dict[str, float] = {}

    def on_train_batch_start(
        self, trainer: pl.Trainer, module: pl.LightningModule, batch: PromptBatch, batch_idx: int
    ) -> None:
        """Starts with the framework's iteration."""
        super().on_train_batch_start(trainer, module, batch, batch_idx)
        if batch_idx == self._last:
            self._profiler = _profiler()
            self._profiler.start()

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: Any, outputs: Any, batch: PromptBatch, batch_idx: int
    ) -> None:
        """Ends with it, before the plain loop's begins."""
        if self._profiler is not None:
            self._profiler.stop()
            self.ours = seconds_by_kind(self._profiler.key_averages())
            self._profiler = None
        super().on_train_batch_end(trainer, module, outputs, batch, batch_idx)

    def _run(self, module: Any, batch: PromptBatch, iteration: int | None = None) -> Outcome:
        if (module.iteration if iteration is None else iteration) != self._last:
            return super()._run(module, batch, iteration)
        with _profiler() as profiler:
            outcome = super()._run(module, batch, iteration)
        self.plain = seconds_by_kind(profiler.key_averages())
        return outcome


def _profiler() -> profile:
    return profile(activities=[ProfilerActivity.CPU])


def measured(arguments: Sequence[str] = (), *, iterations: int = 2) -> Profiled:
    """Profiles the last of so many iterations."""
    profiled = Profiled(iterations=iterations)
    run(built(arguments, iterations=iterations), profiled)
    return profiled


def table(profiled: Profiled) -> str:
    """Seconds by kind in Markdown."""
    ours, plain = profiled.ours, profiled.plain
    lines = ["| operations | framework, s | plain loop, s |", "|---|---|---|"]
    for kind in sorted(ours.keys() | plain.keys(), key=lambda kind: -plain.get(kind, 0.0)):
        lines.append(f"| {kind} | {ours.get(kind, 0.0):.2f} | {plain.get(kind, 0.0):.2f} |")
    lines.append(f"| all | {sum(ours.values()):.2f} | {sum(plain.values()):.2f} |")
    return "\n".join(lines)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", action="append", default=[], help="an overlay over the quickstart")
    options = parser.parse_args()
    overlays = [argument for path in options.config for argument in ("--config", path)]
    print(table(measured(overlays)), circumstances(), sep="\n")


if __name__ == "__main__":
    main()
