"""The budget in words and numbers."""

from recast_pl.verbs.memory.budget import Budget, Fixed, Update


def memory_table(budget: Budget) -> str:
    """The budget in words and numbers."""
    unit = 2**30 if budget.peak >= 2**30 else 2**20
    g, hardware, moments = budget.geometry, budget.hardware, budget.moments
    height, width = budget.resolution
    lines = [
        f"\nMemory of each device: {g.processes} process{'es' if g.processes > 1 else ''}, precision "
        f"{hardware.precision}, {height} × {width} pixels, {g.samples} samples an iteration on each",
        *_constant_lines(budget, unit),
        *_passing_lines(budget, unit),
        "Totals",
        *(_line(f"while in: {moment}", size, unit) for moment, size in moments.items()),
        _line("peak", budget.peak, unit, f"while in: {max(moments, key=lambda moment: moments[moment])}"),
        *_doublings(budget, unit),
        "Not counted: reward networks, a GPU's context, kernels' workspaces, and what the allocator wastes.",
    ]
    if hardware.processes is None:
        lines.append("trainer.devices leaves the number of processes open: counted for 1; say --processes N.")
    if hardware.shards:
        lines.append("The strategy may share weights out: here every device has all of them.")
    return "\n".join(lines)


def _size(size: int, unit: int) -> str:
    return f"{size / unit:.3f} {'GiB' if unit == 2**30 else 'MiB'}"


def _line(what: str, size: int, unit: int, note: str = "") -> str:
    return f"  {what:50} {_size(size, unit):>14}  {note}".rstrip()


def _constant_lines(budget: Budget, unit: int) -> list[str]:
    fixed, stored = budget.fixed, budget.stored
    encoders = (
        f"{_size(fixed.text_encoders, unit)} visit for new prompts"
        if fixed.offload
        else "none of it with offload_text_encoders, but while new prompts are encoded"
    )
    vae = (
        f"{_size(fixed.vae, unit)} visit to decode"
        if fixed.offload_vae
        else "none of it with offload_vae, but while pictures are decoded"
    )
    return [
        "Stands through the run",
        _line("frozen denoiser", fixed.denoiser, unit, f"{fixed.parameters / 1e6:,.1f} M parameters"),
        _line(_trained_name(fixed), fixed.adapters, unit, f"{fixed.trained / 1e6:,.2f} M parameters each"),
        _line("optimiser state", fixed.optimizer, unit),
        _line("text encoders", 0 if fixed.offload else fixed.text_encoders, unit, encoders),
        _line("VAE", 0 if fixed.offload_vae else fixed.vae, unit, vae),
        "Stored rollout",
        _line("latents", stored.latents, unit),
        *([_line("trajectories", stored.trajectories, unit)] if stored.trajectories else []),
        _line("pictures", stored.pictures, unit),
        _line("text embeddings", stored.text, unit),
    ]


def _trained_name(fixed: Fixed) -> str:
    if fixed.waiting:
        return "trained weights, copies on the CPU"
    copies = ["trained", "old", *["averaged"] * fixed.averaged, *["reference"] * fixed.full]
    return f"{'weights' if fixed.full else 'adapters'}, {', '.join(copies[:-1])} and {copies[-1]}"


def _passing_lines(budget: Budget, unit: int) -> list[str]:
    g, passing = budget.geometry, budget.passing

    def update(checkpointing: bool, counted: Update, note: str) -> str:
        way = "with" if checkpointing else "without"
        kept = f"{_size(counted.kept, unit)} wait for the backward pass{note}"
        what = f"update of {g.update_batch} pairs, {way} gradient checkpointing"
        return _line(what, counted.peak, unit, kept)

    return [
        "For a time",
        _line(f"rollout step of {g.rollout_batch} samples", passing.rollout, unit),
        _line(f"VAE decoding {g.rollout_batch} pictures", passing.decode, unit),
        _line("optimiser step", budget.fixed.step, unit),
        _line("gradients", budget.fixed.gradients, unit, "with DDP's buckets" if g.processes > 1 else ""),
        update(budget.checkpointing, passing.update, ""),
        update(not budget.checkpointing, budget.other_update, "; not configured"),
    ]


def _doublings(budget: Budget, unit: int) -> list[str]:
    g, now, doubled = budget.geometry, budget.passing, budget.doubled
    update = f"update +{_size(doubled.update.peak - now.update.peak, unit)}"
    if g.update_batch == g.pairs:
        update = f"nothing, all {g.pairs} pairs of an optimiser step are in one already"
    rollout = (
        f"rollout step +{_size(doubled.rollout - now.rollout, unit)}, "
        f"VAE decoding +{_size(doubled.decode - now.decode, unit)}"
    )
    if g.rollout_batch == g.samples:
        rollout = f"nothing, all {g.samples} samples are in one already"
    return [
        f"Doubling model.micro_batch_size: {update}.",
        f"Doubling model.rollout.init_args.micro_batch_size: {rollout}.",
    ]
