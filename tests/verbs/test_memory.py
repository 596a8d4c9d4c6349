"""The verb `memory` against what loaded policies take: saved tensors, the allocator's record, states."""

import shutil
from dataclasses import replace

import pytest
import torch
from command_line import run
from torch.profiler import ProfilerActivity, profile

from recast_pl.module import ReCASTModule
from recast_pl.objectives import DiffusionNFT
from recast_pl.policy import SD3Policy
from recast_pl.rollout import ODERollout
from recast_pl.types import NoisedSamples, TextEmbeddings
from recast_pl.verbs.memory import Hardware, memory_table, update_memory
from recast_pl.verbs.memory.sketch import LiveMemory, Sketch, module_bytes, stored_bytes

RANK = {"lora_rank": 4, "max_sequence_length": 1}


def module_with(policy):
    """A module that only knows its policy, rollout and objective, which is all that an update needs."""
    module = ReCASTModule.__new__(ReCASTModule)
    torch.nn.Module.__init__(module)
    module.policy, module.rollout, module.objective = policy, ODERollout(), DiffusionNFT()
    return module


def real_loss(policy, count):
    """The loss of `count` real pairs."""
    samples = NoisedSamples(
        x0_NCHW=torch.randn(count, *policy.latent_shape),
        noise_NCHW=torch.randn(count, *policy.latent_shape),
        t_N=torch.rand(count),
        advantage_N=torch.randn(count),
    )
    encoded = policy.text([""])
    text = TextEmbeddings(
        sequence_BLD=encoded["sequence_BLD"].repeat(count, 1, 1), pooled_BD=encoded.pooled_BD.repeat(count, 1)
    )
    module = module_with(policy)
    return module.objective.loss(
        module.objective.predict(module.policy, module.rollout, samples, text), samples
    ).total


