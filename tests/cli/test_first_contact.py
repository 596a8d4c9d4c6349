"""What a newcomer gets wrong ends in one message that says what to do, without traceback or pages of usage."""

import json
import subprocess
import sys

import pytest
from command_line import CONFIGS, QUICKSTART

from recast_pl import __version__
from recast_pl.__main__ import VERBS, main
from recast_pl.callbacks.checkpoints import AtomicCheckpointIO
from recast_pl.error_messages import refusal
from recast_pl.rewards.serve import main as serve

CREDIT = CONFIGS / "credit"
LIGHT = "import sys; {}; print(sorted({{m.split('.')[0] for m in sys.modules}} & {{{}}}))"


def loaded(statement, *names):
    """Which of the packages a fresh interpreter has after the statement."""
    code = LIGHT.format(statement, ", ".join(map(repr, names)))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip().splitlines()[-1]


def test_rewards_come_without_lightning_and_model_libraries():
    assert loaded("import recast_pl.rewards", "lightning", "transformers", "diffusers", "peft") == "[]"


@pytest.mark.parametrize("words", [["--help"], [], ["fitt"], ["fit", "--config", "nowhere.yaml"]])
def test_the_overview_and_a_misspelt_verb_need_neither_torch_nor_lightning(words):
    statement = (
        "from recast_pl.__main__ import main\n"
        f"try: main({words})\n"
        "except SystemExit: pass\n"
        "import sys"
    )  # fmt: skip
    assert loaded(f"exec({statement!r})", "torch", "lightning") == "[]"


def test_the_overview_lists_what_the_command_line_has(capsys):
    from recast_pl.cli import ReCASTCLI

    assert set(VERBS) == set(ReCASTCLI.subcommands())
    with pytest.raises(SystemExit) as exit_:
        main(["--help"])
    assert exit_.value.code == 0
    shown = capsys.readouterr().out
    assert all(f"  {verb} " in shown for verb in VERBS)


def refused(capsys, *words):
    """The message of a command that must end with exit code 2."""
    with pytest.raises(SystemExit) as exit_:
        main(list(words))
    assert exit_.value.code == 2
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert "usage:" not in said
    said = said[said.index("error: ") :]
    assert len(said.splitlines()) <= 6
    return said


def test_a_misspelt_verb(capsys):
    assert "'fitt' (did you mean fit?)" in refused(capsys, "fitt")


def one_reward(path, **arguments):
    return ["--rewards.rewards", json.dumps({"a": {"class_path": path, "init_args": arguments}})]


PROMPTS = '{"class_path": "TextFile", "init_args": {"path": "nowhere.txt"}}'


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (one_reward("recast_pl.rewards.CLIPScor"), "did you mean recast_pl.rewards.CLIPScore?"),
        (one_reward("recast_pl.reward.CLIPScore"), "did you mean recast_pl.rewards.CLIPScore?"),
        (one_reward("PickScor"), "did you mean PickScore?"),
        (one_reward("recast_pl.rewards.CLIPScore", pretraind="x"), "did you mean pretrained?"),
        (["--credit.strategy", "Unifrom"], "credit.strategy: no class 'Unifrom' (did you mean Uniform?)"),
        (["--model.objektive", "DiffusionNFT"], "did you mean model.objective?"),
        (["--credit.every_n_step", "3"], "did you mean credit.every_n_steps?"),  # no abbreviation
        (["--model.objective.init_args.betta", "0.1"], "did you mean beta?"),
        (["--rewards.budgets", '{"jpeg": 1.0, "sharpnes": 1.0}'], "there is no reward sharpnes and it lacks"),
        (["--data.group_size", "1"], "data.group_size: expected 2 or more"),
        (["--data.group_size", "many"], "data.group_size: expected int, got many"),
        (["--model.optimizer.init_args.lr", "fast"], "model.optimizer.init_args.lr: expected float, got fast"),
        (["--credit.strategy.init_args.alpha", "x"], "credit.strategy.init_args.alpha: expected float, got x"),
        (
            ["--rewards.options", '{"jpeg": {"retrie": 1}}'],
            "RewardOptions has no argument 'retrie' (did you mean",
        ),
        (
            ["--rewards.options.jpeg.background", "true"],
            'jpeg.background cannot be set by itself here; put it into a YAML file, or give all as JSON: {"',
        ),
        (["--credit.strategy", "recast"], "credit.strategy: no class 'recast' (did you mean ReCAST?)"),
        (["--model.objective", "NFT"], "there are AWM, DDPO, DGPO,"),
        (
            ["--credit.strategy", "recast_pl.objectives.DiffusionNFT"],
            "recast_pl.objectives.DiffusionNFT is no CreditStrategy; there are SNR, Fixed,",
        ),
        (
            ["--credit.strategy.temperature", "0"],
            "credit.strategy.init_args.temperature: expected above 0, got 0.0",
        ),
        (
            ["--model.rollout.init_args.num_steps", "0"],
            "error: model.rollout.init_args.num_steps: expected 1 or",
        ),
        (
            ["--credit.strategy.estimator", "FromFile"],
            "credit.strategy.init_args.estimator.init_args.path\nAll keys: python -m recast_pl fit --help",
        ),
        (
            ["--config", str(CREDIT / "window.yaml"), "--credit.strategy.init_args.steps", "20"],
            "a window of 20 steps, but the rollout has 4",
        ),
        (["--data.train", PROMPTS], "no prompt file 'nowhere.txt'"),
        (["--model.policy.init_args.pretrained", "./no/folder"], "model.policy.init_args.pretrained"),
    ],
)
def test_what_is_misspelt_or_impossible(overlay, words, said, capsys, tmp_path):
    common = ["--trainer.logger.init_args.save_dir", str(tmp_path)]
    assert said in refused(capsys, "fit", "--config", QUICKSTART, "--config", overlay, *common, *words)


