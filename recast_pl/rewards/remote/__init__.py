"""Rewards behind servers: our own protocol, and chat completions."""

from recast_pl.rewards.remote.reward import RemoteReward

__all__ = ["RemoteReward"]
