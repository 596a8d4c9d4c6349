"""FromFile: profiles that were measured before, in the released format."""

from collections.abc import Sequence
from pathlib import Path

import torch

from recast_pl.credit import npz
from recast_pl.credit.estimators.base import ProfileEstimator, Tilt
from recast_pl.credit.evidence import Evidence, check_levels, check_steps
from recast_pl.credit.probe import Probe


class FromFile(ProfileEstimator):
    """Profiles from an NPZ file of density ratios (`recast_pl profile` writes one); it may hold more rewards.

    A file of `profile` holds its evidence with errors, which gives the W that `profile` gave. Of any other file
    the density ratios are taken at their word, as the released code does.

    Args:
        path: of the file; see `recast_pl.credit.npz`.
    """

    repeats = True

    def __init__(self, *, path: str) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise ValueError(
                f"credit.strategy.init_args.estimator.init_args.path: no file {path}; "
                "`python -m recast_pl profile --config …` writes one"
            )
        self.file = npz.read(self.path)

    def check(self, tilt: Tilt) -> None:
        """Refuses evidence of another divergence; names both."""
        measured = self.file.measured
        for key in () if measured is None else npz.TILT:
            there, wanted = getattr(measured, key), getattr(tilt, key)
            if there != wanted:
                raise ValueError(
                    f"credit.strategy.init_args.{key}: the evidence in {self.path} is of {key} {there}, this "
                    f"run's is {wanted}"
                )

    def check_run(self, names: Sequence[str], steps: int) -> None:
        """Refuses rewards that the file lacks, and another number of steps; names both."""
        check_steps(self.file, steps, what=str(self.path))
        known = self.file.measured.evidence.names if self.file.measured is not None else tuple(self.file.ratios)
        if lacking := [name for name in names if name not in known]:
            raise ValueError(
                f"credit.strategy.init_args.estimator.init_args.path: {self.path} holds no profiles of "
                f"{', '.join(lacking)}, only of {', '.join(known)}"
            )

    def measure(self, probe: Probe, tilt: Tilt) -> Evidence:
        """What the file holds.

        Raises:
            ValueError: for a file of other rewards or noise levels; names both.
        """
        file, names, levels = self.file, probe.experience.scores.names, probe.levels
        self.check_run(names, len(levels) - 1)
        check_levels(file, levels, what=str(self.path))
        if file.measured is not None:
            return file.measured.evidence.about(names)
        moments_RK = torch.stack([file.ratios[name].pow(tilt.alpha).mean(0) for name in names])
        count = torch.tensor([[float(len(file.ratios[name]))] for name in names], dtype=torch.float64)
        return Evidence(
            names=names,
            levels=levels,
            moments_RK=moments_RK,
            errors_RK=torch.zeros_like(moments_RK),
            samples_RK=count.expand_as(moments_RK).clone(),
            units_RK=count.expand_as(moments_RK).clone(),
            reward_calls=0,
            seconds=0.0,
        )
