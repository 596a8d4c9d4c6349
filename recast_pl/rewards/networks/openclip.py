"""OpenCLIP's state dict as a transformers `CLIPModel`.

The two differ in names, in attention (one matrix for query, key and value against three), and in the
projections, which OpenCLIP stores transposed. Sizes are read from the weights.

Reference: Ilharco et al., "OpenCLIP", 2021.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from recast_pl.rewards.networks.weights import count_blocks, load_strictly, tensor

_OUTSIDE_BLOCKS = {
    "logit_scale": "logit_scale",
    "token_embedding.weight": "text_model.embeddings.token_embedding.weight",
    "positional_embedding": "text_model.embeddings.position_embedding.weight",
    "ln_final.weight": "text_model.final_layer_norm.weight",
    "ln_final.bias": "text_model.final_layer_norm.bias",
    "visual.class_embedding": "vision_model.embeddings.class_embedding",
    "visual.conv1.weight": "vision_model.embeddings.patch_embedding.weight",
    "visual.positional_embedding": "vision_model.embeddings.position_embedding.weight",
    "visual.ln_pre.weight": "vision_model.pre_layrnorm.weight",  # the typing error is transformers'
    "visual.ln_pre.bias": "vision_model.pre_layrnorm.bias",
    "visual.ln_post.weight": "vision_model.post_layernorm.weight",
    "visual.ln_post.bias": "vision_model.post_layernorm.bias",
}
_PROJECTIONS = {"text_projection": "text_projection.weight", "visual.proj": "visual_projection.weight"}
_TOWERS = {
    "transformer.resblocks.": "text_model.encoder.layers.",
    "visual.transformer.resblocks.": "vision_model.encoder.layers.",
}
_INSIDE_BLOCKS = {
    "attn.out_proj": "self_attn.out_proj",
    "ln_1": "layer_norm1",
    "ln_2": "layer_norm2",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
}


def to_clip_model(state: Mapping[str, Tensor], *, vision_heads: int, text_heads: int, key: str) -> Any:
    """A `CLIPModel` with the weights of an OpenCLIP ViT, activation gelu.

    Args:
        state: OpenCLIP's state dict.
        vision_heads: attention heads of the picture tower, which no shape tells.
        text_heads: attention heads of the text tower.
        key: the YAML key of the file, for errors.

    Raises:
        ValueError: naming every key that is missing, left over or of another shape.
    """
    from transformers import CLIPConfig, CLIPModel

    model = CLIPModel(CLIPConfig(**_sizes(state, vision_heads=vision_heads, text_heads=text_heads, key=key)))
    load_strictly(model, rename(state), key=key)
    return model


def rename(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Transformers' names; a name that is not OpenCLIP's stays, for strict loading to complain of."""
    renamed: dict[str, Tensor] = {}
    for name, value in state.items():
        if name in _OUTSIDE_BLOCKS:
            renamed[_OUTSIDE_BLOCKS[name]] = value
        elif name in _PROJECTIONS:
            renamed[_PROJECTIONS[name]] = value.T
        else:
            renamed.update(_rename_in_block(name, value))
    return renamed


def _rename_in_block(name: str, value: Tensor) -> dict[str, Tensor]:
    for old, new in _TOWERS.items():
        number, _, rest = name.removeprefix(old).partition(".")
        if not name.startswith(old) or not rest:
            continue
        if rest in ("attn.in_proj_weight", "attn.in_proj_bias"):
            kind = rest.removeprefix("attn.in_proj_")
            parts = zip("qkv", value.chunk(3), strict=True)
            return {f"{new}{number}.self_attn.{which}_proj.{kind}": part for which, part in parts}
        module, _, kind = rest.rpartition(".")
        if module in _INSIDE_BLOCKS:
            return {f"{new}{number}.{_INSIDE_BLOCKS[module]}.{kind}": value}
    return {name: value}


def _sizes(state: Mapping[str, Tensor], *, vision_heads: int, text_heads: int, key: str) -> dict[str, Any]:
    conv = tensor(state, "visual.conv1.weight", key=key)
    tokens = tensor(state, "token_embedding.weight", key=key)
    grid = round((len(tensor(state, "visual.positional_embedding", key=key)) - 1) ** 0.5)
    for name, width, heads in (("picture", conv.shape[0], vision_heads), ("text", tokens.shape[1], text_heads)):
        if width % heads:
            raise ValueError(f"{key}: a {name} tower of width {width} has not the {heads} heads of this model")
    end = len(tokens) - 1  # OpenCLIP pools at the highest id
    return {
        "projection_dim": tensor(state, "visual.proj", key=key).shape[1],
        "vision_config": {
            "hidden_size": conv.shape[0],
            "intermediate_size": len(tensor(state, "visual.transformer.resblocks.0.mlp.c_fc.bias", key=key)),
            "num_hidden_layers": count_blocks(state, "visual.transformer.resblocks."),
            "num_attention_heads": vision_heads,
            "patch_size": conv.shape[-1],
            "image_size": grid * conv.shape[-1],
            "hidden_act": "gelu",
        },
        "text_config": {
            "vocab_size": len(tokens),
            "hidden_size": tokens.shape[1],
            "intermediate_size": len(tensor(state, "transformer.resblocks.0.mlp.c_fc.bias", key=key)),
            "num_hidden_layers": count_blocks(state, "transformer.resblocks."),
            "num_attention_heads": text_heads,
            "max_position_embeddings": len(tensor(state, "positional_embedding", key=key)),
            "hidden_act": "gelu",
            "bos_token_id": end - 1,
            "eos_token_id": end,
            "pad_token_id": end,
        },
    }