@pytest.mark.parametrize("verb", ["fit", "validate", "test", "predict", "profile", "export"])
def test_a_missing_checkpoint_is_told_before_anything_is_built(verb, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "recast_pl.cli.command_line.ReCASTCLI.instantiate_trainer", lambda cli: pytest.fail("late")
    )
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "last.ckpt").touch()
    near = f"the newest below {tmp_path} is {tmp_path}/checkpoints/last.ckpt"
    common = (verb, "--config", QUICKSTART, "--ckpt_path")
    said = refused(capsys, *common, str(tmp_path / "lost.ckpt"))
    assert f"--ckpt_path: there is no file {tmp_path}/lost.ckpt; {near}" in said
    assert f"{tmp_path} is a folder; {near}" in refused(capsys, *common, str(tmp_path))
    assert "knows no 'best'" in refused(capsys, *common, "best")
    if verb != "fit":
        assert "knows no 'last'" in refused(capsys, *common, "last")


def test_evidence_and_tables_of_something_else_are_refused_before_anything_is_loaded(capsys, tmp_path):
    place = ["--trainer.logger.init_args.save_dir", str(tmp_path)]
    said = refused(capsys, "fit", "--config", str(CONFIGS / "tiny" / "setting_a.yaml"),
                   *place, "--credit.strategy.estimator", "recast_pl.credit.FromFile",
                   "--credit.strategy.estimator.path", str(CREDIT / "quickstart.npz"))  # fmt: skip
    assert "quickstart.npz holds no profiles of layout, shape, only of clipscore, composition" in said
    said = refused(capsys, "fit", "--config", QUICKSTART, *place, "--credit.strategy", "recast_pl.credit.Fixed",
                   "--credit.strategy.path", str(CREDIT / "quickstart.npz"),
                   "--model.rollout.init_args.num_steps", "20")  # fmt: skip
    assert "is of 10 denoising steps, this run's rollout has 20 (model.rollout.init_args.num_steps)" in said


def test_a_reward_s_missing_package_is_no_traceback(overlay, capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "rapidocr", None)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text('a sign that says "open"\n')
    source = json.dumps({"class_path": "TextFile", "init_args": {"path": str(prompts)}})
    said = refused(capsys, "validate", "--config", QUICKSTART, "--config", overlay,
                   "--trainer.logger.init_args.save_dir", str(tmp_path),
                   *one_reward("recast_pl.rewards.OCR"), "--rewards.budgets", "null",
                   "--data.evaluation", source)  # fmt: skip
    assert "OCR needs the packages of the extra `ocr`" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--reward", "CLIPscor"], "no class 'CLIPscor' (did you mean CLIPScore?)"),
        (["--reward", "Sharpness", "--port", "80000"], "port: expected 0 to 65535, got 80000"),
        (
            ["--reward", "Sharpness", "--device", "warp"],
            "device: expected cpu, or a device that torch sees here, got",
        ),
        (
            ["--reward.class_path", "CLIPScore", "--reward.init_args.pretrained", "recast_pl://clipp"],
            "error: CLIPScore.pretrained: no embedded model 'recast_pl://clipp'",
        ),
    ],
)
def test_a_reward_s_server_refuses_in_words_too(words, said, capsys):
    with pytest.raises(SystemExit) as ended:
        serve(words)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_the_version(capsys):
    main(["--version"])
    assert capsys.readouterr().out == f"recast_pl {__version__}\n"


def test_a_verb_without_a_configuration(capsys):
    said = refused(capsys, "export")
    assert "no value for model.policy, data.train, data.evaluation, rewards.rewards, ckpt_path;" in said
    assert "--config configs/quickstart.yaml" in said
    assert "error: no value for ckpt_path\n" in refused(capsys, "export", "--config", QUICKSTART)


