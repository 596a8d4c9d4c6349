"""Serves one reward: `python -m recast_pl.rewards.serve --reward recast_pl.rewards.Sharpness --port 8000`."""

from recast_pl.rewards.remote.server import main

if __name__ == "__main__":
    import recast_pl.rewards  # noqa: F401 - so that `--reward Sharpness` is known by its bare name

    main()
