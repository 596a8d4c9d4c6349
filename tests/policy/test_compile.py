"""A compiled denoiser follows adapter switches, updates and sharding as an eager one does."""

import pytest
import torch
from conftest import prompt_batch

from recast_pl.policy import SD3Policy
from recast_pl.policy.full_parameters import FullFineTuning

ROLES = ("default", "old", "reference", "averaged")
BACKENDS = ["eager", pytest.param("inductor", marks=pytest.mark.slow)]


def loaded(folder, *, compile, full=False, checkpointing=False):
    torch._dynamo.reset()
    policy = SD3Policy(
        pretrained=str(folder), lora_rank=4, max_sequence_length=1, compile=compile,
        full_fine_tuning=FullFineTuning() if full else None, gradient_checkpointing=checkpointing,
    )  # fmt: skip
    policy.averaged = True
    policy.load(seed=0)
    return policy


def work(policy):
    """Velocities of all roles and gradients, twice around an update."""
    text = policy.text(prompt_batch(["a cat", "a dog"]).texts)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, *policy.latent_shape, generator=generator)
    t = torch.tensor([0.3, 0.8])
    done = []
    with torch.no_grad():
        for parameter in policy.trainable_parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    for decay in (0.5, 0.9):
        for role in (*ROLES, *ROLES[::-1]):
            with torch.no_grad(), policy.using(role):
                done.append(policy.velocity(x, t, text))
        policy.velocity(x, t, text).square().mean().backward()
        done += [parameter.grad.clone() for parameter in policy.trainable_parameters()]
        with torch.no_grad():
            for parameter in policy.trainable_parameters():
                parameter.sub_(0.1 * parameter.grad)
                parameter.grad = None
        policy.update_old(decay)
        policy.update_average(decay / 2)
    return done


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("full", [False, True], ids=["lora", "full"])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "recomputed"])
def test_a_compiled_policy_does_what_an_eager_one_does(pipeline_folder, backend, full, checkpointing):
    eager = work(loaded(pipeline_folder, compile=None, full=full))
    policy = loaded(pipeline_folder, compile=backend, full=full, checkpointing=checkpointing)
    counted = torch._dynamo.utils.counters
    counted.clear()
    compiled = work(policy)
    assert counted["stats"]["unique_graphs"] > 0  # dynamo did run
    for ours, theirs in zip(compiled, eager, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)
    default, old, reference, averaged = eager[:4]
    assert not torch.equal(default, reference)
    assert torch.equal(old, averaged)  # before the first update
    assert len({velocity.sum().item() for velocity in eager[8 + len(policy.trainable_parameters()) :][:4]}) == 4


def test_an_unknown_backend_is_named(pipeline_folder):
    with pytest.raises(
        ValueError, match=r"model\.policy\.init_args\.compile: expected one of .*inductor.*'nvc'"
    ):
        loaded(pipeline_folder, compile="nvc")


def test_names_of_the_checkpoint_do_not_depend_on_compilation(pipeline_folder):
    names = [set(loaded(pipeline_folder, compile=kind).saved_state()) for kind in (None, "eager")]
    assert names[0] == names[1]
