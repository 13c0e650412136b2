"""What early exits do to outputs, what they save, and whether the promise holds on data that is split at random.

The paper's experiments, floating point operations by formula, time by the clock, and calibrations of stored generations
on random splits. Modules are imported one by one: only some need JAX.

Source: CALM, section "Experiments" (random splits of the validation set).
"""
