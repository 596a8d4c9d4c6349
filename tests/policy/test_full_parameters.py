"""Full fine-tuning: three sets of the denoiser's own weights, plain, under autocast and sharded."""

import copy

import pytest
import torch
import torch.distributed as dist
import yaml
from command_line import CONFIGS, run
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, init_device_mesh

from recast_pl.policy import FullFineTuning, SD3Policy
from recast_pl.policy.full_parameters import trained_names

TEXTS = ["a red circle on a white background", "two blue squares on a black background"]
ROLES = ("default", "old", "reference")
FULL = str(CONFIGS / "policy" / "full.yaml")


def loaded(folder, *, disturb=True, **arguments):
    """A policy whose trained and old weights differ from the reference and from each other."""
    full = FullFineTuning(**{k: arguments.pop(k) for k in ("modules", "keep_copies") if k in arguments})
    policy = SD3Policy(pretrained=str(folder), max_sequence_length=1, full_fine_tuning=full, **arguments)
    policy.load(seed=0)
    if disturb:
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for tensor in (*policy.adapters.trained, *policy.adapters.old):
                tensor.add_(0.05 * torch.randn(tensor.shape, generator=generator))
    return policy


@pytest.fixture(params=["device", "cpu"])
def policy(request, pipeline_folder):
    return loaded(pipeline_folder, keep_copies=request.param)


def inputs(policy):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, *policy.latent_shape, generator=generator)
    return x, torch.tensor([0.9, 0.35]), policy.text(TEXTS)


def by_role(policy):
    """Velocities of all roles, without a graph."""
    found = {}
    for role in ROLES:
        with torch.no_grad(), policy.using(role):
            found[role] = policy.velocity(*inputs(policy))
    return found


def expected(policy):
    """The same by denoisers of their own, each with one set of weights loaded into it."""
    found, (x, t, text) = {}, inputs(policy)
    state = policy.saved_state()
    for role in ROLES:
        denoiser = copy.deepcopy(policy.denoiser)
        given = {name.removeprefix(f"{role}."): value for name, value in state.items() if name.startswith(role)}
        if role == "reference":
            given = dict(zip(policy.adapters._names, policy.adapters.reference, strict=True))
        denoiser.load_state_dict(given, strict=False)
        with torch.no_grad():
            found[role] = denoiser(
                hidden_states=x,
                timestep=t * 1000,
                encoder_hidden_states=text["sequence_BLD"],
                pooled_projections=text.pooled_BD,
                return_dict=False,
            )[0]
    return found


def test_three_roles_are_three_models(policy, pipeline_folder):
    from diffusers import SD3Transformer2DModel

    ours, theirs = by_role(policy), expected(policy)
    for role in ROLES:
        torch.testing.assert_close(ours[role], theirs[role], atol=1e-6, rtol=0)
    base = SD3Transformer2DModel.from_pretrained(pipeline_folder / "transformer")
    x, t, text = inputs(policy)
    with torch.no_grad():
        plain = base(x, text["sequence_BLD"], text.pooled_BD, t * 1000, return_dict=False)[0]
    torch.testing.assert_close(ours["reference"], plain, atol=1e-6, rtol=0)
    for one, other in (("default", "old"), ("default", "reference"), ("old", "reference")):
        assert (ours[one] - ours[other]).abs().max() > 1e-3


def test_exactly_the_trained_weights_require_a_gradient_always(policy):
    trained = {id(p) for p in policy.trainable_parameters()}
    assert trained == {id(p) for p in policy.parameters()}
    for role in (*ROLES, "old"):
        with policy.using(role):
            assert all(p.requires_grad for p in policy.trainable_parameters())
            others = [t for t in policy.denoiser.parameters() if id(t) not in trained]
            assert len(others) == (0 if role == "default" else len(trained))
            assert not any(t.requires_grad for t in others)
        assert {id(p) for p in policy.parameters() if p.requires_grad} == trained


