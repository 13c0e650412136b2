"""Runs every case and prints its time and its message: `python -m tests.malformed [WORDS OF A NAME]`."""

import pathlib
import sys
import tempfile

from .place import build_place
from .test_cases import ALL_CASES, problems


def main() -> int:
    """Returns 1 if anything is wrong with a case."""
    wanted = " ".join(sys.argv[1:])
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        place = build_place(pathlib.Path(folder, "place"))
        for number, (name, case) in enumerate(ALL_CASES.items()):
            if wanted not in name:
                continue
            own = pathlib.Path(folder, str(number))
            own.mkdir()
            ended, found = problems(case, place, own)
            wrong += bool(found)
            print(
                f"{ended.seconds:6.1f} s {ended.peak_mib:6.0f} MiB  {'WRONG' if found else 'right'}  {name}", flush=True
            )
            for problem in found:
                print(f"    {problem}")
            for line in ended.err.splitlines()[-4:]:
                print(f"    | {line[:300]}")
    print(f"{wrong} wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
