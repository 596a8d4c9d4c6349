"""The embedded SD3 transformer and its two text encoders, trained together by flow matching."""

from pathlib import Path

import torch
from diffusers import SD3Transformer2DModel
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm
from transformers import CLIPTokenizer

from recast_pl.assets.making.data import as_float, drawn_scenes
from recast_pl.assets.making.stage import Average, Stage, batches, set_learning_rate, warm_up_then_decay
from recast_pl.assets.making.text import build_text_encoders, encode, tokenize
from recast_pl.assets.making.vae import PatchCode, fit_code

BATCH = 48
SHIFT = 3.0  # of the noise levels, in training and in the scheduler that is shipped
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


def encoded_scenes(code: PatchCode, *, count: int, seed: int, folder: Path) -> tuple[Tensor, list[str]]:
    """Latents [count, 8, 16, 16] (float16) and captions; kept in `folder`."""
    path = folder / f"latents-{seed}-{count}.pt"
    if path.exists():
        saved = torch.load(path, weights_only=True)
        return saved["latents"], saved["captions"]
    latents, captions, chunk = [], [], 250
    for first in tqdm(range(0, count, chunk), desc="latents", mininterval=10):
        pictures, shown = drawn_scenes(min(chunk, count - first), seed=seed, first=first)
        latents.append(code.encode(as_float(pictures)).half())
        captions += [scene.caption for scene in shown]
    folder.mkdir(parents=True, exist_ok=True)
    torch.save({"latents": torch.cat(latents), "captions": captions}, path)
    return torch.cat(latents), captions


def train(
    folder: Path,
    *,
    tokenizer: CLIPTokenizer,
    steps: int,
    seed: int,
    device: torch.device,
    scenes: int = 40_000,
    compiled: bool = False,
) -> tuple[SD3Transformer2DModel, nn.ModuleList, float]:
    """Trains denoiser and text encoders; returns their averaged weights and the seconds it took."""
    latents, captions = encoded_scenes(fit_code(seed=seed), count=scenes, seed=seed + 2, folder=folder)
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
    for _ in range(stage.step):
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
