"""A small English to French task, generated from a grammar, for demonstrations that need no download."""
