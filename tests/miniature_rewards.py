"""Untrained reward checkpoints in the released key layouts, file names and classes."""

from functools import cached_property
from pathlib import Path

import torch
from transformers import (
    BertTokenizer,
    CLIPConfig,
    CLIPModel,
    CLIPTextConfig,
    CLIPTokenizer,
    CLIPVisionConfig,
    Mask2FormerConfig,
    Mask2FormerForUniversalSegmentation,
    SwinConfig,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.mask2former.image_processing_pil_mask2former import Mask2FormerImageProcessorPil

from recast_pl.assets.making.text import END, START, build_tokenizer
from recast_pl.scenes.coco import COCO_CLASSES
from recast_pl.testing import save_clip

WORDS = ["a", "two", "red", "green", "blue", "circle", "square", "triangle", "on", "left", "of", "above", "the"]
HEAD_SIZES = {0: 24, 2: 16, 4: 12, 6: 8, 7: 1}  # the released layout's numbers; 1024, 128, 64, 16 and 1 there


class RewardCheckpoints:
    """Builds each checkpoint under `folder` when it is first asked for; a second object reads the first's."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)

    @cached_property
    def clip(self) -> str:
        return self._made("clip", save_clip)

    @cached_property
    def clip_h(self) -> str:
        """A CLIP with its tokenizer and processor, laid out as CLIP-H's: end of text has the last id."""
        return self._made("clip_h", save_clip_h)

    @cached_property
    def hps(self) -> str:
        return self._made("hps", save_hps)

    @cached_property
    def aesthetic(self) -> str:
        return self._made("aesthetic", save_aesthetic)

    @cached_property
    def imagereward(self) -> str:
        return self._made("imagereward", save_imagereward)

    @cached_property
    def bert(self) -> str:
        return self._made("bert", save_bert_tokenizer)

    @cached_property
    def detector(self) -> str:
        return self._made("detector", save_detector)

    def _made(self, name, save) -> str:
        folder = self.folder / name
        if not folder.exists():
            folder.mkdir(parents=True)
            save(folder)
        return str(folder)


def clip_h_tokenizer() -> CLIPTokenizer:
    """The captions' tokenizer with start and end of text as the last two ids, as in CLIP's vocabulary."""
    small = build_tokenizer()
    merges = [tuple(merge) for merge in small._merges]
    tokens = [token for token in sorted(small.get_vocab(), key=small.get_vocab().get) if token[:2] != "<|"]
    vocabulary = {token: number for number, token in enumerate([*tokens, START, END])}
    return CLIPTokenizer(vocab=vocabulary, merges=merges, model_max_length=16)


def save_clip_h(folder: Path) -> None:
    torch.manual_seed(2)
    tokenizer = clip_h_tokenizer()
    shared = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    text = CLIPTextConfig(
        **shared,
        vocab_size=len(tokenizer),
        max_position_embeddings=16,
        eos_token_id=2,  # as in the released configurations: pooled at the highest id
        hidden_act="gelu",
    )
    vision = CLIPVisionConfig(**shared, image_size=16, patch_size=8, hidden_act="gelu")
    config = CLIPConfig(text_config=text.to_dict(), vision_config=vision.to_dict(), projection_dim=24)
    CLIPModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}).save_pretrained(
        folder
    )


def filled(shapes: dict[str, tuple[int, ...]], *, seed: int) -> dict[str, torch.Tensor]:
    """Random weights: matrices keep the size of what they multiply, norms are near 1, biases near 0."""
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        is_norm = len(shape) == 1 and name.endswith("weight")
        state[name] = 1 + 0.1 * noise if is_norm else noise * (0.1 if len(shape) < 2 else shape[-1] ** -0.5)
    return state


def openclip_state(*, vocabulary: int, context: int = 16) -> dict[str, torch.Tensor]:
    """OpenCLIP's ViT layout: widths 48 (pictures) and 32 (text), 2 blocks each, 16 × 16 pictures."""
    shapes: dict[str, tuple[int, ...]] = {
        "positional_embedding": (context, 32),
        "text_projection": (32, 24),
        "token_embedding.weight": (vocabulary, 32),
        "ln_final.weight": (32,),
        "ln_final.bias": (32,),
        "visual.class_embedding": (48,),
        "visual.positional_embedding": (5, 48),
        "visual.proj": (48, 24),
        "visual.conv1.weight": (48, 3, 8, 8),
        "visual.ln_pre.weight": (48,),
        "visual.ln_pre.bias": (48,),
        "visual.ln_post.weight": (48,),
        "visual.ln_post.bias": (48,),
    }
    for prefix, width in (("", 32), ("visual.", 48)):
        for number in range(2):
            block = f"{prefix}transformer.resblocks.{number}."
            for norm in ("ln_1", "ln_2"):
                shapes |= {f"{block}{norm}.weight": (width,), f"{block}{norm}.bias": (width,)}
            shapes |= {f"{block}attn.in_proj_weight": (3 * width, width)}
            shapes |= {f"{block}attn.in_proj_bias": (3 * width,)}
            shapes |= linear(f"{block}attn.out_proj", width, width)
            shapes |= linear(f"{block}mlp.c_fc", 4 * width, width)
            shapes |= linear(f"{block}mlp.c_proj", width, 4 * width)
    return filled(shapes, seed=3) | {"logit_scale": torch.tensor(4.6)}


