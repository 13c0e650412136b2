"""Malformed input, case by case on the command line, and files with random damage through their readers."""
