"""Experiments with early exits: their effect on outputs, their savings, and tests of the promise on random splits.

The paper's experiments, floating point operations by formula, time by the clock, and calibrations of stored generations
on random splits. Import from the modules: only some need JAX.

Source: CALM, section "Experiments" (random splits of the validation set).
"""