def linear(name: str, out: int, into: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (out, into), f"{name}.bias": (out,)}


def save_hps(folder: Path) -> None:
    state = openclip_state(vocabulary=len(clip_h_tokenizer()))
    torch.save({"state_dict": state}, folder / "HPS_v2.1_compressed.pt")


def head_state(width: int, *, prefix: str = "", seed: int) -> dict[str, torch.Tensor]:
    shapes: dict[str, tuple[int, ...]] = {}
    for number, out in HEAD_SIZES.items():
        shapes |= linear(f"{prefix}layers.{number}", out, width)
        width = out
    return filled(shapes, seed=seed)


def save_aesthetic(folder: Path) -> None:
    torch.save(head_state(16, seed=4), folder / "sac+logos+ava1-l14-linearMSE.pth")


def imagereward_state() -> dict[str, torch.Tensor]:
    """ImageReward's layout: widths 128 (pictures) and 64 (text), 2 blocks each, 32 × 32 pictures."""
    vision, text, shapes = 128, 64, {}
    shapes |= {"cls_token": (1, 1, vision), "pos_embed": (1, 5, vision)}
    shapes |= {"patch_embed.proj.weight": (vision, 3, 16, 16), "patch_embed.proj.bias": (vision,)}
    for number in range(2):
        block = f"blocks.{number}."
        for norm in ("norm1", "norm2"):
            shapes |= {f"{block}{norm}.weight": (vision,), f"{block}{norm}.bias": (vision,)}
        shapes |= linear(f"{block}attn.qkv", 3 * vision, vision) | linear(f"{block}attn.proj", vision, vision)
        shapes |= linear(f"{block}mlp.fc1", 2 * vision, vision) | linear(f"{block}mlp.fc2", vision, 2 * vision)
    shapes |= {"norm.weight": (vision,), "norm.bias": (vision,)}
    shapes = {f"blip.visual_encoder.{name}": shape for name, shape in shapes.items()}

    bert: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (bert_vocabulary_size(), text),
        "embeddings.position_embeddings.weight": (40, text),
        "embeddings.LayerNorm.weight": (text,),
        "embeddings.LayerNorm.bias": (text,),
    }
    for number in range(2):
        layer = f"encoder.layer.{number}."
        for attention, seen in (("attention", text), ("crossattention", vision)):
            bert |= linear(f"{layer}{attention}.self.query", text, text)
            bert |= linear(f"{layer}{attention}.self.key", text, seen)
            bert |= linear(f"{layer}{attention}.self.value", text, seen)
            bert |= linear(f"{layer}{attention}.output.dense", text, text)
            bert |= {f"{layer}{attention}.output.LayerNorm.{kind}": (text,) for kind in ("weight", "bias")}
        bert |= linear(f"{layer}intermediate.dense", 2 * text, text)
        bert |= linear(f"{layer}output.dense", text, 2 * text)
        bert |= {f"{layer}output.LayerNorm.{kind}": (text,) for kind in ("weight", "bias")}
    shapes |= {f"blip.text_encoder.{name}": shape for name, shape in bert.items()}
    shapes |= linear("blip.vision_proj", 8, vision) | linear("blip.text_proj", 8, text)
    state = filled(shapes, seed=5) | head_state(text, prefix="mlp.", seed=6)
    for name in ("cls_token", "pos_embed", "patch_embed.proj.weight", "patch_embed.proj.bias"):
        state[f"blip.visual_encoder.{name}"] *= 0.02  # small, so that the epsilon of the first norm shows
    return state | {"blip.text_encoder.embeddings.position_ids": torch.arange(40)[None]}


def save_imagereward(folder: Path) -> None:
    torch.save(imagereward_state(), folder / "ImageReward.pt")


def bert_vocabulary_size() -> int:
    return len(bert_tokens()) + 2  # BLIP's two


def bert_tokens() -> list[str]:
    letters = [chr(ord("a") + n) for n in range(26)]
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{letter}" for letter in letters)]
    tokens += [word for word in WORDS if word not in tokens] + ["."]  # "a" is among the letters
    return tokens


def save_bert_tokenizer(folder: Path) -> None:
    BertTokenizer(vocab={token: n for n, token in enumerate(bert_tokens())}).save_pretrained(folder)


NAMES = [*COCO_CLASSES[:62], "tvmonitor", *COCO_CLASSES[63:]]


def save_detector(folder, *, names=NAMES, size=64):
    """A Mask2Former whose queries are sure of different classes, and whose masks depend on the picture."""
    torch.manual_seed(0)
    backbone = SwinConfig(
        image_size=64, patch_size=4, embed_dim=8, depths=[1, 1, 1, 1], num_heads=[1, 1, 2, 2], window_size=2,
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )  # fmt: skip
    config = Mask2FormerConfig(
        backbone_config=backbone, feature_size=32, mask_feature_size=32, hidden_dim=32, encoder_layers=1,
        encoder_feedforward_dim=32, dim_feedforward=32, decoder_layers=2, num_attention_heads=2, num_queries=12,
        id2label=dict(enumerate(names)), label2id={name: i for i, name in enumerate(names)},
    )  # fmt: skip
    model = Mask2FormerForUniversalSegmentation(config)
    with torch.no_grad():
        model.class_predictor.weight.mul_(25)
    model.save_pretrained(folder)
    Mask2FormerImageProcessorPil(size={"height": size, "width": size}).save_pretrained(folder)
    return folder
