"""What tests of your own parts need: checks of a reward, a policy of one parameter, a pipeline in miniature.

Needs no pytest. A name's module is imported when the name is asked for.
"""

from typing import TYPE_CHECKING

from recast_pl.lazy_names import lazy_names

if TYPE_CHECKING:
    from recast_pl.testing.miniature import save_clip, save_pipeline
    from recast_pl.testing.one_pixel import Near, OnePixel, TwoModes
    from recast_pl.testing.one_pixel_run import GROUP_SIZE, theta, train
    from recast_pl.testing.reward_tester import CHECKS, RewardCase, RewardTester
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        dict.fromkeys(("save_clip", "save_pipeline"), "recast_pl.testing.miniature")
        | dict.fromkeys(("Near", "OnePixel", "TwoModes"), "recast_pl.testing.one_pixel")
        | dict.fromkeys(("GROUP_SIZE", "theta", "train"), "recast_pl.testing.one_pixel_run")
        | dict.fromkeys(("CHECKS", "RewardCase", "RewardTester"), "recast_pl.testing.reward_tester"),
    )

__all__ = [
    "CHECKS",
    "GROUP_SIZE",
    "Near",
    "OnePixel",
    "RewardCase",
    "RewardTester",
    "TwoModes",
    "save_clip",
    "save_pipeline",
    "theta",
    "train",
]
