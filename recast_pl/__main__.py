"""`python -m recast_pl fit --config configs/quickstart.yaml`."""


def main() -> None:
    """Runs the command line."""
    from recast_pl.cli import main as run

    run()


if __name__ == "__main__":
    main()
