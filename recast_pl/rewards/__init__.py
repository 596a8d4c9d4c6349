"""Rewards, one file each, and the RewardSuite that batches them."""

from recast_pl.rewards.aesthetic import Aesthetic
from recast_pl.rewards.base import Reward
from recast_pl.rewards.clipscore import CLIPScore
from recast_pl.rewards.composition import Composition
from recast_pl.rewards.geneval import GenEval
from recast_pl.rewards.hps import HPSv2
from recast_pl.rewards.imagereward import ImageReward
from recast_pl.rewards.jpeg import JPEGCompressibility, JPEGIncompressibility
from recast_pl.rewards.ocr import OCR
from recast_pl.rewards.pickscore import PickScore
from recast_pl.rewards.remote import RemoteReward
from recast_pl.rewards.remote.http import RewardUnavailable, RewardUnusable
from recast_pl.rewards.sharpness import Sharpness
from recast_pl.rewards.suite import RewardSuite
from recast_pl.rewards.suite.failure_policy import RewardFailure, RewardOptions
from recast_pl.rewards.suite.judges import JudgeSuite
from recast_pl.rewards.vlm import VLMScore

__all__ = [
    "OCR",
    "Aesthetic",
    "CLIPScore",
    "Composition",
    "GenEval",
    "HPSv2",
    "ImageReward",
    "JPEGCompressibility",
    "JPEGIncompressibility",
    "JudgeSuite",
    "PickScore",
    "RemoteReward",
    "Reward",
    "RewardFailure",
    "RewardOptions",
    "RewardSuite",
    "RewardUnavailable",
    "RewardUnusable",
    "Sharpness",
    "VLMScore",
]
