"""Settings of Lightning's Trainer that this loop cannot honour, refused in words."""

import lightning.pytorch as pl
from torch.optim import Optimizer

PRECISIONS = ("32-true", "bf16-mixed", "16-mixed")
SHORT = ("32", "bf16", "16")  # the same


def check_precision(precision: str) -> None:
    """Refuses to hold trained weights in less than float32, where an update's digits would be lost.

    Args:
        precision: as Lightning's trainer names it.

    Raises:
        ValueError: naming the key and what would do.
    """
    if precision not in (*PRECISIONS, *SHORT):
        raise ValueError(
            f"trainer.precision: trained weights, noises and scores are float32; expected one of "
            f"{', '.join(PRECISIONS)}, got {precision} (frozen ones: model.policy.init_args.weights_dtype)"
        )


def check_whole_epochs(trainer: pl.Trainer, iterations_per_epoch: int) -> None:
    """Refuses to cut epochs short, for their ends are where Lightning evaluates and a resumed run counts from.

    Raises:
        ValueError: naming the key that sets an epoch's length.
    """
    limit = trainer.limit_train_batches  # overfit_batches sets it too
    whole = limit >= iterations_per_epoch if isinstance(limit, int) else limit in (None, 1.0)
    if not whole and not getattr(trainer, "fast_dev_run", False):
        raise ValueError(
            f"trainer.limit_train_batches (or overfit_batches): {limit} would cut epochs short; set their "
            f"length, data.iterations_per_epoch ({iterations_per_epoch}), instead"
        )


def unfused(optimizer: Optimizer, precision: str) -> Optimizer:
    """The optimiser, unless its gradients would be clipped while they are still scaled.

    Raises:
        ValueError: for a fused optimiser under 16-mixed, which takes the loss scale out of gradients by itself.
    """
    if precision == "16-mixed" and getattr(optimizer, "_step_supports_amp_scaling", False):
        raise ValueError(
            "model.optimizer.init_args.fused: a fused optimiser unscales the gradients of 16-mixed in its "
            "step, after they are clipped (model.max_grad_norm); take false, or trainer.precision bf16-mixed"
        )
    return optimizer
