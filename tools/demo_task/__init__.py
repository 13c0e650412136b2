"""The sentences of the demo task, from our own lexicon and grammar.

Their output is in calm_beam/inputs/demo.
"""