def test_an_exception_leaves_the_default_in_use(policy):
    before = by_role(policy)
    with pytest.raises(RuntimeError, match="boom"), policy.using("old"), policy.using("reference"):
        raise RuntimeError("boom")
    after = by_role(policy)
    assert all(torch.equal(before[role], after[role]) for role in ROLES)
    with pytest.raises(ValueError, match="role 'oldest'"), policy.using("oldest"):
        pass


def test_roles_nest(policy):
    alone = by_role(policy)
    with torch.no_grad(), policy.using("old"):
        for inner in ("reference", "default"):
            with policy.using(inner):
                assert torch.equal(policy.velocity(*inputs(policy)), alone[inner])
            assert torch.equal(policy.velocity(*inputs(policy)), alone["old"])
    with torch.no_grad():
        assert torch.equal(policy.velocity(*inputs(policy)), alone["default"])


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_graph_survives_other_roles_before_its_backward_pass(policy, checkpointing):
    """Gradients by finite differences of the loss of a denoiser of its own."""
    x, t, text = inputs(policy)
    if checkpointing:
        policy.denoiser.enable_gradient_checkpointing()
    loss = policy.velocity(x, t, text).square().mean()
    by_role(policy)
    with policy.using("old"):
        policy.velocity(x, t, text).sum()  # a forward pass that nobody differentiates, with gradients on
    loss.backward()
    assert {id(p) for p in policy.parameters() if p.grad is not None} <= {
        id(p) for p in policy.trainable_parameters()
    }
    double = copy.deepcopy(policy.denoiser).double()
    double.disable_gradient_checkpointing()
    weight = double.transformer_blocks[0].attn.to_q.weight
    direction = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)).double()

    def loss_at(step):
        with torch.no_grad():
            weight.add_(step * direction)
            velocity = double(x.double(), text["sequence_BLD"].double(), text.pooled_BD.double(), t * 1000)[0]
            weight.sub_(step * direction)
        return velocity.square().mean()

    slope = (loss_at(1e-4) - loss_at(-1e-4)) / 2e-4
    ours = policy.denoiser.transformer_blocks[0].attn.to_q.weight.grad.double()
    torch.testing.assert_close((ours * direction).sum(), slope, rtol=1e-3, atol=1e-8)


def test_old_follows_exactly_and_shares_no_storage(policy):
    trained, before = policy.trainable_parameters(), [old.clone() for old in policy.adapters.old]
    reference = [tensor.clone() for tensor in policy.adapters.reference]
    difference = sum((a - b).square().sum() for a, b in zip(trained, before, strict=True)).sqrt()
    torch.testing.assert_close(policy.distance_to_old(), difference.detach())
    policy.update_old(0.25)
    for old, start, new in zip(policy.adapters.old, before, trained, strict=True):
        torch.testing.assert_close(old, 0.25 * start + 0.75 * new)
    policy.update_old(0.0)
    assert policy.distance_to_old() == 0
    assert all(torch.equal(a, b) for a, b in zip(reference, policy.adapters.reference, strict=True))
    groups = (trained, policy.adapters.old, policy.adapters.reference)
    assert len({tensor.data_ptr() for group in groups for tensor in group}) == 3 * len(trained)


def test_a_saved_state_goes_round_and_a_foreign_one_is_refused(policy, pipeline_folder):
    state = policy.saved_state()
    fresh = loaded(pipeline_folder, disturb=False)
    fresh.load_saved_state(state)
    assert by_role(fresh).keys() == by_role(policy).keys()
    for role in ROLES:
        assert torch.equal(by_role(fresh)[role], by_role(policy)[role])
    lora = SD3Policy(pretrained=str(pipeline_folder), lora_rank=2, max_sequence_length=1)
    lora.load(seed=0)
    with pytest.raises(ValueError, match=r"full_fine_tuning.*lacks.*holds"):
        fresh.load_saved_state(lora.saved_state())
    with pytest.raises(ValueError, match=r"has shape \(3,\)"):
        fresh.load_saved_state(dict.fromkeys(state, torch.zeros(3)))


