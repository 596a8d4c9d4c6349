"""From YAML to objects: LightningCLI with the blocks `rewards`, `judges`, `credit` and `pictures`.

`--config` may be given several times; later files are overlays. Classes go by their class path or, for those
that this file imports, by their bare name.
"""

import json
import logging
import os
import sys
import warnings
from typing import Any, NoReturn

from lightning.pytorch.callbacks import Callback
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

from recast_pl.callbacks import EvaluationReport, SampleGrid
from recast_pl.callbacks.checkpoints import Checkpoints, check_named
from recast_pl.cli.trainer import Trainer
from recast_pl.credit import CreditAssigner
from recast_pl.error_messages import explained, print_error
from recast_pl.evaluation import PictureWriter
from recast_pl.module import ReCASTModule
from recast_pl.prompts import PromptData
from recast_pl.rewards import JudgeSuite, RewardSuite
from recast_pl.verbs.memory import Hardware

DEFAULT_SEED = 42


class Parser(LightningArgumentParser):
    """Lightning's, whose errors are a message and a hint instead of all its keys."""

    verb: str | None = None  # whose keys an error points to

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Ends with exit code 2."""
        if not self.exit_on_error:  # a parser inside another's
            super().error(message, ex)
        parser = getattr(ex, "subcommand_parser", None) or self
        keys = [action.dest for action in parser._actions]
        program = parser.prog.replace(" [options]", "")
        if self.verb is not None and not program.endswith(self.verb):
            program = f"{program} {self.verb}"
        print_error(explained(message, keys), help_command=f"{program} --help", error=ex)
        self.exit(2)


class ReCASTCLI(LightningCLI):
    """The command line; see the module.

    Args:
        arguments: as LightningCLI's.
        verb: the one whose keys are needed; None: all.
        options: as LightningCLI's.
    """

    def __init__(self, *arguments: Any, verb: str | None = None, **options: Any) -> None:
        self._verb = verb
        super().__init__(*arguments, **options)

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        """As Lightning's; it knows the verb that was asked for."""
        parser = super().init_parser(**kwargs)
        if isinstance(parser, Parser):
            parser.verb = self._verb
        return parser

    def _prepare_subcommand_parser(
        self, klass: type, subcommand: str, **kwargs: Any
    ) -> LightningArgumentParser:
        if self._verb not in (None, subcommand):
            return self.init_parser(**kwargs)  # listed in the overview, without its hundreds of keys
        return super()._prepare_subcommand_parser(klass, subcommand, **kwargs)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Adds the blocks that are always there, and the links between blocks."""
        parser.add_class_arguments(RewardSuite, "rewards")
        parser.add_class_arguments(JudgeSuite, "judges")
        parser.add_lightning_class_args(CreditAssigner, "credit")
        parser.add_lightning_class_args(Checkpoints, "checkpoint")
        parser.add_lightning_class_args(SampleGrid, "grid")
        parser.add_lightning_class_args(PictureWriter, "pictures")
        parser.link_arguments("rewards", "model.rewards", apply_on="instantiate")
        parser.link_arguments("judges", "model.judges", apply_on="instantiate")
        for block in ("model", "data"):
            parser.link_arguments("seed_everything", f"{block}.seed", compute_fn=_seed)

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Lightning's four verbs, `profile`, `memory` and `export`."""
        return {
            **LightningCLI.subcommands(),
            "profile": {"model", "datamodule"},
            "memory": {"model", "datamodule"},
            "export": {"model", "datamodule"},
        }

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Builds the trainer; for `memory` and `export` on this CPU, whatever devices are planned."""
        planned, here = self._get(self.config_init, "trainer"), self.subcommand in ("memory", "export")
        if here:
            kwargs |= {"accelerator": "cpu", "devices": 1, "num_nodes": 1, "strategy": "auto"}
            kwargs |= {"logger": False, "precision": "32-true"}
        trainer = super().instantiate_trainer(**kwargs)
        assert isinstance(trainer, Trainer)
        if here:
            trainer.planned = Hardware.planned(planned)
            text = self._parser(self.subcommand).dump(self.config[self.subcommand], format="json")
            trainer.settings = json.loads(text)
        return trainer

    def _instantiate_trainer(self, config: dict[str, Any], callbacks: list[Callback]) -> Any:
        if config.get("enable_checkpointing") is False:
            callbacks = [callback for callback in callbacks if not isinstance(callback, Checkpoints)]
        return super()._instantiate_trainer(config, callbacks)

    def _parse_ckpt_path(self) -> None:
        """Checkpoints hold no hyper-parameters that would overrule the command line; none are looked for."""

    def instantiate_classes(self) -> None:
        """Builds all objects; what their constructors refuse is a usage error, not a traceback."""
        try:
            check_named(self._get(self.config, "ckpt_path"), verb=str(self.subcommand))
            super().instantiate_classes()
        except ValueError as error:
            self._parser(self.subcommand).error(str(error), error)

    def before_fit(self) -> None:
        """Finds the checkpoint to begin with."""
        options = self.config_init[self.subcommand]
        for callback in self.trainer.checkpoint_callbacks:
            if isinstance(callback, Checkpoints):
                options["ckpt_path"] = callback.start(self.trainer, options["ckpt_path"])


def _seed(seed_everything: bool | int) -> int:
    return DEFAULT_SEED if isinstance(seed_everything, bool) else seed_everything


def quieten() -> None:
    """Silences what libraries say about choices that are meant."""
    for message in (
        ".*module\\(s\\) in eval mode at the start of training.*",  # frozen networks, and no dropout
        ".*`IterableDataset` has `__len__` defined.*",  # loaders have no workers
        ".*isinstance\\(treespec, LeafSpec\\).*",
        ".*does not have many workers.*",
        ".*Couldn.t infer the batch indices.*",  # batches are made by PromptData
        ".*that ended before the epoch ended and your dataloader is not resumable.*",  # it is, by its position
        ".*It is recommended to use `self.log\\(.*sync_dist=True.*",  # logged values are of all processes
        ".*predict returned None if it was on purpose.*",
        ".*`torch_dtype` is deprecated.*",
    ):
        warnings.filterwarnings("ignore", message=message)
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(
        lambda record: "💡" not in record.getMessage()
    )
    # "… requires torchvision (not installed); falling back to …": the PIL processors are the ones we ask for
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if "transformers" in sys.modules and os.environ["TRANSFORMERS_VERBOSITY"] == "error":
        sys.modules["transformers"].utils.logging.set_verbosity_error()


def main(arguments: list[str] | None = None) -> ReCASTCLI:
    """Runs one verb: fit, validate, test, predict, profile, memory or export."""
    quieten()
    first = next(iter(sys.argv[1:] if arguments is None else arguments), None)
    return ReCASTCLI(
        ReCASTModule,
        PromptData,
        args=arguments,
        verb=first if first in ReCASTCLI.subcommands() else None,
        parser_class=Parser,
        trainer_class=Trainer,
        seed_everything_default=DEFAULT_SEED,
        auto_configure_optimizers=False,
        save_config_kwargs={"overwrite": True},
        # an abbreviated key would be a misspelt one that goes unnoticed
        parser_kwargs={"prog": "python -m recast_pl", "allow_abbrev": False},
        trainer_defaults={
            # rollouts and cached text enter autograd, which inference tensors must not
            "inference_mode": False,
            # prompts are shared out by PromptData
            "use_distributed_sampler": False,
            "log_every_n_steps": 1,
            "callbacks": [EvaluationReport()],
            "logger": {
                "class_path": "lightning.pytorch.loggers.TensorBoardLogger",
                "init_args": {"save_dir": "runs", "name": "recast_pl"},
            },
        },
    )
