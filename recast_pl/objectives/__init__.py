"""Objectives: what the policy's velocities are regressed on, given advantages per sample and step."""

from recast_pl.objectives.base import Objective
from recast_pl.objectives.nft import DiffusionNFT, NFTTerms, diffusion_nft_terms, optimality

__all__ = ["DiffusionNFT", "NFTTerms", "Objective", "diffusion_nft_terms", "optimality"]
