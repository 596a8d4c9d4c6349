"""Untrained pipelines and CLIPs of the real classes and file layouts, small enough to build in a second."""

from pathlib import Path

import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from transformers import CLIPConfig, CLIPModel, CLIPTextModelWithProjection, CLIPVisionConfig
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from recast_pl.assets.making.text import build_tokenizer, text_config


def save_pipeline(folder: Path) -> Path:
    """An SD3 pipeline with two blocks of width 32, a VAE of factor 2 and 16 × 16 pictures."""
    torch.manual_seed(0)
    tokenizer = build_tokenizer()
    encoders = [
        CLIPTextModelWithProjection(text_config(tokenizer, width=16, layers=2, heads=heads)) for heads in (2, 4)
    ]
    pipeline = StableDiffusion3Pipeline(
        transformer=SD3Transformer2DModel(
            sample_size=8,
            patch_size=2,
            in_channels=4,
            out_channels=4,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=32,
            caption_projection_dim=32,
            pooled_projection_dim=32,
            pos_embed_max_size=8,
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            block_out_channels=(8, 8),
            layers_per_block=1,
            latent_channels=4,
            norm_num_groups=4,
            sample_size=16,
            use_quant_conv=False,
            use_post_quant_conv=False,
            scaling_factor=0.8,
            shift_factor=0.1,
        ),
        text_encoder=encoders[0],
        tokenizer=tokenizer,
        text_encoder_2=encoders[1],
        tokenizer_2=tokenizer,
        text_encoder_3=None,
        tokenizer_3=None,
    )
    pipeline.save_pretrained(folder)
    return folder


def save_clip(folder: Path) -> Path:
    """A CLIP of 16 × 16 pictures."""
    torch.manual_seed(1)
    tokenizer = build_tokenizer()
    text = text_config(tokenizer, width=16, layers=1)
    vision = CLIPVisionConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=16,
        patch_size=8,
    )
    config = CLIPConfig(text_config=text.to_dict(), vision_config=vision.to_dict(), projection_dim=16)
    CLIPModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}).save_pretrained(
        folder
    )
    return folder
