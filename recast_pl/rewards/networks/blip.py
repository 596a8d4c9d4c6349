"""BLIP's released state dict as transformers' `BlipVisionModel` and `BlipTextModel`.

The text encoder's names are transformers' already, the vision encoder's are timm's. Sizes are read from the
weights; heads are 64 wide in both, as in every released BLIP.

Reference: Li et al., "BLIP: Bootstrapping language-image pre-training for unified vision-language
understanding and generation", 2022.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from recast_pl.rewards.networks.weights import count_blocks, load_strictly, reading, tensor

HEAD_WIDTH = 64
VISION_EPSILON = 1e-6  # timm's; transformers' default for BLIP is 1e-5
UNUSED = (  # the contrastive heads, which ImageReward does not call, and a buffer
    "blip.vision_proj.weight",
    "blip.vision_proj.bias",
    "blip.text_proj.weight",
    "blip.text_proj.bias",
    "blip.text_encoder.embeddings.position_ids",
)
_OUTSIDE_BLOCKS = {
    "cls_token": "embeddings.class_embedding",
    "pos_embed": "embeddings.position_embedding",
    "patch_embed.proj.weight": "embeddings.patch_embedding.weight",
    "patch_embed.proj.bias": "embeddings.patch_embedding.bias",
    "norm.weight": "post_layernorm.weight",
    "norm.bias": "post_layernorm.bias",
}
_INSIDE_BLOCKS = {
    "norm1": "layer_norm1",
    "norm2": "layer_norm2",
    "attn.qkv": "self_attn.qkv",
    "attn.proj": "self_attn.projection",
    "mlp.fc1": "mlp.fc1",
    "mlp.fc2": "mlp.fc2",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """ImageReward's weights, each part under its own names."""

    vision: dict[str, Tensor]
    text: dict[str, Tensor]
    head: dict[str, Tensor]


def split(state: Mapping[str, Tensor], *, key: str) -> Parts:
    """ImageReward's state dict in parts.

    Raises:
        ValueError: naming keys that belong to none.
    """
    prefixes = ("blip.visual_encoder.", "blip.text_encoder.", "mlp.")
    left_over = [n for n in state if not n.startswith(prefixes) and n not in UNUSED]
    if left_over:
        raise ValueError(f"{key}: unexpected keys: {', '.join(sorted(left_over))}")
    vision, text, head = (
        {
            name.removeprefix(prefix): value
            for name, value in state.items()
            if name.startswith(prefix) and name not in UNUSED
        }
        for prefix in prefixes
    )
    return Parts(vision=vision, text=text, head=head)


def to_vision_encoder(state: Mapping[str, Tensor], *, key: str) -> Any:
    """A `BlipVisionModel` with the weights of `visual_encoder`.

    Raises:
        ValueError: naming every key that is missing, left over or of another shape.
    """
    from transformers import BlipVisionConfig, BlipVisionModel

    patch = tensor(state, "patch_embed.proj.weight", key=key)
    grid = round((tensor(state, "pos_embed", key=key).shape[1] - 1) ** 0.5)
    config = BlipVisionConfig(
        hidden_size=patch.shape[0],
        intermediate_size=len(tensor(state, "blocks.0.mlp.fc1.bias", key=key)),
        num_hidden_layers=count_blocks(state, "blocks."),
        num_attention_heads=_heads(patch.shape[0], key=key),
        image_size=grid * patch.shape[-1],
        patch_size=patch.shape[-1],
        layer_norm_eps=VISION_EPSILON,
        hidden_act="gelu",
    )
    model = BlipVisionModel(config)
    load_strictly(model, {_rename(name): value for name, value in state.items()}, key=key)
    return model


def _rename(name: str) -> str:
    """Transformers' name; any other stays, for strict loading to complain of."""
    if name in _OUTSIDE_BLOCKS:
        return _OUTSIDE_BLOCKS[name]
    number, _, rest = name.removeprefix("blocks.").partition(".")
    module, _, kind = rest.rpartition(".")
    if name.startswith("blocks.") and module in _INSIDE_BLOCKS:
        return f"encoder.layers.{number}.{_INSIDE_BLOCKS[module]}.{kind}"
    return name


def to_text_encoder(state: Mapping[str, Tensor], *, key: str) -> Any:
    """A `BlipTextModel` with the weights of `text_encoder`, cross-attention included.

    Raises:
        ValueError: naming every key that is missing, left over or of another shape.
    """
    from transformers import BlipTextConfig, BlipTextModel

    words = tensor(state, "embeddings.word_embeddings.weight", key=key)
    cross = tensor(state, "encoder.layer.0.crossattention.self.key.weight", key=key)
    config = BlipTextConfig(
        vocab_size=len(words),
        hidden_size=words.shape[1],
        encoder_hidden_size=cross.shape[1],
        intermediate_size=len(tensor(state, "encoder.layer.0.intermediate.dense.bias", key=key)),
        num_hidden_layers=count_blocks(state, "encoder.layer."),
        num_attention_heads=_heads(words.shape[1], key=key),
        max_position_embeddings=len(tensor(state, "embeddings.position_embeddings.weight", key=key)),
        is_decoder=True,  # transformers' name for having cross-attention; attention stays in both directions
    )
    model = BlipTextModel(config, add_pooling_layer=False)
    load_strictly(model, state, key=key)
    return model


def _heads(width: int, *, key: str) -> int:
    if width % HEAD_WIDTH:
        raise ValueError(f"{key}: a width of {width} is no multiple of {HEAD_WIDTH}, the width of BLIP's heads")
    return width // HEAD_WIDTH


def load_tokenizer(source: str, text_encoder: Any, *, key: str) -> Any:
    """BERT's tokenizer with the two tokens that BLIP adds.

    Raises:
        ValueError: naming `key`, if there is none or it has not as many tokens as the text encoder.
    """
    from transformers import BertTokenizer

    with reading(source, key=key):
        tokenizer = BertTokenizer.from_pretrained(source)
    tokenizer.add_special_tokens({"bos_token": "[DEC]"})
    tokenizer.add_special_tokens({"additional_special_tokens": ["[ENC]"]})
    if len(tokenizer) != text_encoder.config.vocab_size:
        raise ValueError(
            f"{key}: the tokenizer of {source!r} has {len(tokenizer)} tokens with BLIP's two, the text "
            f"encoder {text_encoder.config.vocab_size}"
        )
    return tokenizer
