"""Malformed input, case by case through the command line, and files with random damage through their readers."""
