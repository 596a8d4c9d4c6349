"""The transport projection: from gains and budgets to the reward-by-timestep matrix W."""

from collections.abc import Sequence

import torch
from torch import Tensor

TOLERANCE = 1e-12  # of a row's share, what the solver aims at
ACCEPTED = 1e-9  # what it may end with


class NotConverged(ArithmeticError):
    """No W with these budgets could be computed to `ACCEPTED`."""


def transport_weights(
    gains: Tensor, budgets: Tensor, temperatures: Tensor, *, names: Sequence[str] | None = None
) -> Tensor:
    """The W nearest to the kernel exp(gain / τ) whose rows are the budgets and whose columns are equal.

    Each reward's gains are divided by their mean over steps (a reward without gains counts as even). W is the
    entropic transport plan, W_rk ∝ u_r exp(Δ_rk / τ_r) v_k, with Σ_k W_rk = λ_r / Σλ and Σ_r W_rk = 1 / K.

    Args:
        gains: R × K, at least 0.
        budgets: λ, R, at least 0; a reward of budget 0 is left out and has a row of zeros.
        temperatures: τ, R, above 0; large ones give even rows, small ones sharp ones.
        names: of the rewards, for errors.

    Returns:
        R × K, float64; columns exact to rounding, rows to `TOLERANCE` where floating point allows it.

    Raises:
        ValueError: for values out of range.
        NotConverged: where a row misses its budget by more than `ACCEPTED`; names the reward.

    Solved in the R row potentials f: columns are softmax_r(f_r + Δ_rk/τ_r) / K, so the dual
    Σ_r λ_r f_r − mean_k logsumexp_r(f_r + Δ_rk/τ_r) is concave and smooth. Damped Newton, on a kernel that is
    sharpened in doublings, takes tens of iterations where Sinkhorn's alternation takes thousands.

    Reference: Cuturi, "Sinkhorn distances: Lightspeed computation of optimal transport", 2013; Peyré and
    Cuturi, "Computational optimal transport", 2019, section 4.4 (dual), for the projection.

    >>> transport_weights(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.ones(2), torch.ones(2))
    tensor([[0.4404, 0.0596],
            [0.0596, 0.4404]], dtype=torch.float64)
    """
    gains_RK, budgets_R, temperatures_R = gains.double(), budgets.double(), temperatures.double()
    if not (gains_RK.isfinite().all() and (gains_RK >= 0).all()):
        raise ValueError("gains must be finite and at least 0")
    if not (budgets_R.isfinite().all() and (budgets_R >= 0).all() and budgets_R.sum() > 0):
        raise ValueError(f"budgets must be finite, at least 0 and not all 0, got {budgets_R.tolist()}")
    if not (temperatures_R.isfinite().all() and (temperatures_R > 0).all()):
        raise ValueError(f"temperatures must be finite and above 0, got {temperatures_R.tolist()}")
    used_R = budgets_R > 0
    mean_R1 = gains_RK.mean(1, keepdim=True)
    shape_RK = torch.where(mean_R1 > 0, gains_RK / mean_R1.clamp_min(torch.finfo(torch.float64).tiny), 1.0)
    share_R = (budgets_R / budgets_R.sum())[used_R]
    kernel_RK = (shape_RK / temperatures_R[:, None])[used_R]
    plan = _plan(kernel_RK, share_R)
    miss_R = (plan.sum(1) - share_R).abs()
    if not miss_R.max() <= ACCEPTED:
        worst = int(used_R.nonzero()[miss_R.argmax()])
        name = repr(names[worst]) if names is not None else f"number {worst}"
        raise NotConverged(
            f"the row of reward {name} misses its budget by {miss_R.max():.1e}; its temperature "
            f"{float(temperatures_R[worst]):g} is too small for its gains"
        )
    table_RK = torch.zeros_like(gains_RK)
    table_RK[used_R] = plan
    return table_RK


def _plan(kernel_RK: Tensor, share_R: Tensor) -> Tensor:
    """The plan for a log-kernel, by Newton steps on kernels of doubling sharpness."""
    log_share_R = share_R.log()
    spread = float((kernel_RK - kernel_RK.mean(1, keepdim=True)).abs().max())
    sharpness = min(1.0, 2.0 / spread) if spread > 0 else 1.0
    offset_R = torch.zeros_like(share_R)
    while True:
        kernel = kernel_RK * sharpness
        f_R = _ascend(kernel, share_R, log_share_R + offset_R)
        if sharpness == 1.0:
            return _columns(kernel, f_R)
        following = min(1.0, 2 * sharpness)
        offset_R = (f_R - log_share_R) * (following / sharpness)
        sharpness = following


def _columns(kernel_RK: Tensor, f_R: Tensor) -> Tensor:
    return torch.softmax(f_R[:, None] + kernel_RK, dim=0) / kernel_RK.shape[1]


def _ascend(kernel_RK: Tensor, share_R: Tensor, f_R: Tensor, *, iterations: int = 200) -> Tensor:
    """Row potentials that maximise the dual, as far as floating point goes."""

    def dual(f: Tensor) -> float:
        return float(share_R @ f - torch.logsumexp(f[:, None] + kernel_RK, dim=0).mean())

    damping, value = 1e-12, dual(f_R)
    for _ in range(iterations):
        P_RK = _columns(kernel_RK, f_R)
        gradient_R = share_R - P_RK.sum(1)
        if gradient_R.abs().max() <= TOLERANCE:
            break
        rounding = 1e-15 * (1 + float(kernel_RK.abs().max()) + float(f_R.abs().max()))
        curvature = torch.diag(P_RK.sum(1)) - P_RK @ P_RK.T * P_RK.shape[1]
        while damping < 1e6:
            damped = curvature + damping * torch.eye(len(share_R), dtype=torch.float64)
            step_R = torch.linalg.solve(damped, gradient_R)
            step_R = step_R - step_R.mean()  # a common constant changes nothing
            tried = dual(f_R + step_R)
            nearer = _miss(kernel_RK, share_R, f_R + step_R) < float(gradient_R.abs().max())
            # near the top the dual is flat to rounding, and only the rows tell a better point
            if tried > value + rounding or (nearer and tried > value - rounding):
                f_R, value, damping = f_R + step_R, tried, max(damping / 100, 1e-15)
                break
            damping = damping * 10
        else:
            break
    return f_R


def _miss(kernel_RK: Tensor, share_R: Tensor, f_R: Tensor) -> float:
    """How far the worst row is from its share."""
    return float((share_R - _columns(kernel_RK, f_R).sum(1)).abs().max())
