"""The strategies of other papers, as overlays of the real command line."""

import pytest
import torch
from command_line import CONFIGS, credit_of, run
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ELSEWHERE = ("uniform", "snr", "recast", "fixed")  # test_cli_credit.py
QUICK = ("--trainer.max_epochs", "1", "--trainer.limit_val_batches", "0", "--trainer.num_sanity_val_steps", "0")


def overlays():
    return sorted({path.stem for path in (CONFIGS / "credit").glob("*.yaml")} - set(ELSEWHERE))


@pytest.mark.parametrize("name", overlays())
def test_an_overlay_trains_keeps_budgets_and_shows_its_W(name, overlay, tmp_path):
    cli = run("fit", overlay, tmp_path, "--config", str(CONFIGS / "credit" / f"{name}.yaml"), *QUICK)
    assert type(credit_of(cli).strategy).__name__.lower() == name.replace("_", "")
    assert cli.model.iteration == 2
    assert cli.model.policy.distance_to_old() > 0
    shares = cli.model.rewards.budgets_R / cli.model.rewards.budgets_R.sum()
    torch.testing.assert_close(cli.model.credit.weights.values_RK.mean(1), shares, atol=1e-9, rtol=0)
    (events,) = tmp_path.rglob("events.out.tfevents.*")
    shown = EventAccumulator(str(events), size_guidance={"images": 0})
    shown.Reload()
    assert "credit/W" in shown.Tags()["images"]


def test_a_stage_of_an_unknown_reward_names_its_key(overlay, tmp_path):
    stages = '{"early": ["jpg"], "middle": ["composition"], "late": ["clipscore"]}'
    with pytest.raises(
        ValueError, match=r"credit\.strategy\.init_args\.stages: names jpg.*are clipscore, comp"
    ):
        run("fit", overlay, tmp_path, "--config", str(CONFIGS / "credit" / "stage.yaml"),
            "--credit.strategy.stages", stages)  # fmt: skip
