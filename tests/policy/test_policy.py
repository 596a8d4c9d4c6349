import pytest
import torch

from recast_pl.policy import SD3Policy

TEXTS = ["a red circle on a white background", "two blue squares on a black background"]


@pytest.fixture
def probe(disturbed):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, *disturbed.latent_shape, generator=generator)
    return disturbed, x, torch.tensor([0.9, 0.35]), disturbed.text(TEXTS)


def plain(denoiser, x, t, text):
    """The denoiser called as diffusers' pipeline does, whatever adapter peft has active."""
    return denoiser(
        hidden_states=x,
        timestep=t * 1000,
        encoder_hidden_states=text["sequence_BLD"],
        pooled_projections=text.pooled_BD,
        return_dict=False,
    )[0]


def test_three_policies_are_what_peft_says(probe):
    policy, x, t, text = probe
    with torch.no_grad():
        ours = {"default": policy.velocity(x, t, text)}
        for role in ("old", "reference"):
            with policy.using(role):
                ours[role] = policy.velocity(x, t, text)
        for role in ("default", "old"):
            policy.denoiser.set_adapter(role)
            torch.testing.assert_close(ours[role], plain(policy.denoiser, x, t, text), atol=1e-6, rtol=0)
        policy.denoiser.disable_adapters()
        torch.testing.assert_close(ours["reference"], plain(policy.denoiser, x, t, text), atol=1e-6, rtol=0)
    assert (ours["default"] - ours["old"]).abs().max() > 1e-3
    assert (ours["default"] - ours["reference"]).abs().max() > 1e-3


def test_reference_is_the_pipeline_without_adapters(probe, pipeline_folder):
    from diffusers import SD3Transformer2DModel

    policy, x, t, text = probe
    base = SD3Transformer2DModel.from_pretrained(pipeline_folder / "transformer")
    with torch.no_grad(), policy.using("reference"):
        expected = plain(base, x, t, text)
        torch.testing.assert_close(policy.velocity(x, t, text), expected, atol=1e-6, rtol=0)


def required(policy):
    return {name for name, p in policy.named_parameters() if p.requires_grad}


def test_exactly_the_default_adapter_requires_a_gradient_always(disturbed):
    policy = disturbed
    wanted = required(policy)
    assert wanted
    assert all(".default." in name for name in wanted)
    for role in ("old", "reference", "default"):
        with policy.using(role):
            assert required(policy) == wanted
        assert required(policy) == wanted


def test_an_exception_leaves_the_default_in_use(probe):
    policy, x, t, text = probe
    with torch.no_grad():
        before = policy.velocity(x, t, text)
        with pytest.raises(RuntimeError, match="boom"), policy.using("reference"):
            raise RuntimeError("boom")
        assert torch.equal(policy.velocity(x, t, text), before)


def test_gradients_reach_the_default_adapter_alone(probe):
    policy, x, t, text = probe
    policy.velocity(x, t, text).square().mean().backward()
    with_gradient = {n for n, p in policy.named_parameters() if p.grad is not None}
    assert with_gradient == required(policy)
    silent = {n for n, p in policy.named_parameters() if p.grad is not None and p.grad.abs().sum() == 0}
    # the last block's text stream asks no more questions
    assert all("transformer_blocks.1.attn.add_q_proj" in name for name in silent)


def test_lora_sits_on_all_attention_projections(policy):
    targets = {n.split(".lora_A")[0].split("transformer_blocks.")[1] for n in required(policy) if "lora_A" in n}
    names = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj")
    # the last block's text stream ends in its attention: it has no to_add_out
    expected = {f"{block}.attn.{name}" for block in (0, 1) for name in names} | {"0.attn.to_add_out"}
    assert targets == expected


