"""The embedded SD3 transformer and its two text encoders, trained together by flow matching."""

from pathlib import Path

import torch
from diffusers import AutoencoderKL, SD3Transformer2DModel
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm
from transformers import CLIPTokenizer

from recast_pl.assets.making.data import as_float, drawn_scenes
from recast_pl.assets.making.stage import Average, Stage, batches, set_learning_rate, warm_up_then_decay
from recast_pl.assets.making.text import build_text_encoders, encode, tokenize

BATCH = 64
SHIFT = 2.0  # of the noise levels, in training and in the scheduler that is shipped
EMPTY_SHARE = 0.1  # of prompts left empty, so that guidance has an unconditional velocity


def build() -> SD3Transformer2DModel:
    """An untrained denoiser: 4 joint blocks of width 128 over 64 image tokens."""
    return SD3Transformer2DModel(
        sample_size=16,
        patch_size=2,
        in_channels=8,
        out_channels=8,
        num_layers=4,
        attention_head_dim=32,
        num_attention_heads=4,
        joint_attention_dim=128,
        caption_projection_dim=128,
        pooled_projection_dim=128,
        pos_embed_max_size=16,
        qk_norm="rms_norm",
    )


@torch.no_grad()
def encoded_scenes(
    vae: AutoencoderKL, *, count: int, seed: int, folder: Path, device: torch.device
) -> tuple[Tensor, list[str]]:
    """Latents [count, 8, 16, 16] (float16, scaled as the pipeline does) and captions; kept in `folder`."""
    path = folder / f"latents-{seed}-{count}.pt"
    if path.exists():
        saved = torch.load(path, weights_only=True)
        return saved["latents"], saved["captions"]
    latents, captions, chunk = [], [], 250
    for first in tqdm(range(0, count, chunk), desc="latents", mininterval=10):
        pictures, shown = drawn_scenes(chunk, seed=seed, first=first)
        mean = vae.encode(as_float(pictures).to(device)).latent_dist.mean
        latents.append(((mean - vae.config.shift_factor) * vae.config.scaling_factor).half().cpu())
        captions += [scene.caption for scene in shown]
    torch.save({"latents": torch.cat(latents), "captions": captions}, path)
    return torch.cat(latents), captions


def train(
    folder: Path,
    *,
    vae: AutoencoderKL,
    tokenizer: CLIPTokenizer,
    steps: int,
    seed: int,
    device: torch.device,
    scenes: int = 40_000,
    compiled: bool = False,
) -> tuple[SD3Transformer2DModel, nn.ModuleList, float]:
    """Trains denoiser and text encoders; returns their averaged weights and the seconds it took."""
    latents, captions = encoded_scenes(vae, count=scenes, seed=seed + 2, folder=folder, device=device)
    ids = tokenize(tokenizer, captions)
    empty = tokenize(tokenizer, [""])
    torch.manual_seed(seed)
    denoiser, encoders = build().to(device), build_text_encoders(tokenizer).to(device)
    model = nn.ModuleList([denoiser, encoders])
    average = Average(model, decay=0.999)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-2, betas=(0.9, 0.99))
    predict = torch.compile(denoiser) if compiled else denoiser
    stage = Stage(
        name="denoiser",
        folder=folder,
        steps=steps,
        modules={"model": model, "average": average, "optimiser": optimiser},
    )
    order = batches(len(latents), batch_size=BATCH, seed=seed)
    for _ in range(_steps_done(stage)):
        next(order)

    def update(step: int) -> dict[str, float]:
        set_learning_rate(optimiser, warm_up_then_decay(step, steps=steps, warm_up=200, peak=2e-3))
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        picked = next(order)
        x0 = latents[picked].float().to(device)
        noise = torch.randn(x0.shape, generator=generator).to(device)
        u = torch.sigmoid(torch.randn(BATCH, generator=generator))
        t = (SHIFT * u / (1 + (SHIFT - 1) * u)).to(device)
        dropped = torch.rand(BATCH, generator=generator) < EMPTY_SHARE
        words = torch.where(dropped[:, None], empty, ids[picked]).to(device)
        sequence, pooled = encode(encoders, words)
        level = t[:, None, None, None]
        velocity = predict(
            hidden_states=(1 - level) * x0 + level * noise,
            timestep=1000 * t,
            encoder_hidden_states=sequence,
            pooled_projections=pooled,
            return_dict=False,
        )[0]
        loss = F.mse_loss(velocity, noise - x0)
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        average.update(model, step=step)
        return {"loss": loss.item()}

    stage.run(update)
    average.copy_to(model)
    model.eval().requires_grad_(False)
    return denoiser, encoders, stage.seconds


def _steps_done(stage: Stage) -> int:
    return int(torch.load(stage.path, weights_only=True)["step"]) if stage.path.exists() else 0
