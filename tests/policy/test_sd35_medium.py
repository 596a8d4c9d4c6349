"""SD3.5-Medium's own shape, on the meta device: which layers are adapted, and what there is to count.

The shape is that of stabilityai/stable-diffusion-3.5-medium's transformer/config.json, as the benchmark of GPUs
has it; what it comes to is counted by hand.
"""

import pytest
import torch
from diffusers import SD3Transformer2DModel, StableDiffusion3Pipeline
from gpu_check import MEDIUM
from peft.utils import get_peft_model_state_dict
from safetensors.torch import load_file

from recast_pl.policy import SD3Policy
from recast_pl.policy.adapters import Adapters
from recast_pl.policy.sd3 import ATTENTION_PROJECTIONS
from recast_pl.testing import save_pipeline

SELF_ATTENTION = ("attn2.to_q", "attn2.to_k", "attn2.to_v", "attn2.to_out.0")
WIDTH, HEAD, RANK = 24 * 64, 64, 32


def adapted(targets):
    with torch.device("meta"):
        denoiser = torch.nn.Module.to(SD3Transformer2DModel(**MEDIUM), torch.bfloat16)
        return denoiser, Adapters(denoiser, rank=RANK, alpha=2 * RANK, targets=targets, seed=0)


@pytest.fixture(scope="module")
def medium():
    return adapted(ATTENTION_PROJECTIONS)


def adapted_layers(denoiser):
    names = [name for name, _ in denoiser.named_parameters() if ".lora_A.default." in name]
    return [name.removeprefix("transformer_blocks.").split(".lora_A")[0] for name in names]


def linear(inputs, outputs):
    return inputs * outputs + outputs


def test_parameters_by_hand(medium):
    denoiser, _ = medium
    feed_forward = linear(WIDTH, 4 * WIDTH) + linear(4 * WIDTH, WIDTH)
    modulation = linear(WIDTH, 6 * WIDTH)  # shift, scale and gate of attention and feed-forward
    joint_attention = 8 * linear(WIDTH, WIDTH) + 4 * HEAD  # q, k, v, out and norms of q and k, of both streams
    block = joint_attention + 2 * feed_forward + 2 * modulation
    dual = 4 * linear(WIDTH, WIDTH) + 2 * HEAD + linear(WIDTH, 3 * WIDTH)  # attn2 and its modulation
    # the last block's text stream ends in its attention, with a shift and a scale alone
    absent = linear(WIDTH, WIDTH) + feed_forward + modulation - linear(WIDTH, 2 * WIDTH)
    embeddings = (
        linear(16 * 2 * 2, WIDTH)  # a patch
        + linear(256, WIDTH) + linear(WIDTH, WIDTH)  # the timestep
        + linear(2048, WIDTH) + linear(WIDTH, WIDTH)  # the pooled text
        + linear(4096, WIDTH)  # the text's tokens
    )  # fmt: skip
    head = linear(WIDTH, 2 * WIDTH) + linear(WIDTH, 16 * 2 * 2)
    expected = 24 * block + 13 * dual - absent + embeddings + head
    own = sum(p.numel() for name, p in denoiser.named_parameters() if "lora_" not in name)
    assert own == expected == 2_243_171_520
    # the published figure, 2.5 billion, has the fixed table of positions in it: it is in the checkpoint too
    positions = sum(buffer.numel() for buffer in denoiser.buffers())
    assert positions == 384**2 * WIDTH
    assert own + positions == pytest.approx(2.5e9, rel=0.02)


def test_adapted_layers_by_hand(medium):
    layers = adapted_layers(medium[0])
    # 24 joint attentions of q, k, v and out for pictures and for text; the last has no `to_add_out`
    expected = {f"{block}.{name}" for block in range(24) for name in ATTENTION_PROJECTIONS}
    expected.remove("23.attn.to_add_out")
    assert set(layers) == expected
    assert len(layers) == len(expected) == 24 * 8 - 1


def test_the_second_attention_is_not_adapted_unless_asked_for(medium):
    # Flow-GRPO's and DiffusionNFT's scripts for this model name the eight projections of `attn`, not `attn2`
    assert not any("attn2" in name for name in adapted_layers(medium[0]))
    denoiser, pair = adapted((*ATTENTION_PROJECTIONS, *SELF_ATTENTION))
    second = {name for name in adapted_layers(denoiser) if "attn2" in name}
    assert second == {f"{block}.{name}" for block in range(13) for name in SELF_ATTENTION}
    assert len(pair.trained) == 2 * (24 * 8 - 1 + 13 * 4)


def test_adapter_parameters_by_hand(medium):
    _, pair = medium
    # rank × (inputs + outputs), and all 191 layers are square
    expected = 191 * RANK * (WIDTH + WIDTH)
    assert expected == 18_776_064
    for parameters in (pair.trained, pair.old):
        assert sum(parameter.numel() for parameter in parameters) == expected
        assert {parameter.dtype for parameter in parameters} == {torch.float32}


@pytest.mark.parametrize("targets", [ATTENTION_PROJECTIONS, (*ATTENTION_PROJECTIONS, *SELF_ATTENTION)])
def test_saved_adapters_are_what_diffusers_loads(targets, tmp_path):
    folder = save_pipeline(tmp_path / "pipeline")
    torch.manual_seed(3)
    config = SD3Transformer2DModel.load_config(folder / "transformer")
    small = {**config, "num_layers": 3, "dual_attention_layers": (0, 1), "qk_norm": "rms_norm"}
    SD3Transformer2DModel.from_config(small).save_pretrained(folder / "transformer")
    policy = SD3Policy(pretrained=str(folder), lora_rank=4, max_sequence_length=1, lora_targets=targets)
    policy.load(seed=0)
    with torch.no_grad():
        for parameter in policy.trainable_parameters():
            parameter.normal_(std=0.2)
    weights = get_peft_model_state_dict(policy.denoiser, adapter_name="default")
    metadata = policy.denoiser.peft_config["default"].to_dict()
    StableDiffusion3Pipeline.save_lora_weights(
        tmp_path, transformer_lora_layers=weights, transformer_lora_adapter_metadata=metadata
    )
    keys = set(load_file(tmp_path / "pytorch_lora_weights.safetensors"))
    blocks = {"attn": (0, 1, 2), "attn2": (0, 1)}
    layers = {f"{b}.{t}" for t in targets for b in blocks[t.split(".")[0]]} - {"2.attn.to_add_out"}
    assert keys == {
        f"transformer.transformer_blocks.{layer}.lora_{half}.weight" for layer in layers for half in "AB"
    }
    plain = StableDiffusion3Pipeline.from_pretrained(folder, text_encoder_3=None, tokenizer_3=None)
    x, t, text = torch.randn(2, *policy.latent_shape), torch.tensor([0.9, 0.3]), policy.text(["a", "b"])

    def velocity():
        with torch.no_grad():
            return plain.transformer(x, text["sequence_BLD"], text.pooled_BD, t * 1000, return_dict=False)[0]

    before = velocity()
    plain.load_lora_weights(tmp_path)
    with torch.no_grad():
        ours = policy.velocity(x, t, text)
    assert (ours - before).abs().max() > 1e-2
    torch.testing.assert_close(velocity(), ours, atol=1e-5, rtol=0)
