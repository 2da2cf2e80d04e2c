"""Experiments: the grid language, its runner, and what is made of the results (statistics, figures, the HTML report).

    grid        configs/grids/*.py -> cells with names, labels and configs (no JAX)
    results     what a grid leaves on disk, read back: results.jsonl, metrics.jsonl, the cells' own files
    statistics  seed intervals, paired differences, best rates, gaps
    plots       the figures, as SVG and PNG
    report      all of it on one self-contained page
"""
