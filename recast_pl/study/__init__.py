"""Studies: grids of runs by the command line, and reports over them with their statistical uncertainty.

    python -m recast_pl.study run STUDY.yaml
    python -m recast_pl.study report FOLDER

Neither loads a model: runs are processes of their own, and a report reads what they have left.
"""
