"""`python -m recast_pl fit --config configs/quickstart.yaml`.

Nothing heavy is imported before a verb is known and its configuration files can be read.
"""

import sys

from recast_pl import __version__
from recast_pl.error_messages import closest, help_text, refusal, shows_traceback, unreadable_configuration

VERBS = {  # as the subcommands of recast_pl.cli, whose import takes seconds
    "fit": "train; evaluate held-out prompts before, between and after",
    "validate": "the training rewards on held-out prompts",
    "test": "the judges, which never reach the objective, on the same prompts",
    "predict": "pictures of the held-out prompts, with their scores",
    "profile": "how early each reward can be told, and the W that follows, without training",
    "memory": "what a configuration takes on each device, without loading a weight",
    "export": "a checkpoint as a LoRA or a pipeline that diffusers loads",
}
PROGRAM = "python -m recast_pl"


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line; what the user can mend ends in one message and exit code 2.

    Raises:
        Exception: what is no refusal, as it came; with RECAST_PL_TRACEBACK=1 everything.
    """
    given = sys.argv[1:] if arguments is None else arguments
    if not given or given[0] in ("-h", "--help"):
        print(help_text(PROGRAM, VERBS), file=sys.stdout if given else sys.stderr)
        sys.exit(0 if given else 2)
    if given[0] == "--version":
        print(f"recast_pl {__version__}")
        return
    if not given[0].startswith("-") and given[0] not in VERBS:
        _end(f"no verb {given[0]!r}{closest(given[0], VERBS)}; there are {', '.join(VERBS)}")
    if wrong := unreadable_configuration(given):
        _end(wrong)
    from recast_pl.cli import main as run

    try:
        run(arguments)
    except Exception as error:
        message = None if shows_traceback() else refusal(error)
        if message is None:
            raise
        _end(message)


def _end(message: str) -> None:
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
