"""Objectives: what the policy's velocities are regressed on, given advantages per sample and step."""

from recast_pl.objectives.awm import AWM, awm_terms, matching_likelihood
from recast_pl.objectives.base import Objective
from recast_pl.objectives.ddpo import DDPO
from recast_pl.objectives.dgpo import DGPO, dgpo_terms
from recast_pl.objectives.flow_grpo import FlowGRPO
from recast_pl.objectives.nft import DiffusionNFT, NFTTerms, diffusion_nft_terms, optimality
from recast_pl.objectives.noised import NoisedObjective
from recast_pl.objectives.ram import RAM, ram_terms
from recast_pl.objectives.rvm import RVM, rvm_terms
from recast_pl.objectives.trajectory import TrajectoryObjective

__all__ = [
    "AWM",
    "DDPO",
    "DGPO",
    "RAM",
    "RVM",
    "DiffusionNFT",
    "FlowGRPO",
    "NFTTerms",
    "NoisedObjective",
    "Objective",
    "TrajectoryObjective",
    "awm_terms",
    "dgpo_terms",
    "diffusion_nft_terms",
    "matching_likelihood",
    "optimality",
    "ram_terms",
    "rvm_terms",
]