def test_a_part_of_the_weights(pipeline_folder):
    policy = loaded(pipeline_folder, modules=["attn", "proj_out"], weights_dtype="bfloat16")
    names = {name for name, p in policy.denoiser.named_parameters() if p.requires_grad}
    every = [name for name, _ in policy.denoiser.named_parameters()]
    assert names == {name for name in every if ".attn." in name or name.startswith("proj_out")}
    kinds = {p.requires_grad: p.dtype for p in policy.denoiser.parameters()}
    assert kinds == {True: torch.float32, False: torch.bfloat16}
    velocity = policy.velocity(*inputs(policy))  # without a trainer's autocast
    velocity.square().mean().backward()
    assert velocity.isfinite().all()
    assert {n for n, p in policy.denoiser.named_parameters() if p.grad is not None} <= names
    found = by_role(policy)
    assert (found["default"] - found["old"]).abs().max() > 1e-3


def test_names_that_fit_nothing_are_refused(pipeline_folder):
    with pytest.raises(ValueError, match=r"full_fine_tuning\.modules: no weights .* 'attention'"):
        loaded(pipeline_folder, modules=["attn", "attention"])
    with pytest.raises(ValueError, match=r"full_fine_tuning\.modules: expected at least one"):
        FullFineTuning(modules=[])


def test_patterns_mean_ends_of_paths(pipeline_folder):
    denoiser = loaded(pipeline_folder, disturb=False).denoiser
    in_block = [name for name, _ in denoiser.named_parameters() if name.startswith("transformer_blocks.1.")]
    assert trained_names(denoiser, ["transformer_blocks.1"]) == in_block
    assert trained_names(denoiser, ["attn.to_[qk]"]) == [
        f"transformer_blocks.{block}.attn.to_{letter}.{kind}"
        for block in (0, 1)
        for letter in "qk"
        for kind in ("weight", "bias")
    ]


def test_autocast_keeps_no_role_for_another(policy):
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        fresh = by_role(policy)
    with torch.autocast("cpu", torch.bfloat16):
        for order in (ROLES, ROLES[::-1]):
            for role in order:
                with torch.set_grad_enabled(role == "default"), policy.using(role):
                    assert torch.equal(policy.velocity(*inputs(policy)).detach(), fresh[role])
    assert not torch.equal(fresh["default"], fresh["old"])


# ---------------------------------------------------------------- sharded


@pytest.fixture
def group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def shard(policy):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy.shard(lambda module: fully_shard(module, mesh=mesh))
    return policy


def saved(policy):
    """What the first process would write, on every process."""
    states = [policy.saved_state()]
    dist.broadcast_object_list(states, src=0)
    return states[0]


def sharded_like_whole(policy, whole):
    """Roles, updates, gradients and states of a sharded policy against one that is not."""
    adapters = policy.adapters
    for tensor in (*policy.trainable_parameters(), *adapters.old, *adapters.reference):
        assert isinstance(tensor, DTensor)
    assert all(p.requires_grad for p in policy.trainable_parameters())
    for _ in range(2):  # also after a forward pass has left gathered weights behind
        ours, theirs = by_role(policy), by_role(whole)
        for role in ROLES:
            torch.testing.assert_close(ours[role], theirs[role], atol=1e-6, rtol=0)
    losses = []
    for each in (policy, whole):
        loss = each.velocity(*inputs(each)).square().mean()
        by_role(each)
        loss.backward()
        losses.append(loss.detach())
        with torch.no_grad():
            for parameter in each.trainable_parameters():
                parameter.sub_(0.1 * parameter.grad)
        each.update_old(0.5)
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(policy.distance_to_old(), whole.distance_to_old())
    ours, theirs = saved(policy), saved(whole)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], atol=1e-6, rtol=1e-5)
    policy.load_saved_state(theirs)
    policy.load_saved_state(saved(policy))
    for role, velocity in by_role(policy).items():
        torch.testing.assert_close(velocity, by_role(whole)[role], atol=1e-6, rtol=0)


