"""A role's weights in diffusers' formats: a LoRA file, or a whole pipeline with the weights merged into it."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recast_pl.policy import Role, SD3Policy
from recast_pl.policy.full_parameters import FullWeights


def save_lora(policy: SD3Policy, role: Role, folder: Path) -> None:
    """Writes `pytorch_lora_weights.safetensors` with rank, alpha and targets in its metadata.

    A LoRA file without that metadata is read with alpha = rank, so that its update comes out alpha / rank times
    too small or too large. Only settings that every version of peft knows are written.

    Raises:
        ValueError: for a policy without adapters.
    """
    from peft.utils import get_peft_model_state_dict

    if isinstance(policy.adapters, FullWeights):
        raise ValueError(
            "merged: full fine-tuning (model.policy.init_args.full_fine_tuning) changes the denoiser's own "
            "weights, of which there is no LoRA; write the whole pipeline with --merged true"
        )
    with policy.using(role):
        (adapter,) = policy.denoiser.active_adapters()
        layers = get_peft_model_state_dict(policy.denoiser, adapter_name=adapter)
        config = policy.denoiser.peft_config[adapter]
        type(policy.pipeline).save_lora_weights(
            folder,
            transformer_lora_layers={name: tensor.detach().contiguous() for name, tensor in layers.items()},
            transformer_lora_adapter_metadata={
                "r": config.r,
                "lora_alpha": config.lora_alpha,
                "target_modules": sorted(config.target_modules),
            },
        )


def save_merged(policy: SD3Policy, role: Role, folder: Path) -> None:
    """Writes the pipeline with the role's weights in its denoiser; the policy is left as it is.

    The denoiser is written in float32: whoever loads it may round, and small updates are not lost before.
    """
    pipeline = policy.pipeline
    with torch.device("meta"):
        denoiser = type(pipeline.transformer).from_config(pipeline.transformer.config)
    denoiser.load_state_dict(merged_state(policy, role), assign=True)
    whole = type(pipeline)(**{**pipeline.components, "transformer": denoiser})
    whole.save_pretrained(folder)
    for path in folder.rglob("*.json"):  # they note the folder that they were read from
        content = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(content, dict) and content.pop("_name_or_path", None) is not None:
            path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


@torch.no_grad()
def merged_state(policy: SD3Policy, role: Role) -> dict[str, Tensor]:
    """The denoiser's state with the role's weights, float32: W + alpha / rank · B A in adapted layers."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    with policy.using(role):
        state = {
            name.replace(".base_layer.", "."): tensor.detach().float()
            for name, tensor in policy.denoiser.state_dict().items()
            if ".lora_" not in name
        }
        layers: dict[str, Any] = {
            path: module
            for path, module in policy.denoiser.named_modules()
            if isinstance(module, BaseTunerLayer)
        }
        for path, layer in layers.items():
            for adapter in layer.active_adapters:
                state[f"{path}.weight"] = state[f"{path}.weight"] + layer.get_delta_weight(adapter).float()
        return {name: tensor.clone() for name, tensor in state.items()}
