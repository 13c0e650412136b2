"""Calibrating stored generations on random splits again and again: does the promise hold, and what does it save?

Source: CALM, section "Experiments" (random splits of the validation set).
"""
