"""Two small CLIPs on the same scenes: one as the network reward, one of another shape for judging only."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import CLIPConfig, CLIPModel, CLIPTokenizer, CLIPVisionConfig

from recast_pl.assets.making.data import as_float, drawn_scenes
from recast_pl.assets.making.stage import Stage, set_learning_rate, warm_up_then_decay
from recast_pl.assets.making.text import text_config, tokenize

BATCH = 64
CLASSES = 32  # of a retrieval


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """What the two CLIPs differ in."""

    patch: int  # pixels
    width: int
    layers: int
    activation: str


ARCHITECTURES = {
    "clip": Architecture(patch=8, width=96, layers=4, activation="quick_gelu"),
    "judge": Architecture(patch=16, width=128, layers=3, activation="gelu"),
}


def build(tokenizer: CLIPTokenizer, shape: Architecture) -> CLIPModel:
    """An untrained dual encoder."""
    text = text_config(tokenizer, layers=2, activation=shape.activation)
    vision = CLIPVisionConfig(
        hidden_size=shape.width,
        intermediate_size=3 * shape.width,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.width // 32,
        image_size=64,
        patch_size=shape.patch,
        hidden_act=shape.activation,
    )
    return CLIPModel(CLIPConfig(text_config=text.to_dict(), vision_config=vision.to_dict(), projection_dim=64))


def embeddings(model: CLIPModel, pictures: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Unit embeddings of pictures (float in [−1, 1]) and of captions."""
    output = model(input_ids=ids, pixel_values=pictures)
    return output.image_embeds, output.text_embeds


def train(
    folder: Path,
    *,
    name: str,
    tokenizer: CLIPTokenizer,
    steps: int,
    seed: int,
    device: torch.device,
) -> tuple[CLIPModel, float]:
    """Trains one CLIP on fresh scenes (captions of both halves: a reward must know what it judges)."""
    torch.manual_seed(seed)
    model = build(tokenizer, ARCHITECTURES[name]).to(device)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05, betas=(0.9, 0.98))
    stage = Stage(name=name, folder=folder, steps=steps, modules={"model": model, "optimiser": optimiser})

    def update(step: int) -> dict[str, float]:
        set_learning_rate(optimiser, warm_up_then_decay(step, steps=steps, warm_up=200, peak=1e-3))
        pictures, shown = drawn_scenes(BATCH, seed=seed, first=step * BATCH, held_out=step % 2 == 1)
        captions = [scene.caption for scene in shown]
        image, text = embeddings(model, as_float(pictures).to(device), tokenize(tokenizer, captions).to(device))
        logits = model.logit_scale.exp() * image @ text.T
        same = torch.tensor([[a == b for b in captions] for a in captions], device=device).float()
        target = same / same.sum(1, keepdim=True)  # equal captions are equally right
        loss = (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        with torch.no_grad():
            model.logit_scale.clamp_(max=4.6052)  # exp ≤ 100, as in CLIP
        return {"loss": loss.item()}

    stage.run(update)
    return model.eval().requires_grad_(False), stage.seconds


@torch.no_grad()
def retrieval(model: CLIPModel, tokenizer: CLIPTokenizer, *, seed: int, trials: int = 64) -> float:
    """Share of held-out scenes whose own caption scores highest among `CLASSES` different ones."""
    right = total = 0
    for trial in range(trials):
        pictures, shown = drawn_scenes(2 * CLASSES, seed=seed, first=trial * 2 * CLASSES, held_out=True)
        first = {scene.caption: index for index, scene in reversed(list(enumerate(shown)))}
        picked = sorted(first.values())[:CLASSES]
        ids = tokenize(tokenizer, [shown[i].caption for i in picked]).to(model.device)
        image, text = embeddings(model, as_float(pictures[picked]).to(model.device), ids)
        right += int((image @ text.T).argmax(1).eq(torch.arange(len(picked), device=model.device)).sum())
        total += len(picked)
    return right / total
