"""Tools for building the package: training of the tiny model, public evaluations, pages, scripts. Not published."""
