"""The command line: from YAML to objects, and the trainer's verbs."""

from recast_pl.cli.command_line import DEFAULT_SEED, ReCASTCLI, main, quieten
from recast_pl.cli.trainer import Trainer

__all__ = ["DEFAULT_SEED", "ReCASTCLI", "Trainer", "main", "quieten"]