def test_a_run_folder_that_exists_is_gone_on_with_or_left_alone(overlay, capsys, tmp_path):
    place = ["--trainer.logger.init_args.save_dir", str(tmp_path), "--trainer.logger.init_args.version", "mine"]
    words = ["fit", "--config", QUICKSTART, "--config", overlay, *place]
    main([*words, "--ckpt_path", "last"])  # nothing is there
    folder = tmp_path / "recast_pl" / "mine"
    last = folder / "checkpoints" / "last.ckpt"
    written = last.stat().st_mtime_ns, (folder / "config.yaml").stat().st_mtime_ns
    assert f"{last} is another run's" in refused(capsys, *words)
    assert (last.stat().st_mtime_ns, (folder / "config.yaml").stat().st_mtime_ns) == written
    first = AtomicCheckpointIO().load_checkpoint(last)["iteration"]
    main([*words, "--ckpt_path", "last", "--trainer.max_epochs", "3"])
    assert (first, AtomicCheckpointIO().load_checkpoint(last)["iteration"]) == (4, 6)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "no such file"),
        (b"model: [\n", "no valid YAML"),
        (b"- a\n", "got a list"),
        (b"\xff\xfe\x80", "UTF-8"),
        (b"modell: {policy: x}\n", "did you mean model?"),
        (b"credit: {every_n_step: 3}\n", "did you mean credit.every_n_steps?"),
    ],
)
def test_configuration_files(content, said, capsys, tmp_path):
    path = tmp_path / "mine.yaml"
    if content is not None:
        path.write_bytes(content)
    assert said in refused(capsys, "fit", "--config", QUICKSTART, "--config", str(path))


def test_a_folder_is_no_configuration(capsys, tmp_path):
    assert "a folder" in refused(capsys, "fit", "--config", str(tmp_path))


def test_a_number_that_yaml_takes_for_text_is_a_number(capsys, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("model: {optimizer: {class_path: torch.optim.AdamW, init_args: {lr: 1e-4}}}\n")
    with pytest.raises(SystemExit) as exit_:
        main(["fit", "--config", QUICKSTART, "--config", str(path), "--print_config"])
    assert exit_.value.code == 0
    assert "lr: 0.0001" in capsys.readouterr().out


def test_a_model_that_cannot_be_fetched(overlay, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    words = ["--model.policy.init_args.pretrained", "nobody-at-all/nothing-here",
             "--trainer.logger.init_args.save_dir", str(tmp_path)]  # fmt: skip
    said = refused(capsys, "fit", "--config", QUICKSTART, "--config", overlay, *words)
    assert "nobody-at-all/nothing-here" in said
    assert "the path of a folder" in said


def test_no_gpu(overlay, capsys, monkeypatch):
    import torch

    if torch.cuda.is_available() or torch.backends.mps.is_available():
        pytest.skip("there is one")
    said = refused(capsys, "fit", "--config", QUICKSTART, "--config", overlay, "--trainer.accelerator", "gpu")
    assert "--trainer.accelerator auto" in said


def test_refusals_of_setup_are_messages_and_tracebacks_can_be_had(overlay, capsys, tmp_path, monkeypatch):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a cat\n")
    source = f'{{"class_path": "TextFile", "init_args": {{"path": "{prompts}"}}}}'
    words = ["fit", "--config", QUICKSTART, "--config", overlay, "--data.train", source,
             "--trainer.logger.init_args.save_dir", str(tmp_path)]  # fmt: skip
    assert "needs the metadata 'include'" in refused(capsys, *words)
    monkeypatch.setenv("RECAST_PL_TRACEBACK", "1")
    with pytest.raises(ValueError, match="needs the metadata"):
        main(words)


@pytest.mark.parametrize("error", [RuntimeError, ValueError, OSError])
def test_bugs_keep_their_tracebacks(error, overlay, tmp_path, monkeypatch):
    def broken(self, batch, batch_idx):
        raise error("a bug")

    monkeypatch.setattr("recast_pl.module.ReCASTModule.training_step", broken)
    words = ["--trainer.num_sanity_val_steps", "0", "--trainer.logger.init_args.save_dir", str(tmp_path)]
    with pytest.raises(error, match="a bug"):
        main(["fit", "--config", QUICKSTART, "--config", overlay, *words])


def test_a_gated_model_says_how_to_get_at_it():
    import httpx2
    from huggingface_hub.errors import GatedRepoError

    def from_pretrained():
        response = httpx2.Response(403, request=httpx2.Request("GET", "https://huggingface.co/a/b"))
        try:
            raise GatedRepoError("403", response=response)
        except GatedRepoError as error:
            raise OSError("a/b is gated") from error

    with pytest.raises(OSError, match="gated") as caught:
        from_pretrained()
    said = refusal(caught.value)
    assert "accept its licence" in said
    assert "hf auth login" in said