def saved_by_autograd(policy, count):
    """Bytes of the different storages, weights aside, that the loss keeps for its backward pass."""
    weights = {p.untyped_storage()._cdata for p in (*policy.parameters(), *policy.buffers())}
    saved = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            saved[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = real_loss(policy, count)
    total = sum(storage.nbytes() for storage in saved.values())
    del loss
    return total


def allocators_peak(work):
    """The most that PyTorch's CPU allocator had handed out at a time, by its own record."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        work()
    live = peak = 0
    for event in record.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def pair(request, pipeline_folder):
    """The miniature pipeline, loaded, and its sketch."""
    arguments = {"pretrained": str(pipeline_folder), **RANK, "weights_dtype": request.param}
    real = SD3Policy(**arguments)
    real.load(seed=0)
    for parameter in real.trainable_parameters():
        parameter.grad = torch.zeros_like(parameter)
    real_loss(real, 1)  # the text is cached from here on
    return real, Sketch(SD3Policy(**arguments))


@pytest.mark.parametrize(
    ("count", "checkpointing"),
    [(2, True), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((2, False), (6, False), (6, True)))],
)
def test_an_update_takes_what_it_really_takes(pair, count, checkpointing):
    real, sketch = pair
    switch = "enable" if checkpointing else "disable"
    getattr(real.denoiser, f"{switch}_gradient_checkpointing")()
    counted = update_memory(module_with(sketch.policy), sketch, count, checkpointing=checkpointing)
    # beside what autograd saves, x0, noise and three velocities wait
    latents = 5 * count * torch.Size(real.latent_shape).numel() * 4
    assert counted.kept == pytest.approx(saved_by_autograd(real, count) + latents, rel=0.02)
    # bfloat16 kernels of a CPU take buffers of their own: those with AMX more, 18 % of so small an update
    assert counted.peak == pytest.approx(
        allocators_peak(lambda: real_loss(real, count).backward()),
        rel=0.25 if real.weights_dtype == torch.bfloat16 else 0.1,
    )


@pytest.mark.parametrize("pair", ["float32"], indirect=True)
def test_checkpointing_saves_memory_and_a_larger_batch_takes_it(pair):
    module, sketch = module_with(pair[1].policy), pair[1]
    plain, recomputed = (update_memory(module, sketch, 4, checkpointing=c) for c in (False, True))
    assert recomputed.kept < plain.kept / 5
    assert recomputed.peak < 0.8 * plain.peak  # one of two blocks at a time
    assert update_memory(module, sketch, 8, checkpointing=False).peak == pytest.approx(2 * plain.peak, rel=0.01)


def test_rollout_and_decoding_take_what_they_really_take(pair):
    real, sketch = pair
    x, t, text = torch.randn(4, *real.latent_shape), torch.rand(4), real.text(["", "a", "b", "c"])

    def step():
        with torch.no_grad(), real.using("old"):
            real.velocity(x, t, text)

    assert sketch.rollout_peak(4) == pytest.approx(
        allocators_peak(step), rel=0.15 if real.weights_dtype == torch.bfloat16 else 0.03
    )
    assert sketch.decode_peak(4) == pytest.approx(
        allocators_peak(lambda: real.decode(x)), rel=0.15 if real.weights_dtype == torch.bfloat16 else 0.03
    )


def test_weights_and_shapes_are_exactly_the_loaded_ones(pair):
    real, sketch = pair
    drawn = sketch.policy
    assert module_bytes(drawn.denoiser) == module_bytes(real.denoiser)
    assert module_bytes(drawn.pipeline.vae) == module_bytes(real.pipeline.vae)
    sizes = [[module_bytes(encoder) for encoder in policy.text_encoders] for policy in (drawn, real)]
    assert sizes[0] == sizes[1]
    for which in ("trained", "old"):
        a, b = (stored_bytes(getattr(policy.adapters, which)) for policy in (drawn, real))
        assert a == b > 0
    assert drawn.latent_shape == real.latent_shape
    expected = real.text(["a red circle"])
    with sketch.running():
        text = sketch.text(1)
        for name in ("sequence_BLD", "pooled_BD"):
            ours, theirs = text[name], expected[name]
            assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)


def test_mixed_precision_shrinks_activations_and_a_gpu_norms_in_float32(pipeline_folder):
    counted = []
    for autocast, gpu in ((None, False), (torch.bfloat16, False), (torch.bfloat16, True)):
        policy = SD3Policy(pretrained=str(pipeline_folder), **RANK)
        sketch = Sketch(policy, autocast=autocast, gpu=gpu)
        counted.append(update_memory(module_with(policy), sketch, 512, checkpointing=False).kept)
    full, mixed, on_gpu = counted
    assert mixed < 0.85 * full
    assert mixed < on_gpu < full


def test_live_memory_by_hand():
    there = torch.zeros(100)
    with LiveMemory() as memory:
        a = there + 1  # 400
        view = a.view(10, 10)  # nothing
        there.mul_(2)  # nothing
        b = torch.zeros(50)  # 200
        del a
        assert memory.live == 600  # the view keeps it
        del view
        assert memory.live == 200
        c = torch.cat([b, b])  # 400
    assert (memory.live, memory.peak) == (600, 600)
    del c


@pytest.mark.parametrize(
    ("trainer", "processes"),
    [
        ({"devices": 8, "num_nodes": 2}, 16),
        ({"devices": "4", "num_nodes": 1}, 4),
        ({"devices": [0, 3], "num_nodes": 1}, 2),
        ({"devices": "auto", "num_nodes": 1}, None),
        ({"devices": -1, "num_nodes": 1}, None),
        ({"devices": "-1", "num_nodes": 1}, None),
    ],
)
def test_processes_that_a_trainer_block_plans(trainer, processes):
    assert Hardware.planned(trainer).processes == processes


# ---------------------------------------------------------------- the command line


@pytest.fixture(scope="module")
def reported(overlay, tmp_path_factory, pipeline_folder):
    """The verb on a folder that holds no weights, for GPUs that are not here, and the budget it returned."""
    folder = tmp_path_factory.mktemp("memory") / "pipeline"
    shutil.copytree(pipeline_folder, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    budgets = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("recast_pl.cli.trainer.memory_table", lambda b: budgets.append(b) or "")
        run("memory", overlay, folder.parent, "--model.policy.init_args.pretrained", str(folder),
            "--trainer.accelerator", "gpu", "--trainer.devices", "3", "--trainer.precision", "16-mixed",
            "--model.policy.init_args.offload_text_encoders", "true",
            "--model.policy.init_args.offload_vae", "true",
            "--model.micro_batch_size", "2")  # fmt: skip
    return budgets[0], folder.parent


def test_the_verb_reads_no_weight_and_needs_no_gpu(reported):
    budget, folder = reported
    assert (budget.hardware.gpu, budget.hardware.precision, budget.geometry.processes) == (True, "16-mixed", 3)
    assert [path.name for path in folder.iterdir()] == ["pipeline"]  # and it leaves no run behind


def test_the_verb_counts_the_share_of_one_device(reported):
    budget, _ = reported
    # 2 groups × 3 samples over 3 processes; 2 steps of each; latents 4 × 8 × 8, pictures 3 × 16 × 16, float32
    assert (budget.geometry.samples, budget.geometry.pairs, budget.geometry.update_batch) == (2, 4, 2)
    assert budget.stored.latents == 2 * 4 * 8 * 8 * 4
    assert budget.stored.pictures == 2 * 3 * 16 * 16 * 4
    assert budget.stored.text == 2 * ((16 + 1) * 32 + 32) * 4
    assert budget.fixed.gradients == 2 * budget.fixed.trained * 4  # and as much in DDP's buckets
    assert budget.fixed.adapters == 2 * budget.fixed.trained * 4
    # 15 layers of width 32, rank 2
    assert budget.fixed.trained == 15 * 2 * (32 + 32)
    # AdamW: two moments, and a step count for each of 30 tensors
    assert budget.fixed.optimizer == 2 * budget.fixed.trained * 4 + 30 * 4
    # half-precision copies of the weights do not grow with the batch
    assert budget.passing.update.peak < budget.doubled.update.peak < 2 * budget.passing.update.peak


def test_offloaded_encoders_stand_only_while_text_is_encoded(reported):
    budget, _ = reported
    assert budget.moments["text"] - budget.fixed.standing == budget.fixed.text_encoders > 0
    fixed, stored = budget.fixed, budget.stored
    parts = fixed.denoiser + fixed.adapters + fixed.optimizer
    assert budget.fixed.standing == parts
    assert budget.moments["update"] == (
        parts
        + (stored.latents + stored.pictures + stored.text)
        + (fixed.gradients + budget.passing.update.peak)
    )
    assert budget.peak == max(budget.moments.values())


def test_an_offloaded_vae_stands_only_while_pictures_are_decoded(reported):
    budget, _ = reported
    standing = replace(budget, fixed=replace(budget.fixed, offload_vae=False))
    vae = budget.fixed.vae
    assert vae > 0
    for moment, size in budget.moments.items():
        assert standing.moments[moment] - size == (0 if moment == "decode" else vae)
    assert f"{vae / 2**20:.3f} MiB visit to decode" in memory_table(budget)


def test_the_table_says_what_was_counted(reported):
    budget, _ = reported
    table = memory_table(budget)
    (line,) = [line for line in table.splitlines() if "frozen denoiser" in line]
    assert float(line.split()[2]) == pytest.approx(budget.fixed.denoiser / 2**20, abs=1e-3)
    (line,) = [line for line in table.splitlines() if line.startswith("  peak")]
    assert float(line.split()[1]) == pytest.approx(budget.peak / 2**20, abs=1e-3)
    growth = (budget.doubled.update.peak - budget.passing.update.peak) / 2**20
    assert f"Doubling model.micro_batch_size: update +{growth:.3f} MiB" in table
    assert "all 2 samples are in one already" in table


def test_the_verb_on_the_embedded_pipeline(tmp_path, overlay, caplog):
    with caplog.at_level("INFO"):
        run("memory", overlay, tmp_path, "--model.policy.init_args.pretrained", "recast_pl://tiny",
            "--trainer.devices", "auto", "--processes", "2")  # fmt: skip
    assert "Memory of each device: 2 processes, precision 32-true, 64 × 64 pixels, 3 samples" in caplog.text


def test_samples_that_processes_cannot_share_are_refused(overlay, tmp_path):
    with pytest.raises(ValueError, match="cannot be shared evenly by 4 processes"):
        run("memory", overlay, tmp_path, "--trainer.devices", "4")
    with pytest.raises(ValueError, match="processes: expected 1 or more, got 0"):
        run("memory", overlay, tmp_path, "--processes", "0")