def test_all_start_equal_and_old_follows_exactly(policy):
    assert policy.distance_to_old() == 0
    with torch.no_grad():
        for parameter in policy.trainable_parameters():
            parameter.add_(1.0)
    before = [old.clone() for old in policy.adapters.old]
    policy.update_old(0.25)
    for old, start, new in zip(policy.adapters.old, before, policy.adapters.trained, strict=True):
        torch.testing.assert_close(old, 0.25 * start + 0.75 * new)
    policy.update_old(0.0)
    assert policy.distance_to_old() == 0
    storages = {p.data_ptr() for p in policy.adapters.old} & {p.data_ptr() for p in policy.adapters.trained}
    assert not storages  # an average that aliases the live weights would follow them by itself


def test_distance_is_the_euclidean_one(disturbed):
    pairs = zip(disturbed.adapters.trained, disturbed.adapters.old, strict=True)
    expected = sum((a - b).square().sum() for a, b in pairs).sqrt()
    torch.testing.assert_close(disturbed.distance_to_old(), expected)


def test_text_is_that_of_the_pipeline_and_encoded_once(policy, monkeypatch):
    calls = []
    original = policy.pipeline.encode_prompt
    monkeypatch.setattr(
        policy.pipeline,
        "encode_prompt",
        lambda text, *a, **k: (calls.append(text), original(text, *a, **k))[1],
    )
    text = policy.text([*TEXTS, TEXTS[0]])
    policy.text(TEXTS)
    assert calls == TEXTS
    sequence, _, pooled, _ = original(
        [*TEXTS, TEXTS[0]], None, None, do_classifier_free_guidance=False, max_sequence_length=1
    )
    torch.testing.assert_close(text["sequence_BLD"], sequence, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(text.pooled_BD, pooled, atol=1e-5, rtol=1e-5)


def test_the_text_cache_forgets_the_longest_unused(pipeline_folder):
    policy = SD3Policy(pretrained=str(pipeline_folder), lora_rank=2, max_sequence_length=1, text_cache_size=2)
    policy.load(seed=0)
    policy.text(["a", "b"])
    policy.text(["a"])
    policy.text(["c"])
    assert list(policy._text_cache) == ["a", "c"]
    assert len(policy.text(["d", "e", "f"]).pooled_BD) == 3  # more than the cache holds


@pytest.mark.parametrize("text", ["", "🎉 ünïcode 漢字", "word " * 300])
def test_any_text_is_a_prompt(policy, text):
    embedded = policy.text([text])
    assert embedded["sequence_BLD"].isfinite().all()


def test_state_goes_round_and_a_foreign_one_is_refused(disturbed, pipeline_folder):
    state = disturbed.saved_state()
    fresh = SD3Policy(pretrained=str(pipeline_folder), lora_rank=4, max_sequence_length=1)
    fresh.load(seed=9)
    fresh.load_saved_state(state)
    again = fresh.saved_state()
    assert state.keys() == again.keys()
    assert all(torch.equal(state[name], again[name]) for name in state)

    other = SD3Policy(pretrained=str(pipeline_folder), lora_rank=2, max_sequence_length=1)
    other.load(seed=0)
    with pytest.raises(ValueError, match="lora_rank"):
        other.load_saved_state(state)
    with pytest.raises(ValueError, match="lora_targets"):
        fresh.load_saved_state({name: value for name, value in state.items() if "to_q" not in name})


def test_adapters_depend_on_their_seed_and_not_on_the_global_one(pipeline_folder):
    def first_factor(seed, noise):
        torch.manual_seed(noise)
        policy = SD3Policy(pretrained=str(pipeline_folder), lora_rank=2, max_sequence_length=1)
        policy.load(seed=seed)
        return policy.adapters.trained[0].detach().clone()

    assert torch.equal(first_factor(0, 1), first_factor(0, 2))
    assert not torch.equal(first_factor(0, 1), first_factor(1, 1))


def test_half_precision_weights_keep_adapters_and_pictures_in_float32(pipeline_folder):
    policy = SD3Policy(
        pretrained=str(pipeline_folder), lora_rank=2, max_sequence_length=1, weights_dtype="bfloat16"
    )
    policy.load(seed=0)
    assert {p.dtype for p in policy.trainable_parameters()} == {torch.float32}
    assert policy.denoiser.dtype == torch.bfloat16
    assert next(policy.pipeline.vae.parameters()).dtype == torch.float32
    x = torch.randn(2, *policy.latent_shape)
    velocity = policy.velocity(x, torch.tensor([0.5, 0.9]), policy.text(TEXTS))
    assert velocity.dtype == torch.float32
    velocity.square().mean().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in policy.trainable_parameters())
    assert policy.decode(x).isfinite().all()


