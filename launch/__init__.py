"""The command line: flags, runners, progress and terminal output."""
