"""Tools of the people who build the package: training of the tiny model, public evaluations, scripts. Not published."""