def test_gradient_checkpointing_recomputes_with_the_right_adapter(pipeline_folder):
    def gradients(checkpointing):
        policy = SD3Policy(
            pretrained=str(pipeline_folder),
            lora_rank=2,
            max_sequence_length=1,
            gradient_checkpointing=checkpointing,
        )
        policy.load(seed=0)
        with torch.no_grad():
            for p in (*policy.adapters.trained, *policy.adapters.old):
                p.add_(0.1)
        policy.denoiser.train(checkpointing)
        x = torch.ones(1, *policy.latent_shape)
        velocity = policy.velocity(x, torch.tensor([0.5]), policy.text(TEXTS[:1]))
        with torch.no_grad(), policy.using("old"):
            policy.velocity(x, torch.tensor([0.5]), policy.text(TEXTS[:1]))
        velocity.square().mean().backward()
        return [p.grad for p in policy.trainable_parameters() if p.grad is not None]

    for plain_gradient, recomputed in zip(gradients(False), gradients(True), strict=True):
        torch.testing.assert_close(plain_gradient, recomputed)


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"pretrained": "recast_pl://huge"}, r"model\.policy\.init_args\.pretrained.*recast_pl://tiny"),
        ({"pretrained": "./nowhere"}, r"model\.policy\.init_args\.pretrained"),
        ({"lora_rank": 0}, r"model\.policy\.init_args\.lora_rank"),
        ({"max_sequence_length": 600}, r"model\.policy\.init_args\.max_sequence_length"),
    ],
)
def test_wrong_arguments_fail_before_any_weight_is_loaded(wrong, match):
    with pytest.raises(ValueError, match=match):
        SD3Policy(**({"pretrained": "owner/name"} | wrong))


def test_a_folder_that_is_no_model_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"model_index\.json"):
        SD3Policy(pretrained=str(tmp_path))


def test_targets_that_do_not_exist_name_their_key(pipeline_folder):
    policy = SD3Policy(pretrained=str(pipeline_folder), lora_targets=["no_such_layer"], max_sequence_length=1)
    with pytest.raises(ValueError, match=r"model\.policy\.init_args\.lora_targets"):
        policy.load(seed=0)


def test_resolution_must_fit_the_patches(pipeline_folder):
    policy = SD3Policy(pretrained=str(pipeline_folder), resolution=17, max_sequence_length=1)
    with pytest.raises(ValueError, match="multiple of 4"):
        policy.load(seed=0)


def test_offloaded_parts_are_sent_back_to_the_cpu_after_their_work(pipeline_folder, monkeypatch):
    policy = SD3Policy(
        pretrained=str(pipeline_folder), lora_rank=2, max_sequence_length=1,
        offload_text_encoders=True, offload_vae=True,
    )  # fmt: skip
    policy.load(seed=0)
    sent = []
    for part in (*policy.text_encoders, policy.pipeline.vae):
        move = part.to
        monkeypatch.setattr(part, "to", lambda *a, part=part, move=move: (sent.append((part, *a)), move(*a))[1])
    device, cpu = policy.device, "cpu"
    policy.text(["a cat"])
    policy.text(["a cat"])  # from the cache: nothing travels
    encoders = policy.text_encoders
    assert sent == [*((e, device) for e in encoders), *((e, cpu) for e in encoders)]
    del sent[:]
    policy.decode(torch.zeros(1, *policy.latent_shape))
    assert sent == [(policy.pipeline.vae, device), (policy.pipeline.vae, cpu)]
