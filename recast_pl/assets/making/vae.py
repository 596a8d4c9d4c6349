"""The embedded VAE: 64×64 pictures to 16×16 latents of 8 channels."""

from pathlib import Path

import torch
from diffusers import AutoencoderKL
from torch import Tensor
from torch.nn import functional as F

from recast_pl.assets.making.data import as_float, drawn_scenes
from recast_pl.assets.making.stage import Average, Stage, set_learning_rate, warm_up_then_decay

BATCH = 16
KL_WEIGHT = 2e-7  # of the sum over a latent; 1e-5 let five of eight channels collapse
EDGE_WEIGHT = 1.0  # of the picture's differences between neighbours: blur costs, not only brightness


def build() -> AutoencoderKL:
    """An untrained VAE of factor 4, without attention and without quantisation layers (as SD3's)."""
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(8, 16, 48),
        layers_per_block=1,
        latent_channels=8,
        norm_num_groups=4,
        sample_size=64,
        mid_block_add_attention=False,
        use_quant_conv=False,
        use_post_quant_conv=False,
        force_upcast=False,
    )


def reconstruction_loss(decoded: Tensor, pictures: Tensor) -> Tensor:
    """Mean absolute and squared error, and the absolute error of differences between neighbouring pixels."""
    loss = F.l1_loss(decoded, pictures) + F.mse_loss(decoded, pictures)
    for dim in (-1, -2):
        loss = loss + EDGE_WEIGHT * F.l1_loss(decoded.diff(dim=dim), pictures.diff(dim=dim))
    return loss


def train(folder: Path, *, steps: int, seed: int, device: torch.device) -> tuple[AutoencoderKL, float]:
    """Trains the VAE; returns the averaged weights, scaled for unit-variance latents, and the seconds."""
    torch.manual_seed(seed)
    model = build().to(device)
    average = Average(model, decay=0.995)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-4)
    stage = Stage(
        name="vae",
        folder=folder,
        steps=steps,
        modules={"model": model, "average": average, "optimiser": optimiser},
    )

    def update(step: int) -> dict[str, float]:
        set_learning_rate(optimiser, warm_up_then_decay(step, steps=steps, warm_up=100, peak=2e-3))
        pictures = as_float(drawn_scenes(BATCH, seed=seed, first=step * BATCH)[0]).to(device)
        posterior = model.encode(pictures).latent_dist
        generator = torch.Generator(device).manual_seed(seed * 1_000_003 + step)
        latents = posterior.sample(generator)
        fit = reconstruction_loss(model.decode(latents).sample, pictures)
        loss = fit + KL_WEIGHT * posterior.kl().mean()
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        average.update(model, step=step)
        return {"fit": fit.item()}

    stage.run(update)
    average.copy_to(model)
    model.eval().requires_grad_(False)
    latents = torch.cat(
        [
            model.encode(as_float(p).to(device)).latent_dist.mean
            for p in drawn_scenes(512, seed=seed + 1)[0].split(64)
        ]
    )
    model.register_to_config(
        scaling_factor=round(1 / latents.std().item(), 5), shift_factor=round(latents.mean().item(), 5)
    )
    return model, stage.seconds
