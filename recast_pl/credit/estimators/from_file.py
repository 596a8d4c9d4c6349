"""FromFile: profiles that were measured before, in the released format."""

from pathlib import Path

import torch

from recast_pl.credit import released
from recast_pl.credit.estimators.base import ProfileEstimator, Tilt
from recast_pl.credit.evidence import Evidence, Probe, check_same


class FromFile(ProfileEstimator):
    """Profiles from an NPZ file of density ratios (`recast_pl profile` writes one).

    Args:
        path: of the file; see `recast_pl.credit.released`.
    """

    def __init__(self, *, path: str) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise ValueError(
                f"credit.strategy.init_args.estimator.init_args.path: no file {path}; "
                "`python -m recast_pl profile --config …` writes one"
            )

    def measure(self, probe: Probe, tilt: Tilt) -> Evidence:
        """The file's moments.

        Raises:
            ValueError: for a file of other rewards or noise levels; names both.
        """
        file = released.read(self.path)
        names, levels = probe.experience.scores.names, probe.experience.rollout.levels
        check_same(file, names, levels, what=str(self.path))
        lacking = [name for name in names if name not in file.ratios]
        if lacking:
            raise ValueError(f"{self.path}: no density ratios of {', '.join(lacking)}")
        moments_RK = torch.stack([file.ratios[name].pow(tilt.alpha).mean(0) for name in names])
        return Evidence(
            names=names,
            levels=levels,
            moments_RK=moments_RK,
            errors_RK=torch.zeros_like(moments_RK),
            samples=min(len(ratio) for ratio in file.ratios.values()),
            reward_calls=0,
            seconds=0.0,
        )
