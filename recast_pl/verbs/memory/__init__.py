"""The verb `memory`: what a configuration would take on each device, before a GPU is rented."""

from recast_pl.verbs.memory.budget import Budget, Hardware
from recast_pl.verbs.memory.estimate import memory_budget, optimizer_memory, update_memory
from recast_pl.verbs.memory.table import memory_table

__all__ = ["Budget", "Hardware", "memory_budget", "memory_table", "optimizer_memory", "update_memory"]
