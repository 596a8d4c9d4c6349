"""The class path of strategies in YAML files: `recast_pl.strategies.FullyShard`."""

from recast_pl.parallel.fully_shard import FullyShard

__all__ = ["FullyShard"]