@pytest.mark.parametrize("keep_copies", ["device", "cpu"])
def test_sharded_weights_are_as_whole_ones(pipeline_folder, group, keep_copies):
    sharded_like_whole(shard(loaded(pipeline_folder, keep_copies=keep_copies)), loaded(pipeline_folder))


def test_sharded_weights_under_autocast(pipeline_folder, group):
    test_autocast_keeps_no_role_for_another(shard(loaded(pipeline_folder)))


def test_sharded_other_roles_have_no_gradient(pipeline_folder, group):
    policy = shard(loaded(pipeline_folder))
    with policy.using("old"):
        assert not policy.velocity(*inputs(policy)).requires_grad
    assert policy.velocity(*inputs(policy)).requires_grad


def _one_of_two(rank, store, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    sharded_like_whole(shard(loaded(folder)), loaded(folder))
    dist.destroy_process_group()


@pytest.mark.slow
def test_weights_sharded_over_two_processes(pipeline_folder, tmp_path):
    torch.multiprocessing.spawn(_one_of_two, (str(tmp_path / "store"), str(pipeline_folder)), nprocs=2)


# ---------------------------------------------------------------- the command line


@pytest.fixture(scope="module")
def fitted(overlay, tmp_path_factory):
    """Two epochs, with a rate at which two iterations are seen."""
    folder = tmp_path_factory.mktemp("full")
    return fit(overlay, folder), folder


def fit(overlay, folder, *extra):
    return run("fit", overlay, folder, "--config", FULL, "--model.optimizer.init_args.lr", "1.0e-3", *extra)


def test_fit_moves_the_weights_and_the_old_ones_follow(fitted):
    policy = fitted[0].model.policy
    assert fitted[0].model.iteration == 4
    pairs = list(zip(policy.trainable_parameters(), policy.adapters.reference, strict=True))
    moved = [not torch.equal(trained, reference) for trained, reference in pairs]
    assert len(moved) == len(list(policy.denoiser.parameters()))
    assert sum(moved) > 0.9 * len(moved)
    assert policy.distance_to_old() > 0


def test_a_checkpoint_holds_trained_and_old_weights_alone(fitted):
    (path,) = fitted[1].rglob("*.ckpt")
    state = torch.load(path, weights_only=True)["state_dict"]
    names = [name for name, _ in fitted[0].model.policy.denoiser.named_parameters()]
    assert set(state) == {f"{role}.{name}" for role in ("default", "old") for name in names}


def test_two_epochs_are_one_and_one_bit_for_bit(fitted, overlay, tmp_path):
    fit(overlay, tmp_path, "--trainer.max_epochs", "1")
    (checkpoint,) = tmp_path.rglob("*.ckpt")
    resumed = fit(overlay, tmp_path / "more", "--ckpt_path", str(checkpoint))
    assert resumed.model.iteration == 4
    first, second = fitted[0].model.policy.saved_state(), resumed.model.policy.saved_state()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_copies_on_the_cpu_train_alike(fitted, overlay, tmp_path):
    keep = "--model.policy.init_args.full_fine_tuning.keep_copies"
    other = fit(overlay, tmp_path, keep, "cpu", "--model.policy.init_args.gradient_checkpointing", "true")
    first, second = fitted[0].model.policy.saved_state(), other.model.policy.saved_state()
    assert other.model.policy.adapters.keep_copies == "cpu"
    for name in first:
        torch.testing.assert_close(first[name], second[name], atol=1e-5, rtol=1e-4)


def test_the_overlay_is_the_quickstart_but_for_what_it_names():
    content = yaml.safe_load((CONFIGS / "policy" / "full.yaml").read_text())
    assert set(content["model"]) == {"policy", "optimizer"}
    assert set(content["model"]["policy"]["init_args"]) == {"full_fine_tuning"}
