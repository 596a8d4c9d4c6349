"""What credit costs: its share of the quickstart's wall time, by strategy and estimator, in one run.

    python tests/benchmarks/credit_cost.py

Evaluation and start-up are left out: the share is of the iterations' time (`time/*` in TensorBoard). Every
variant starts from the same base model and sees the same prompts and noises.
"""

import argparse
import tempfile
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from recast_pl.cli import main as recast
from recast_pl.telemetry.clock import STAGES

ROOT = Path(__file__).parents[2]
VARIANTS = {
    "Uniform": ["--credit.strategy", "recast_pl.credit.Uniform"],
    "ReCAST, Preview": ["--credit.strategy.estimator", "recast_pl.credit.Preview"],
    "ReCAST, ValueHead": ["--credit.strategy.estimator", "recast_pl.credit.ValueHead"],
    "ReCAST, PairedCompletions": ["--credit.strategy.estimator", "recast_pl.credit.PairedCompletions"],
}


def seconds_of(folder: Path) -> dict[str, float]:
    """Seconds by stage over all iterations."""
    (file,) = folder.rglob("events.out.tfevents.*")
    events = EventAccumulator(str(file), size_guidance={"scalars": 0})
    events.Reload()
    return {stage: sum(event.value for event in events.Scalars(f"time/{stage}")) for stage in STAGES}


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=20, help="training iterations of each variant")
    options = parser.parse_args()
    rows = {}
    for name, arguments in VARIANTS.items():
        with tempfile.TemporaryDirectory() as folder:
            recast(
                ["fit", "--config", str(ROOT / "configs/quickstart.yaml"),
                 "--data.iterations_per_epoch", str(options.iterations), "--trainer.max_epochs", "1",
                 "--trainer.limit_val_batches", "0", "--trainer.enable_progress_bar", "false",
                 "--trainer.logger.init_args.save_dir", folder, *arguments]
            )  # fmt: skip
            rows[name] = seconds_of(Path(folder))
    print(f"\n{'credit':28} {'iterations, s':>13} {'credit, s':>10} {'share':>7}")
    for name, seconds in rows.items():
        total = sum(seconds.values())
        print(f"{name:28} {total:13.1f} {seconds['credit']:10.2f} {seconds['credit'] / total:7.1%}")


if __name__ == "__main__":
    main()
