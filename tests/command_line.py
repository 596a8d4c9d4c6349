"""The real command line, in this process, on a miniature pipeline."""

from pathlib import Path

from recast_pl.cli import main
from recast_pl.credit import CreditAssigner

CONFIGS = Path(__file__).parents[1] / "configs"
QUICKSTART = str(CONFIGS / "quickstart.yaml")


def run(verb, overlay, folder, *extra):
    return main(
        [verb, "--config", QUICKSTART, "--config", overlay,
         "--trainer.logger.init_args.save_dir", str(folder), *extra]
    )  # fmt: skip


def credit_of(cli):
    (credit,) = [callback for callback in cli.trainer.callbacks if isinstance(callback, CreditAssigner)]
    return credit
