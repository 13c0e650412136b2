"""What the launcher of the Flex Template runs: `calm-beam calibrate`, with the template's parameters as flags."""

import sys

from calm_beam.launch.cli import main

if __name__ == "__main__":
    sys.exit(main(["calibrate", *sys.argv[1:]]))
