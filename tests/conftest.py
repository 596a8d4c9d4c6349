import json
from pathlib import Path

import pytest
import torch
import yaml
from miniature_rewards import RewardCheckpoints

from recast_pl.policy import SD3Policy
from recast_pl.testing import save_clip, save_pipeline
from recast_pl.types import Prompt, PromptBatch

REFERENCE = Path(__file__).parent / "reference"


@pytest.fixture(scope="session")
def objective_golden():
    return json.loads((REFERENCE / "objective_golden.json").read_text())


@pytest.fixture(scope="session")
def credit_golden():
    return json.loads((REFERENCE / "credit_golden.json").read_text())


@pytest.fixture(scope="session")
def pipeline_folder(tmp_path_factory):
    return save_pipeline(tmp_path_factory.mktemp("pipeline"))


@pytest.fixture(scope="session")
def clip_folder(tmp_path_factory):
    return save_clip(tmp_path_factory.mktemp("clip"))


@pytest.fixture(scope="session")
def reward_checkpoints(tmp_path_factory):
    return RewardCheckpoints(tmp_path_factory.mktemp("rewards"))


@pytest.fixture
def policy(pipeline_folder):
    policy = SD3Policy(pretrained=str(pipeline_folder), lora_rank=4, max_sequence_length=1)
    policy.load(seed=0)
    return policy


@pytest.fixture
def disturbed(policy):
    """The policy with default and old adapters that differ from the reference and from each other."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in (*policy.adapters.trained, *policy.adapters.old):
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return policy


def prompt_batch(texts, *, iteration=0, group_size=1, metadata=None):
    index = torch.arange(len(texts))
    metadata = metadata or [{} for _ in texts]
    return PromptBatch(
        iteration=iteration,
        prompts=tuple(Prompt(text=t, metadata=m) for t, m in zip(texts, metadata, strict=True)),
        group_B=index // group_size,
        sample_B=index,
    )


@pytest.fixture(scope="session")
def overlay(pipeline_folder, clip_folder, tmp_path_factory):
    """Only sources and sizes differ from the quickstart."""

    def reward(path, **arguments):
        return {"class_path": f"recast_pl.rewards.{path}", "init_args": arguments}

    clip = reward("CLIPScore", pretrained=str(clip_folder))
    content = {
        "model": {
            "policy": {
                "class_path": "recast_pl.policy.SD3Policy",
                "init_args": {"pretrained": str(pipeline_folder), "lora_rank": 2, "max_sequence_length": 1},
            },
            "rollout": {"class_path": "recast_pl.rollout.ODERollout", "init_args": {"num_steps": 4}},
            "timesteps_per_sample": 2,
        },
        "rewards": {
            "rewards": {
                "clipscore": clip,
                "composition": reward("Composition"),
                "sharpness": reward("Sharpness"),
                "jpeg": reward("JPEGIncompressibility"),
            }
        },
        "judges": {"rewards": {"judge_clip": clip}},
        "data": {
            "train": {"class_path": "recast_pl.prompts.SceneGrammar", "init_args": {"count": 8}},
            "evaluation": {
                "class_path": "recast_pl.prompts.SceneGrammar",
                "init_args": {"count": 6, "held_out": True},
            },
            "num_groups": 2,
            "group_size": 3,
            "iterations_per_epoch": 2,
            "evaluation_batch_size": 4,
        },
        "trainer": {"max_epochs": 2, "enable_progress_bar": False},
    }
    path = tmp_path_factory.mktemp("overlay") / "miniature.yaml"
    path.write_text(yaml.safe_dump(content))
    return str(path)


def clause(name, count=1, **rest):
    """A clause of GenEval's `include`."""
    return {"class": name, "count": count, **rest}
