"""The embedded VAE: 64×64 pictures to 16×16 latents of 8 channels.

Trained as an autoencoder, so small a network spends thousands of updates on finding out that colours exist.
So its code is given, and is linear in 4×4 patches: three channels hold the patch's mean colour, whitened, and
five the leading principal components of what is left of it, weaker, as they are in pictures. (Details as loud
as colours make denoisers that draw blots: they must settle everything at one noise level.) Encoder and decoder
are regressed on the code side by side, and the decoder learns what a linear one cannot: sharp edges.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import AutoencoderKL
from torch import Tensor
from torch.nn import functional as F

from recast_pl.assets.making.data import as_float, drawn_scenes
from recast_pl.assets.making.stage import Average, Stage, set_learning_rate, warm_up_then_decay

FACTOR, CHANNELS = 4, 8
BATCH = 16
CROP = 32  # pixels; most updates see crops, the last ones whole pictures
WHOLE_SHARE = 0.2
DETAIL = 0.35  # standard deviation of the strongest detail channel; those of the colours are 1
CODE_NOISE = 0.05  # added to the decoder's input: sampled latents are not exact
LOG_VARIANCE = -6.0  # of the encoder's posterior, exp(−6/2) ≈ CODE_NOISE; constant


def build() -> AutoencoderKL:
    """An untrained VAE of factor 4, without attention and without quantisation layers (as SD3's)."""
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(16, 24, 32),
        layers_per_block=1,
        latent_channels=CHANNELS,
        norm_num_groups=2,
        sample_size=64,
        mid_block_add_attention=False,
        use_quant_conv=False,
        use_post_quant_conv=False,
        force_upcast=False,
        scaling_factor=1.0,
        shift_factor=0.0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchCode:
    """A linear code of 4×4 patches: mean colours, then details."""

    mean: Tensor  # 48
    basis: Tensor  # 48 × 8

    def encode(self, pictures: Tensor) -> Tensor:
        """Latents [B, 8, H/4, W/4] of pictures in [−1, 1]."""
        patches = F.pixel_unshuffle(pictures, FACTOR).movedim(1, -1)
        return ((patches - self.mean) @ self.basis).movedim(-1, 1)


def fit_code(*, seed: int, count: int = 1500) -> PatchCode:
    """The code of `count` drawn scenes."""
    patches = F.pixel_unshuffle(as_float(drawn_scenes(count, seed=seed)[0]), FACTOR)
    rows = patches.movedim(1, -1).flatten(0, -2).double()
    mean = rows.mean(0)
    average = torch.eye(3, dtype=torch.double).repeat_interleave(FACTOR**2, dim=0) / FACTOR**2  # 48 × 3
    spread = average.T.pinverse()  # 48 × 3, from a colour to the flat patch of that colour
    flat = (rows - mean) @ average @ spread.T
    variances, vectors = _principal(flat, 3)
    colours = vectors / variances.sqrt()
    variances, vectors = _principal(rows - mean - flat, CHANNELS - 3)
    details = vectors * DETAIL / variances[0].sqrt()
    return PatchCode(mean=mean.float(), basis=torch.cat([colours, details], dim=1).float())


def _principal(rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest variances of centred `rows`, falling, and their directions in columns."""
    variances, vectors = torch.linalg.eigh(rows.T @ rows / len(rows))
    return variances[-count:].flip(0), vectors[:, -count:].flip(1)


def reconstruction_loss(decoded: Tensor, pictures: Tensor) -> Tensor:
    """Mean absolute and squared error, and the absolute error of differences between neighbouring pixels."""
    loss = F.l1_loss(decoded, pictures) + F.mse_loss(decoded, pictures)
    for dim in (-1, -2):
        loss = loss + F.l1_loss(decoded.diff(dim=dim), pictures.diff(dim=dim))
    return loss


def train(
    folder: Path, *, steps: int, seed: int, device: torch.device, scenes: int = 6000
) -> tuple[AutoencoderKL, float]:
    """Trains encoder and decoder on the code; returns the averaged weights and the seconds it took."""
    torch.manual_seed(seed)
    model = build().to(device)
    with torch.no_grad():
        model.encoder.conv_out.weight[CHANNELS:] = 0
        model.encoder.conv_out.bias[CHANNELS:] = LOG_VARIANCE
    code = fit_code(seed=seed)
    average = Average(model, decay=0.995)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.99), weight_decay=0.0)
    stage = Stage(
        name="vae",
        folder=folder,
        steps=steps,
        modules={"model": model, "average": average, "optimiser": optimiser},
    )
    pool = drawn_scenes(scenes, seed=seed + 1)[0] if not stage.done else torch.empty(0)

    def update(step: int) -> dict[str, float]:
        set_learning_rate(optimiser, warm_up_then_decay(step, steps=steps, warm_up=50, peak=3e-3))
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        picked = as_float(pool[torch.randint(len(pool), (BATCH,), generator=generator)])
        if step < (1 - WHOLE_SHARE) * steps:
            places = (64 - CROP) // FACTOR + 1
            top, left = (FACTOR * torch.randint(places, (2,), generator=generator)).tolist()
            picked = picked[..., top : top + CROP, left : left + CROP]
        latents = code.encode(picked)
        noise = torch.randn(latents.shape, generator=generator)
        pictures, latents = picked.to(device), latents.to(device)
        fit = reconstruction_loss(model.decode(latents + CODE_NOISE * noise.to(device)).sample, pictures)
        encoded = F.mse_loss(model.encode(pictures).latent_dist.mean, latents)
        optimiser.zero_grad()
        (fit + encoded).backward()
        model.encoder.conv_out.weight.grad[CHANNELS:] = 0
        model.encoder.conv_out.bias.grad[CHANNELS:] = 0
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        average.update(model, step=step)
        return {"decoder": fit.item(), "encoder": encoded.item()}

    stage.run(update)
    average.copy_to(model)
    return model.eval().requires_grad_(False), stage.seconds
